"""How an executed chapter is shown: a card at its head, plumbing folded, checks as a line a section, explorables."""

from __future__ import annotations

import ast
import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import nbformat
import yaml
from nbformat import NotebookNode

from nbutils.claims import KINDS, MIME
from nbutils.claims.records import Record, format_band, format_measured, line
from workflow import ROOT, report
from workflow.findings import bind, corrected
from workflow.scorecard import VERDICT_ORDER, badge, origin

CARDS = ROOT / "book" / "glance.yml"
SCHEMATICS = ROOT / "book" / "_static" / "schematics"
KINDS_TOLD = "running.html#how-a-claim-is-judged"
# Calls that teach nothing: they set up, choose sizes, keep numbers, draw, or judge what was computed before.
PLUMBING = ("glue", "choose", "Ledger", "listing", "print")
DRAWS = ("figures.", "plt.", "ax.", "axes.", "axes[", "claims.")


def cards() -> dict[str, dict[str, Any]]:
    """What stands on the card of each chapter, by chapter."""
    return yaml.safe_load(CARDS.read_text(encoding="utf-8"))


def card(chapter: str, result: report.Report) -> str:
    """What was asked, what was found and why to believe it, on one screen; "" for a chapter without a card.

    What was found is shown only if its claims have the verdicts that it is about (``findings.bind``).
    """
    told = cards().get(chapter)
    if told is None:
        return ""
    decided = [record for record in result.records if record.chapter == chapter and record.role != "open"]
    kinds = Counter(record.kind for record in decided)
    checked = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    held = sum(not record.fails for record in decided)
    open_ = sum(record.chapter == chapter and record.role == "open" for record in result.records)
    left, first = f", {open_} left open" if open_ else "", told["claims"][0]
    among = ", counterexamples among them," if result.verdicts[first] == "refuted" else ""
    small = ", a small one for tests," if result.run.get("profile") == "smoke" else ""
    where = "; ".join(f"{version} {told[version]}" for version in ("published", "preprint") if version in told)
    if told.get("preprint") and "published" not in told:
        where += ", not in the published version"
    claim = report.load_claims()[first]
    says = "The claim is ours" if claim.get("ours") else "The paper says"
    says = "Expected" if claim["source"] == "released code" else says  # what a reader of the paper takes for granted
    anchor = f'<a href="#claim-{first}"><code>{first}</code></a>'
    return bind(
        f"""::::{{div}} glance
**Asked.** {told["asks"].strip()}

**{says}.** {claim["statement"].strip()} {badge(result.verdicts[first])} {anchor}

:::{{finding}} {" ".join(told["claims"])}
**Found.** {told["found"].strip()}

**Remember.** {told["remember"].strip()}

**Why believe it.** {told["because"].strip()}
:::

In this run{small} {held} of {len(decided)} checks of this chapter{among} hold
(<a href="{KINDS_TOLD}">{checked}</a>){left}.

*In the paper: {where or "nowhere; the question is ours"}.*

<div class="glance-figure" data-figure="{told["figure"]}"></div>
::::""",
        result,
    )


def chapter_cards(result: report.Report) -> str:
    """All chapters for the landing page: title, question, verdict of the first claim of the card, key figure."""
    lines = ["::::{div} cards"]
    for chapter, told in cards().items():
        title = (ROOT / "book" / f"{chapter}.md").read_text(encoding="utf-8").partition("\n# ")[2].partition("\n")[0]
        lines += [
            ":::{div}",
            f"**[{title}]({chapter}.md)** {badge(result.verdicts.get(told['claims'][0], 'planned'))}",
            "",
            told["asks"].strip(),
            f'<div class="card-figure" data-figure="{chapter}#{told["figure"]}"></div>',
            ":::",
        ]
    return "\n".join([*lines, "::::"])


