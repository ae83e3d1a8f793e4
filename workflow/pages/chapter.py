"""An executed chapter arranged for its page: card, checks as one line a section, what is folded in one, explorables."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import nbformat
from nbformat import NotebookNode

from nbutils.claims import KINDS, MIME
from nbutils.claims.records import Record
from workflow import ROOT, book, notebooks
from workflow.judge import Judgement
from workflow.pages import figures, verdicts
from workflow.pages.rendering import render
from workflow.pages.verdicts import Claim

SCHEMATICS = ROOT / "book" / "_static" / "schematics"
Figures = dict[str, figures.Figure]  # by name
Evidence = dict[str, tuple[str, str]]  # by claim: the name of a figure, and code
FOLDED = {"hide-input", "hide-cell"}
LOG = re.compile(r"\[\d{4}-\d\d-\d\d [^]]*\] \[(INFO|WARNING|ERROR)\]")


def grafted(chapter: str, executed: NotebookNode) -> NotebookNode:
    """Today's text of a chapter with the outputs of its executed notebook, code cell by code cell."""
    node = notebooks.executable(book.source(chapter))
    empty = [cell for cell in node.cells if cell.cell_type == "code"]
    run = [cell for cell in executed.cells if cell.cell_type == "code" and "injected-parameters" not in _tags(cell)]
    for cell, run_cell in zip(empty, run, strict=True):
        cell.outputs = copy.deepcopy(run_cell.outputs)
        cell.execution_count = run_cell.execution_count
    kernel = executed.metadata
    node.metadata = {"kernelspec": kernel.kernelspec, "language_info": kernel.get("language_info", {})}
    return node


def select_findings(text: str, claims: Mapping[str, Claim]) -> str:
    """Show each ``:::{finding} claim …`` only if the run supports it; ``claim=verdict`` asks for another verdict.

    What the run does not support is left out with a word in its place, unless the block asks for another verdict.

    Raises:
        ValueError: a claim that ``claims.yml`` does not list.
    """

    def shown(match: re.Match[str]) -> str:
        for name, _, asked in (word.partition("=") for word in match[1].split()):
            if name not in claims:
                raise ValueError(f":::{{finding}} {match[1]}: claims.yml lists no claim {name!r}")
            if asked and claims[name].verdict != asked:
                return ""
            if not asked and not claims[name].supported:
                return render("left_out.md.j2", claim=claims[name])
        return match[2]

    return notebooks.FINDING.sub(shown, text)


def select_findings_in(node: NotebookNode, chapter: str, claims: Mapping[str, Claim]) -> NotebookNode:
    """Leave out of text and captions what the run does not support."""
    unexpected = [claim for claim in claims.values() if chapter in claim.listed["chapters"] and claim.unexpected]
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = select_findings(cell.source, claims)
        elif unexpected and "figure" in (shown := cell.metadata.get("mystnb", {})):
            drawn, see, _ = shown["figure"]["caption"].partition("What to see")
            if see:
                shown["figure"]["caption"] = render("caption.md.j2", drawn=drawn, unexpected=unexpected)
    return node


def page(
    node: NotebookNode, chapter: str, result: Judgement, claims: Mapping[str, Claim], banner: str
) -> tuple[NotebookNode, Figures]:
    """A chapter as its page shows it, from a notebook with its findings selected, and its figures.

    The checks are shown as the workflow judged them; what it alone has seen, at further seeds, stands with the last.
    """
    card = book.card(chapter)
    explored = {each["after"]: each["name"] for each in card.get("explore", ())}
    records = [record for record in result.records if record.chapter == chapter]
    judged, waiting = {record.key: record for record in records}, list[Record]()
    shown, drawn = list[NotebookNode](), Figures()
    for cell in _sections(node.cells):
        if cell.cell_type == "markdown" and cell.source.startswith("## ") and waiting:
            shown.append(_html("checks", records=waiting))
            waiting = []
        if FOLDED & _tags(cell):
            cell.metadata.setdefault("mystnb", {})["code_prompt_show"] = f"Code: {_content(cell)}"
        shown.append(cell)
        if "schematic" in card and len(shown) == 1:
            shown.append(_schematic(**card["schematic"]))
        if cell.cell_type == "code":
            checks = [output.data[MIME] for output in cell.outputs if MIME in output.get("data", {})]
            waiting += [judged.pop((each["claim"], each["check"])) for each in checks]
            cell.outputs = [output for output in cell.outputs if not _unseen(output)]
            if figure := figures.of_cell(cell):
                drawn[figure.name] = figure
                if figure.name in explored:
                    shown.append(_html("explorable", name=explored[figure.name]))
    if waiting := [*waiting, *judged.values()]:
        shown.append(_html("checks", records=waiting))
    boxes = banner, _card(card, result, records, claims, drawn), _box(chapter, claims)
    shown[0].source = below_title(shown[0].source, *boxes)
    node.cells = list(_joined(shown))
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = to_notebooks(cell.source)
    return notebooks.numbered(node), drawn


