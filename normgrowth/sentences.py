"""English sentences that ship with the package: the same for every Python, so that measured numbers are the same."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")  # its first lines, after a #, say where the sentences come from


def first(count: int) -> list[str]:
    """The first ``count`` sentences, of 6 to 40 words each, none twice.

    Raises:
        ValueError: more than there are, or fewer than one.

    >>> len(first(24)), first(1)[0].endswith(".")
    (24, True)
    """
    lines = FILE.read_text(encoding="utf-8").splitlines()
    sentences = [line for line in lines if not line.startswith("#")]
    if not 1 <= count <= len(sentences):
        raise ValueError(f"{count} sentences were asked for; there are 1 to {len(sentences)}")
    return sentences[:count]