def verdict_box(chapter: str, result: report.Report, claims: Mapping[str, Mapping[str, Any]]) -> str:
    """All claims of a chapter, folded: each with what we say instead, its verdict, a link to its first check."""
    mine = [name for name in claims if chapter in claims[name]["chapters"] and name in result.verdicts]
    counts = Counter(result.verdicts[name] for name in mine)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICT_ORDER if counts[verdict])
    lines = [f"```{{admonition}} All {len(mine)} claims of this chapter: {told}", ":class: dropdown verdict-box", ""]
    for name in mine:
        claim = claims[name]
        checked = any(record.chapter == chapter and record.claim == name for record in result.records)
        link = f'<a href="#claim-{name}"><code>{name}</code></a>' if checked else f"`{name}`"
        text = f"- {badge(result.verdicts[name])} {link} ({origin(claim)}): {claim['statement']}"
        lines.append(text + corrected(claim, result.verdicts[name]))
    return "\n".join([*lines, "```"])


def present(node: NotebookNode, chapter: str, records: Sequence[Record]) -> NotebookNode:
    """A notebook as it is shown; ``records`` are those of its chapter, as the workflow judged them.

    What the workflow alone has seen, at further seeds, stands with the checks of the last section.
    """
    judged, told = {record.key: record for record in records}, cards().get(chapter, {})
    explored = {each["after"]: each["name"] for each in told.get("explore", ())}
    shown: list[NotebookNode] = []
    waiting: list[Record] = []  # checks of the section so far
    for cell in _sections(node.cells):
        if cell.cell_type == "markdown":
            if cell.source.startswith("## ") and waiting:
                shown.append(nbformat.v4.new_markdown_cell(_folded(waiting)))
                waiting = []
            shown.append(cell)
            if "schematic" in told and len(shown) == 1:
                shown.append(nbformat.v4.new_markdown_cell(_schematic(**told["schematic"])))
            continue
        waiting += [judged.pop(_key(output)) for output in cell.outputs if MIME in output.get("data", {})]
        cell.outputs = [output for output in cell.outputs if MIME not in output.get("data", {})]
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]  # bars of progress
        tags = set(cell.metadata.get("tags", []))
        in_view = not tags & {"hide-input", "hide-cell", "remove-input"}
        if in_view and ("parameters" in tags or is_plumbing(cell.source)):
            cell.metadata["tags"] = sorted(tags | {"hide-input"})
        shown.append(cell)
        name = cell.metadata.get("mystnb", {}).get("figure", {}).get("name")
        if name in explored:
            shown.append(nbformat.v4.new_markdown_cell(_explorable(explored[name])))
    if waiting := [*waiting, *judged.values()]:
        shown.append(nbformat.v4.new_markdown_cell(_folded(waiting)))
    node.cells = list(_joined(shown))
    for number, cell in enumerate(node.cells):
        cell["id"] = f"cell-{number:03d}"
    return node


