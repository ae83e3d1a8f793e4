"""Is this checkout the release that a tag names? ``python .ci/release.py v0.2.0 NOTES.md``

The tag, pyproject.toml, both packages, CITATION.cff and the first heading of CHANGELOG.md must name one version, and
the heading its day. Then the section below the heading is written to the file of notes. Otherwise each place that
differs is named, and the exit status is 1.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def versions(root: Path) -> dict[str, str]:
    """The version that each place names, by place; "none" where it names none."""
    places = {
        "normgrowth/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## ([^,\s]+)",
    }
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {"pyproject.toml": project["version"]}
    for place, pattern in places.items():
        match = re.search(pattern, (root / place).read_text(encoding="utf-8"), re.M)
        stated[place] = match[1] if match else "none"
    return stated


def first_section(changelog: str) -> tuple[str, str]:
    """The first heading of the changelog, and the text below it."""
    heading, _, below = changelog.partition("\n## ")[2].partition("\n")
    return heading, below.partition("\n## ")[0].strip() + "\n"


def faults(root: Path, tag: str) -> list[str]:
    """What keeps the checkout from being the release of this tag."""
    wrong = [f"{place} has {version}" for place, version in versions(root).items() if f"v{version}" != tag]
    heading, text = first_section((root / "CHANGELOG.md").read_text(encoding="utf-8"))
    if not re.fullmatch(r"\S+, \d{4}-\d\d-\d\d", heading):
        wrong.append(
            f"CHANGELOG.md has the heading '{heading}', and needs the day: '{tag.removeprefix('v')}, 2026-01-31'"
        )
    if not text.strip():
        wrong.append("CHANGELOG.md has no text under its first heading")
    return wrong


def main(root: Path, tag: str, notes: Path) -> int:
    wrong = faults(root, tag)
    if wrong:
        print(f"the tag is {tag}, but", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    notes.write_text(first_section((root / "CHANGELOG.md").read_text(encoding="utf-8"))[1], encoding="utf-8")
    print(f"{tag}: all places agree; wrote {notes}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(ROOT, sys.argv[1], Path(sys.argv[2])))
