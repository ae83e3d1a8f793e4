"""English sentences that ship with the package, so that measured numbers do not depend on the version of Python."""

from __future__ import annotations

from pathlib import Path

__all__ = ["first"]

FILE = Path(__file__).with_suffix(".txt")  # comments at its beginning, after a #, say where the sentences come from


def first(count: int) -> list[str]:
    """The first ``count`` sentences, all different, of 6 to 40 words each.

    Raises:
        ValueError: ``count`` is below 1, or above the number of sentences.

    >>> len(first(24)), first(1)[0].endswith(".")
    (24, True)
    """
    lines = FILE.read_text(encoding="utf-8").splitlines()
    sentences = [line for line in lines if not line.startswith("#")]
    if not 1 <= count <= len(sentences):
        raise ValueError(f"count = {count}: ask for 1 to {len(sentences)} sentences")
    return sentences[:count]
