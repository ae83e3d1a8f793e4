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
SECTION = re.compile(r"^## ", re.M)
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
    node: NotebookNode, chapter: str, judgement: Judgement, claims: Mapping[str, Claim], banner: str
) -> tuple[NotebookNode, Figures]:
    """A chapter as its page shows it, from a notebook with its findings selected, and its figures.

    The checks are shown as the workflow judged them; what it alone has seen, at further seeds, stands with the last.
    """
    card = book.card(chapter)
    explorables = {explorable["after"]: explorable["name"] for explorable in card.get("explore", ())}
    records = [record for record in judgement.records if record.chapter == chapter]
    not_shown = {record.key: record for record in records}
    checks_of_section: list[Record] = []
    shown: list[NotebookNode] = []
    drawn: Figures = {}
    for cell in _sections(node.cells):
        if cell.cell_type == "markdown" and cell.source.startswith("## ") and checks_of_section:
            shown.append(_html("checks", records=checks_of_section))
            checks_of_section = []
        if FOLDED & _tags(cell):
            cell.metadata.setdefault("mystnb", {})["code_prompt_show"] = f"Code: {_content(cell)}"
        shown.append(cell)
        if "schematic" in card and len(shown) == 1:
            shown.append(_schematic(**card["schematic"]))
        if cell.cell_type == "code":
            checks = [output.data[MIME] for output in cell.outputs if MIME in output.get("data", {})]
            checks_of_section += [not_shown.pop((check["claim"], check["check"])) for check in checks]
            cell.outputs = [output for output in cell.outputs if not _is_hidden(output)]
            figure = figures.of_cell(cell)
            if figure:
                drawn[figure.name] = figure
            if figure and figure.name in explorables:
                shown.append(_html("explorable", name=explorables[figure.name]))
    last_checks = [*checks_of_section, *not_shown.values()]
    if last_checks:
        shown.append(_html("checks", records=last_checks))
    boxes = banner, _card(card, judgement, records, claims, drawn), _box(chapter, claims)
    shown[0].source = below_title(shown[0].source, *boxes)
    node.cells = list(_joined(shown))
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = book.with_numbers(cell.source)
    return notebooks.numbered(node), drawn


def _content(cell: NotebookNode) -> str:
    """What a reader finds in folded code."""
    if "figure" in cell.metadata.get("mystnb", {}):
        return "the figure"
    parts = {"claims.": "checks", "glue(": "numbers of the text", "listing(": "library functions"}
    contents = [name for start, name in parts.items() if re.search(rf"^ *{re.escape(start)}", cell.source, re.M)]
    return " and ".join(contents) or ("setup" if {"setup", "parameters"} & _tags(cell) else "preparation")


def _is_hidden(output: NotebookNode) -> bool:
    """Whether a page shows an output elsewhere, as it does checks, or not at all: bars of progress, logs."""
    lines = output.get("text", "").splitlines() if output.get("name") == "stdout" else []
    logged = bool(lines) and all(LOG.match(line) for line in lines)
    return MIME in output.get("data", {}) or output.get("name") == "stderr" or logged


def evidence(cells: list[NotebookNode]) -> Evidence:
    """For each claim of an executed chapter the cells that check it, and a figure.

    That is the last figure before its first check in the same section, or else the next.
    """
    by_claim: Evidence = {}
    heads = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and SECTION.search(cell.source)]
    for start, end in pairwise([0, *heads, len(cells)]):
        section = cells[start:end]
        drawn = [cell.metadata.get("mystnb", {}).get("figure", {}).get("name") for cell in section]
        for i, cell in enumerate(section):
            before_then_after = [*drawn[i::-1], *drawn[i:]]
            nearest = next(filter(None, before_then_after), "")
            for output in cell.get("outputs", ()):
                check = output.get("data", {}).get(MIME)
                if not check:
                    continue
                figure, code = by_claim.get(check["claim"], (nearest, ""))
                if cell.source not in code:
                    code = f"{code}\n\n{cell.source}".lstrip()
                by_claim[check["claim"]] = figure, code
    return by_claim


def below_title(text: str, *boxes: str) -> str:
    """A page with boxes below its title, which is its first line."""
    title, _, rest = text.partition("\n")
    return "\n\n".join([title, *filter(None, boxes), rest.lstrip("\n")])


def _card(
    card: Mapping[str, Any], judgement: Judgement, records: list[Record], claims: Mapping[str, Claim], drawn: Figures
) -> str:
    """What was asked, what was found and why to believe it, on one screen; "" for a chapter without a card."""
    if not card:
        return ""
    of_card = [claims[name] for name in card["claims"]]
    unsupported = [claim for claim in of_card if not claim.supported]
    return render(
        "card.md.j2",
        card=card,
        run=judgement.run,
        records=records,
        claim=of_card[0],
        missing=unsupported[0] if unsupported else None,
        figure=drawn.get(card.get("figure", "")),
        kinds=KINDS,
    )


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