def _joined(cells: Iterable[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells, with neighbours that are folded and show nothing as one: a reader opens them all or none."""
    last = None
    for cell in cells:
        folded = cell.cell_type == "code" and {"hide-input", "hide-cell"} & {*cell.metadata.get("tags", ())}
        silent = folded and all("scrapbook" in output.get("metadata", {}) for output in cell.outputs)
        if silent and last is not None:
            last.source += f"\n\n{cell.source}"
            last.outputs += cell.outputs
            continue
        yield cell
        last = cell if silent else None


def _key(output: Mapping[str, Any]) -> tuple[str, str]:
    kept = output["data"][MIME]
    return kept["claim"], kept["check"]


def _sections(cells: Sequence[NotebookNode]) -> Iterator[NotebookNode]:
    """The cells, with one of prose divided where a section begins in it."""
    for cell in cells:
        if cell.cell_type != "markdown":
            yield cell
            continue
        for part in re.split(r"\n(?=(?:\([\w-]+\)=\n)?## )", cell.source):
            yield nbformat.v4.new_markdown_cell(part)


def is_plumbing(source: str) -> bool:
    """Whether most lines of code import, choose sizes, keep numbers, draw or judge, so that they teach nothing.

    >>> is_plumbing("import numpy; size = choose(profile, smoke=1, book=2, gpu=3)")
    True
    >>> is_plumbing("theta = theta + delta; claims.check('one', 'norm', theta.norm(), (0, 1))")
    False
    """
    try:
        statements = list(_simple(ast.parse(source).body))
    except SyntaxError:  # a magic of IPython
        return False
    if any(isinstance(statement, ast.FunctionDef | ast.ClassDef) for statement in statements):
        return False
    lines = Counter({True: 0, False: 0})
    for statement in statements:
        lines[_is_plumbing(statement)] += statement.end_lineno - statement.lineno + 1
    return lines[True] > lines[False]


def _simple(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with those inside loops and conditions; a function is one."""
    for statement in statements:
        inner = isinstance(statement, ast.For | ast.While | ast.If | ast.With)
        yield from _simple([*statement.body, *getattr(statement, "orelse", ())]) if inner else (statement,)


def _is_plumbing(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=function)) | ast.Assign(value=ast.Call(func=function)):
            called = ast.unparse(function)
            return called in PLUMBING or called.startswith(DRAWS)
        case ast.Assign(value=ast.Name() | ast.JoinedStr() | ast.Dict(keys=[])):  # a short name, a text, nothing yet
            return True
    return False


def _folded(records: Sequence[Record]) -> str:
    """The checks of a section as one line that opens to what each measured; open where one does not hold."""
    held = sum(bool(record.holds) for record in records)
    failed = sum(record.fails for record in records)
    open_ = sum(record.role == "open" for record in records)
    noted = sum(record.noted for record in records)
    parts = [f"{held} check{' holds' if held == 1 else 's hold'}"] if held else []
    parts += [f"{count} {word}" for count, word in ((noted, "noted"), (failed, "failed"), (open_, "open")) if count]
    mark = "✗" if failed else "◐" if noted else "✓" if held else "○"
    rows = "\n".join(_row(record) for record in records)
    head = "".join(f'<th role="columnheader" scope="col">{name}</th>' for name in COLUMNS)
    return (
        f'<details class="checks"{" open" if failed or noted else ""}>'
        f'<summary><span class="check-mark check-{MARKS[mark]}">{mark}</span> {", ".join(parts)}</summary>\n'
        # roles are written out, because on a phone rows and cells are blocks
        f'<table role="table"><thead role="rowgroup"><tr role="row">{head}</tr></thead>\n'
        f'<tbody role="rowgroup">\n{rows}\n</tbody></table>\n</details>'
    )


COLUMNS = ("check", "measured", "band", f'<a href="{KINDS_TOLD}">kind</a>')
MARKS = {"✓": "holds", "✗": "fails", "○": "open", "◐": "noted"}


def _row(record: Record) -> str:
    mark, _ = line(record)
    anchor = f' id="{html.escape(record.anchor)}"' if record.anchor else ""
    name = f'<span class="check-mark check-{MARKS[mark]}">{mark}</span> {html.escape(record.check)}'
    name += f" <code>{html.escape(record.claim)}</code>"
    start = f'<tr class="nb-check" role="row"{anchor}><td role="cell">{name}</td>'
    if record.role == "open":
        return f'{start}<td role="cell" colspan="3">{html.escape(record.reason or "")}</td></tr>'
    cells = "".join(
        f'<td role="cell" data-label="{label}">{html.escape(text)}</td>'
        for label, text in (
            ("measured", format_measured(record)),
            ("band", format_band(record)),
            ("kind", _kind(record)),
        )
    )
    return f"{start}{cells}</tr>"


def _kind(record: Record) -> str:
    return f"{record.kind}, {record.role}" if record.role != "stated" else str(record.kind)


def _schematic(name: str, alt: str) -> str:
    """A drawing below a chapter's introduction; its panels stand beside each other where there is room."""
    panels = (path.read_text(encoding="utf-8") for path in sorted(SCHEMATICS.glob(f"{name}-*.svg")))
    drawn = "\n".join(panel.strip() for panel in panels)
    return f'<div class="schematic" role="img" aria-label="{html.escape(alt)}">\n{drawn}\n</div>'


def _explorable(name: str) -> str:
    """A figure to move; ``book.js`` fetches what draws it."""
    return f'<div class="explore" data-explore="{name}"><p>Here stands a figure to move; it needs scripts.</p></div>'