def _content(cell: NotebookNode) -> str:
    """What a reader finds in folded code."""
    if "figure" in cell.metadata.get("mystnb", {}):
        return "the figure"
    parts = {"claims.": "checks", "glue(": "numbers of the text", "listing(": "functions of nbutils"}
    found = [name for start, name in parts.items() if re.search(rf"^ *{re.escape(start)}", cell.source, re.M)]
    return " and ".join(found) or ("setup" if {"setup", "parameters"} & _tags(cell) else "preparation")


def _unseen(output: NotebookNode) -> bool:
    """Whether a page shows an output elsewhere, as it does checks, or not at all: bars of progress, logs."""
    lines = output.get("text", "").splitlines() if output.get("name") == "stdout" else []
    logged = bool(lines) and all(LOG.match(line) for line in lines)
    return MIME in output.get("data", {}) or output.get("name") == "stderr" or logged


def evidence(cells: list[NotebookNode]) -> Evidence:
    """For each claim of an executed chapter, the cells that check it, and of the figures in the section of its first
    check the last before that, or else the next."""
    found = Evidence()
    heads = [i for i, x in enumerate(cells) if x.cell_type == "markdown" and re.search(r"^## ", x.source, re.M)]
    for section in (cells[i:j] for i, j in pairwise([0, *heads, len(cells)])):
        drawn = [cell.metadata.get("mystnb", {}).get("figure", {}).get("name") for cell in section]
        for i, cell in enumerate(section):
            near = next(filter(None, [*drawn[i::-1], *drawn[i:]]), "")
            for output in cell.get("outputs", ()):
                if check := output.get("data", {}).get(MIME):
                    figure, code = found.get(check["claim"], (near, ""))
                    new = "" if cell.source in code else f"\n\n{cell.source}"
                    found[check["claim"]] = figure, (code + new).lstrip()
    return found


def to_notebooks(text: str) -> str:
    """Links to chapters: their sources end in .md, what Sphinx reads in .ipynb."""
    return re.sub(r"\]\((\d\d-[\w-]+)\.md", r"](\1.ipynb", text)


def below_title(text: str, *boxes: str) -> str:
    """A page with boxes below its title, which is its first line."""
    title, _, rest = text.partition("\n")
    return "\n\n".join([title, *filter(None, boxes), rest.lstrip("\n")])


def _card(
    card: Mapping[str, Any], result: Judgement, records: list[Record], claims: Mapping[str, Claim], drawn: Figures
) -> str:
    """What was asked, what was found and why to believe it, on one screen; "" for a chapter without a card."""
    if not card:
        return ""
    rested = [claims[name] for name in card["claims"]]
    missing = next((claim for claim in rested if not claim.supported), None)
    known = {"claim": rested[0], "missing": missing, "figure": drawn.get(card.get("figure", "")), "kinds": KINDS}
    return render("card.md.j2", card=card, run=result.run, records=records, **known)


def _box(chapter: str, claims: Mapping[str, Claim]) -> str:
    """All claims of a chapter, folded."""
    mine = [claim for claim in claims.values() if chapter in claim.listed["chapters"]]
    return render("verdict_box.md.j2", chapter=chapter, claims=mine, counts=verdicts.counts)


def _schematic(name: str, alt: str) -> NotebookNode:
    """A drawing below a chapter's introduction; its panels stand beside each other where there is room."""
    panels = [path.read_text(encoding="utf-8").strip() for path in sorted(SCHEMATICS.glob(f"{name}-*.svg"))]
    return _html("schematic", alt=alt, panels=panels)


def _joined(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells, with neighbours that are folded and show nothing as one: a reader opens them all or none."""
    last = None
    for cell in cells:
        folded = cell.cell_type == "code" and FOLDED & _tags(cell)
        silent = folded and all("scrapbook" in output.get("metadata", {}) for output in cell.outputs)
        if silent and last is not None:
            last.source += f"\n\n{cell.source}"
            last.outputs += cell.outputs
            continue
        yield cell
        last = cell if silent else None


def _sections(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells, with one of prose divided where a section begins in it."""
    for cell in cells:
        if cell.cell_type != "markdown":
            yield cell
            continue
        for part in re.split(r"\n(?=(?:\([\w-]+\)=\n)?## )", cell.source):
            yield _markdown(part)


def _html(template: str, **values: Any) -> NotebookNode:
    return _markdown(render(f"{template}.html.j2", **values))


def _markdown(text: str) -> NotebookNode:
    return nbformat.v4.new_markdown_cell(text)


def _tags(cell: NotebookNode) -> set[str]:
    return {*cell.metadata.get("tags", ())}
