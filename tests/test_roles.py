"""One rule for roles: claims with one logic have one verdict (``book/running.md``, Roles)."""

import pytest

from workflow import report

PAIRS = [
    ("theorem1", "any-network", "§6 implies Theorem 1: what refutes the one refutes the other"),
    ("theorem7", "theorem8", "both hold for sublayers without biases and inputs that are exactly homogeneous"),
]


@pytest.mark.parametrize(("one", "other", "why"), PAIRS, ids=[f"{one} and {other}" for one, other, _ in PAIRS])
def test_equal_logic_has_equal_verdicts(one, other, why):
    verdicts = report.load_verdicts()
    assert verdicts[one] == verdicts[other], why
