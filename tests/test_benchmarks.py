"""The benchmarks: what the command says, and that both sides of a pair agree."""

import pytest

from maintenance.benchmarks import __main__ as command
from maintenance.benchmarks import timing


def test_the_command_is_red_where_a_pair_does_not_hold(monkeypatch, capsys):
    for name, bound in (("mathematics", 2), ("loops", 0.1)):
        row = timing.row(f"a pair of {name}", [2.0], [1.0], bound)
        monkeypatch.setattr(command.FILES[name], "PAIRS", [lambda row=row: row])
    assert (command.main(["mathematics", "loops"]), command.main(["loops"])) == (1, 0)
    assert capsys.readouterr().out.count("| a pair of loops") == 2
    with pytest.raises(SystemExit):
        command.main(["nothing"])


@pytest.mark.slow
def test_both_sides_of_every_pair_agree(monkeypatch):
    """One turn each: what they assert of their two sides is what counts here, not the time."""
    once = timing.compare
    for file in command.FILES.values():
        monkeypatch.setattr(file, "compare", lambda *a, **more: once(*a, **more | {"repeats": 1}))
    assert all(pair()["ratio"] > 0 for file in command.FILES.values() for pair in file.PAIRS)
