"""What stands in ``book/``: the chapters, the card and the code cells of each, and the list of claims."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nbutils.claims import VERDICTS
from workflow import ROOT

CLAIMS = ROOT / "book" / "claims.yml"
NEEDED = {"id", "chapters", "source", "statement", "object", "expected", "why"}
OPTIONAL = {"corrected", "ours", "published", "scale"}
OBJECTS = ("proof", "untrained", "trained here", "published numbers", "repository", "pretrained")
NAMES_ITS_MODELS = {"trained here": "its size and steps", "pretrained": "its model"}  # what has to follow the colon
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(?:---\n.*?\n---\n|(?::[\w-]+:[^\n]*\n)*)(.*?)^```$", re.M | re.S)


def configuration() -> dict[str, Any]:
    """What ``_config.yml`` says."""
    return yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))


def chapters() -> list[str]:
    """Names of the chapters, in the order of ``_toc.yml``: the pages listed there that are notebooks."""
    contents = (ROOT / "_toc.yml").read_text(encoding="utf-8")
    listed = re.findall(r"^ *- file: ([\w-]+)$", contents, re.M)
    return [name for name in listed if _is_notebook(source(name))]


def _is_notebook(page: Path) -> bool:
    return page.exists() and page.read_text(encoding="utf-8").startswith("---\njupytext:")


def number(chapter: str) -> int:
    """The number of a chapter, from 1: its place among the chapters of ``_toc.yml``."""
    return chapters().index(chapter) + 1


def source(chapter: str) -> Path:
    return ROOT / "book" / f"{chapter}.md"


def title(chapter: str) -> str:
    """The heading of a chapter's page: its number, and the heading of its source."""
    heading = source(chapter).read_text(encoding="utf-8").partition("\n# ")[2].partition("\n")[0]
    return f"{number(chapter)}. {heading}"


def with_numbers(text: str) -> str:
    """A text in which a link called "chapter" says the chapter's number, and leads to its notebook.

    No text types a number: ``[chapter](t5.md)`` is ``[chapter 5](t5.ipynb)`` while T5 is the fifth.
    """
    numbers = {name: place for place, name in enumerate(chapters(), 1)}
    names = "|".join(numbers)
    text = re.sub(rf"\[([Cc]hapter)\]\(({names})\.md", lambda m: f"[{m[1]} {numbers[m[2]]}]({m[2]}.md", text)
    return re.sub(rf"\]\(({names})\.md", r"](\1.ipynb", text)


def card(chapter: str) -> dict[str, Any]:
    """What stands at the head of a chapter's page, from the front matter of its source; empty where it has none."""
    front = source(chapter).read_text(encoding="utf-8").partition("---\n")[2].partition("\n---\n")[0]
    return yaml.safe_load(front).get("card", {})


def code_cells(chapter: str) -> list[str]:
    """The code of a chapter, cell by cell, without directives' options."""
    return [match[1] for match in CELL.finditer(source(chapter).read_text(encoding="utf-8"))]


@cache
def claims(file: Path = CLAIMS) -> dict[str, dict[str, Any]]:
    """The claims that a file lists, by id, in order.

    Raises:
        ValueError: the file is no list, an id is missing or listed twice, a field is unknown or missing, or an expected
            verdict or an object does not exist. The message names the claim.
    """
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8")) or []
    except yaml.YAMLError as error:
        raise ValueError(f"{file.name}: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{file.name}: a list of entries is expected; got {str(entries)[:80]}")
    listed: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name = entry.get("id") if isinstance(entry, dict) else None
        if not name:
            raise ValueError(f"{file.name}: an entry has no id: {entry}")
        faults = [f"unknown field {field!r}" for field in sorted(set(entry) - NEEDED - OPTIONAL)]
        faults += [f"missing field {field!r}" for field in sorted(NEEDED - set(entry))]
        if name in listed:
            faults.append("listed twice")
        if not {*str(entry.get("expected", "open")).split(" or ")} <= {*VERDICTS}:
            faults.append(f"expected is one of {', '.join(VERDICTS)}, or `open or …`; got {entry['expected']!r}")
        faults += _faults_of_objects(entry)
        if faults:
            raise ValueError(f"{file.name}: claim {name!r}: {', '.join(faults)}")
        listed[name] = entry
    return listed


def objects(claim: Mapping[str, Any]) -> dict[str, str]:
    """On what a claim is judged: each object that ``claims.yml`` names, with what it says of it after a colon.

    >>> objects({"object": ["proof", "trained here: nine networks, 400 steps"]})
    {'proof': '', 'trained here': 'nine networks, 400 steps'}
    """
    listed = claim["object"]
    entries = [listed] if isinstance(listed, str) else listed
    parts = [entry.partition(":") for entry in entries]
    return {kind.strip(): detail.strip() for kind, _, detail in parts}


def _faults_of_objects(claim: dict[str, Any]) -> list[str]:
    listed = claim.get("object", [])
    entries = listed if isinstance(listed, list) else [listed]
    if not all(isinstance(entry, str) for entry in entries):
        return [f'object is a text "kind: detail" or a list of such texts; got {listed!r}']
    faults = []
    for kind, detail in objects({"object": entries}).items():
        if kind not in OBJECTS:
            faults.append(f"unknown object {kind!r}: choose of {', '.join(OBJECTS)}")
        elif kind in NAMES_ITS_MODELS and not detail:
            faults.append(f"object {kind!r} names {NAMES_ITS_MODELS[kind]} after a colon")
    return faults


def origin(claim: dict[str, Any]) -> str:
    """Where in the paper a claim stands, in both versions; a question of ours says so."""
    if claim.get("ours"):
        return "our question"
    first = claim["source"] if claim["source"].startswith(("published", "released")) else f"preprint {claim['source']}"
    return "; published ".join(filter(None, [first, claim.get("published")]))


def version(claim: dict[str, Any]) -> str:
    """Which version of the paper makes a claim: ``both``, ``preprint only``, …; "" for a question of ours."""
    if claim.get("ours"):
        return ""
    if claim["source"] == "released code" or claim.get("published"):
        return "both versions" if claim.get("published") else "released code"
    return "published only" if claim["source"].startswith("published") else "preprint only"
