"""From executed notebooks and pages to HTML: fill in what the run says, then let Jupyter Book render it.

``python -m workflow.stage --profile book --seed 0``
"""

from __future__ import annotations

import argparse
import ast
import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import yaml

from nbutils.claims import KINDS, MIME
from nbutils.claims.records import as_html
from workflow import (
    BUILD,
    ROOT,
    alarms,
    chapters,
    dependencies,
    git,
    html_folder,
    mutants,
    platforms,
    report,
    run_folder,
    speed,
)
from workflow.findings import FAILED, banner, below_title, bind, corrected, evidence
from workflow.jobs import die_with_run, error_file
from workflow.render import render

VERDICT_ORDER = ("confirmed", "refined", "refuted", "open", "failed")


def remote_url() -> str | None:
    """The web address of the ``origin`` remote where it is a hosted repository, else None."""
    address = git("remote", "get-url", "origin")
    return hosted(address) if address is not None else None


def hosted(remote: str) -> str | None:
    """Web address of a git remote on a host, None for a path on this machine.

    >>> hosted("git@github.com:someone/book.git"), hosted("/somewhere/book")
    ('https://github.com/someone/book', None)
    """
    match = re.fullmatch(
        r"(?:https?://(?:[^@/]+@)?|ssh://git@|git@)([\w.-]+\.\w+)[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?", remote
    )
    return f"https://{match[1]}/{match[2]}" if match else None


def configuration() -> dict[str, Any]:
    """``_config.yml`` with the repository of this checkout. Colab opens notebooks from GitHub only."""
    settings = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    settings["repository"]["url"] = remote_url() or settings["repository"]["url"]
    if not settings["repository"]["url"].startswith("https://github.com/"):
        settings["launch_buttons"].pop("colab_url", None)
    return settings


def glued(notebook: Path) -> dict[str, str]:
    """The numbers that an executed chapter keeps for prose, by name."""
    found = {}
    for cell in nbformat.read(notebook, as_version=4).cells:
        for output in cell.get("outputs", ()):
            name = output.get("metadata", {}).get("scrapbook", {}).get("name")
            if name:
                found[name] = ast.literal_eval(output["data"]["application/papermill.record/text/plain"])
    return found


def badge(verdict: str) -> str:
    """A verdict as a coloured word."""
    return f'<span class="verdict verdict-{verdict}">{verdict}</span>'


def held(claim: str, result: report.Report) -> str:
    """How many checks of a claim hold, as text."""
    if result.verdicts[claim] == "open":
        return "not decided"
    checks = [record for record in result.records if record.claim == claim]
    return f"{sum(bool(record.holds) for record in checks)} of {len(checks)}" if checks else "none"


def origin(claim: Mapping[str, Any]) -> str:
    """Where in the paper a claim stands; a question of ours says so."""
    return "our question" if claim.get("ours") else claim["source"]


def verdict_box(chapter: str, result: report.Report, claims: Mapping[str, Mapping[str, Any]]) -> str:
    """The box at the top of a chapter: each claim, what we say instead, its verdict, a link to its first check."""
    lines = ["```{admonition} Verdicts of this run", ":class: tip verdict-box", ""]
    mine = [name for name in claims if chapter in claims[name]["chapters"] and name in result.verdicts]
    for name in mine:
        claim = claims[name]
        link = f'<a href="#claim-{name}"><code>{name}</code></a>'
        text = f"- {badge(result.verdicts[name])} {link} ({origin(claim)}): {claim['statement']}"
        lines.append(text + corrected(claim, result.verdicts[name]))
    noted = [record for record in result.records if record.chapter == chapter and record.noted]
    if noted:
        lines += [
            "",
            f"Marked ◐ below: {len(noted)} that did not hold at this seed and held at two others.",
        ]
    return "\n".join([*lines, "```"])


def with_box(notebook: Path, boxes: Sequence[str], result: report.Report) -> nbformat.NotebookNode:
    """An executed notebook as it is shown: no injected parameters, boxes below the title, checks as judged."""
    node = nbformat.read(notebook, as_version=4)
    node.cells = [cell for cell in node.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    judged = {(record.claim, record.check): record for record in result.records if record.chapter == notebook.stem}
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = to_notebooks(bind(cell.source, result))
        for output in cell.get("outputs", ()):
            if MIME in output.get("data", {}):
                record = judged[output["data"][MIME]["claim"], output["data"][MIME]["check"]]
                output["data"]["text/html"] = as_html(record)
    first = node.cells[0]
    if first.cell_type != "markdown":
        raise ValueError(f"{notebook.name}: a chapter begins with its title in a Markdown cell")
    first.source = below_title(first.source, *boxes)
    return node


def places(claim: str, result: report.Report, listed: Iterable[str]) -> str:
    """The chapters of a claim by number, each linked to the first check of the claim there."""
    checked = {record.chapter for record in result.records if record.claim == claim}
    shown = []
    for chapter in listed:
        number = int(chapter[:2])
        link = f'<a href="{chapter}.html#claim-{claim}" aria-label="chapter {number}, {claim}">{number}</a>'
        shown.append(link if chapter in checked else str(number))
    return ", ".join(shown)


def scorecard(result: report.Report, claims: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of all claims, planned ones included. ``book/_static/scorecard.js`` sorts and filters it."""
    rows = []
    order = {verdict: rank for rank, verdict in enumerate((*VERDICT_ORDER, "planned"))}
    for rank, (name, claim) in enumerate(claims.items()):
        verdict = result.verdicts.get(name, "planned")
        statement = html.escape(claim["statement"])
        statement += html.escape(corrected(claim, verdict, "\n")).replace("\n", "<br><em>We find:</em> ", 1)
        if name in result.verdicts and any(record.claim == name for record in result.records):
            page, anchor = evidence(name, result)
            label, checks = f'<a href="{page}#{anchor}"><code>{name}</code></a>', held(name, result)
        else:
            label, checks = f"<code>{name}</code>", ""
        chapters_of = claim["chapters"]
        cells = (  # what is shown, what it is sorted by
            (label, name),
            (places(name, result, chapters_of), f"{chapters_of[0]}-{rank:04d}"),
            (html.escape(origin(claim)), f"{rank:04d}"),
            (statement, html.escape(claim["statement"])),
            (badge(verdict), f"{order[verdict]}-{rank:04d}"),
            (checks, checks),
        )
        shown = "".join(f'<td data-sort="{key}">{cell}</td>' for cell, key in cells)
        numbers = " ".join(str(int(chapter[:2])) for chapter in chapters_of)
        rows.append(f'<tr data-verdict="{verdict}" data-chapters="{numbers}">{shown}</tr>')
    columns = ("claim", "chapter", "source", "statement", "verdict", "checks that hold")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    return (
        '<div class="wide-table" tabindex="0" role="region" aria-label="All claims">\n'
        '<table class="table claims-table">\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>\n</div>"
    )


def verdict_counts(result: report.Report, claims: Mapping[str, Any]) -> str:
    """How many claims have which verdict; our own questions apart from the paper's claims."""
    lines = []
    for title, mine in (("claims of the paper", False), ("questions of ours beside them", True)):
        names = [name for name, claim in claims.items() if bool(claim.get("ours")) is mine]
        counts = Counter(result.verdicts.get(name, "planned") for name in names)
        parts = [f"{counts[name]} {badge(name)}" for name in (*VERDICT_ORDER, "planned") if counts[name]]
        if names:
            lines.append(f"**{len(names)} {title}:** " + ", ".join(parts) + ".")
    kinds = ", ".join(f"{result.run['kinds'].get(kind, 0)} {kind}" for kind in KINDS)
    noted = (
        f" {result.run['noted']} noted: it did not hold at this seed and held at two others."
        if result.run["noted"]
        else ""
    )
    failed = f" {FAILED}" if "failed" in result.verdicts.values() else ""
    return "\n".join([*lines, f"{len(result.records)} checks in this run: {kinds}.{noted}{failed}"])


def beyond(result: report.Report, claims: Mapping[str, Mapping[str, Any]], ours: bool) -> str:
    """What goes beyond the paper, as a list: its corrected claims, or our own questions."""
    lines = []
    for name, claim in claims.items():
        if bool(claim.get("ours")) is not ours or name not in result.verdicts or not (ours or claim.get("corrected")):
            continue
        text = f"- {badge(result.verdicts[name])} {claim['statement']}"
        text += corrected(claim, result.verdicts[name])
        if any(record.claim == name for record in result.records):
            page, anchor = evidence(name, result)
            text += f' <a href="{page}#{anchor}">{html.escape(origin(claim)) if not ours else "checks"}</a>'
        lines.append(text)
    return "\n".join(lines)


def run_table(result: report.Report) -> str:
    """Time and memory of each notebook."""
    lines = [
        f"Profile `{result.run['profile']}`, seed {result.run['seed']}, device {result.run['device']}, "
        f"on {result.run['hardware']}.",
        "",
        "| chapter | time (s) | CPU time (s) | peak memory (MB) | threads | started (UTC) |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for stats in result.stats:
        started = stats["started"].replace("+00:00", "").replace("T", " ")
        lines.append(
            f"| [{stats['chapter']}]({stats['chapter']}.md) | {stats['seconds']:.1f} | {stats['cpu_seconds']:.1f} |"
            f" {stats['peak_mb']:.0f} | {stats['threads']} | {started} |"
        )
    total = sum(stats["seconds"] for stats in result.stats), sum(stats["cpu_seconds"] for stats in result.stats)
    lines.append(f"| sum over chapters | {total[0]:.1f} | {total[1]:.1f} | | | |")
    return "\n".join(lines)


def run_versions(result: report.Report) -> str:
    lines = ["| package | version |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {version} |" for name, version in result.run["versions"].items()])


def api() -> str:
    """One section a module, made by autodoc: what chapters share, then what one alone needs."""
    names = [name for name in dependencies.known_modules() if name not in ("nbutils", "nbutils.__main__")]
    names.sort(key=lambda name: (name.startswith("nbutils.chapters"), name))
    return "\n\n".join(
        f"## {name.removeprefix('nbutils.')}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```"
        for name in names
    )


def placeholders(result: report.Report, claims: Mapping[str, Any], run: Path) -> Callable[[str], str]:
    """What stands for ``{{ name }}`` on a page without a kernel: a table, a verdict, a link, a number of a chapter."""
    tables = {
        "scorecard": lambda: scorecard(result, claims),
        "verdict_counts": lambda: verdict_counts(result, claims),
        "corrected_claims": lambda: beyond(result, claims, ours=False),
        "own_questions": lambda: beyond(result, claims, ours=True),
        "run_table": lambda: run_table(result),
        "run_versions": lambda: run_versions(result),
        "alarms": lambda: "\n\n".join(alarms.markdown(alarms.load(name)) for name in ("smoke", "book")),
        "platforms": lambda: platforms.markdown("smoke"),
        "mutants": mutants.sentence,
        "bench_table": lambda: speed.ratios(speed.kept("pairs")),
        "bench_curves": lambda: speed.exponents(speed.kept("curves")),
        "api": api,
    }
    numbers: dict[str, dict[str, str]] = {}

    def value(name: str) -> str:
        if name in tables:
            return tables[name]()
        if name in (*VERDICT_ORDER, "planned"):
            return badge(name)
        if name in result.verdicts:
            return badge(result.verdicts[name])
        kind, _, rest = name.partition(":")
        if kind == "link" and rest in result.verdicts:
            page, anchor = evidence(rest, result)
            return f'<a href="{page}#{anchor}">checks</a>'
        if kind == "glue":
            chapter, _, key = rest.partition(":")
            if chapter not in numbers:
                numbers[chapter] = glued(run / f"{chapter}.ipynb")
            if key in numbers[chapter]:
                return numbers[chapter][key]
        raise ValueError(f"nothing stands for {{{{ {name} }}}}: no table, no claim of this run, no number of a chapter")

    return value


def to_notebooks(text: str) -> str:
    """Links to chapters: their sources end in .md, the staged chapters in .ipynb."""
    return re.sub(r"\]\((\d\d-[\w-]+)\.md", r"](\1.ipynb", text)


def fill(text: str, value: Callable[[str], str]) -> str:
    """Replace every ``{{ name }}`` of a page."""
    return re.sub(r"\{\{ ([\w:-]+) \}\}", lambda match: value(match[1]), text)


def stage(profile: str, seed: int, target: Path) -> None:
    """Write the sources of the pages. What has not changed keeps its time, so that it is not rendered anew."""
    run, claims = run_folder(profile, seed), report.load_claims()
    result = report.load(BUILD / profile)
    value = placeholders(result, claims, run)
    content = {path.name: path.read_bytes() for path in (ROOT / "book" / "references.bib", ROOT / "_toc.yml")}
    content["_config.yml"] = yaml.safe_dump(configuration(), sort_keys=False).encode()
    for path in (ROOT / "book" / "_static").rglob("*"):
        if path.is_file():
            content[str(path.relative_to(ROOT / "book"))] = path.read_bytes()
    for chapter in chapters():
        boxes = banner(result), verdict_box(chapter, result, claims)
        notebook = with_box(run / f"{chapter}.ipynb", boxes, result)
        content[f"{chapter}.ipynb"] = nbformat.writes(notebook).encode()
    for page in (ROOT / "book").glob("*.md"):
        if page.stem not in chapters():
            text = below_title(bind(page.read_text(encoding="utf-8"), result), banner(result))
            content[page.name] = to_notebooks(fill(text, value)).encode()
    for path in target.rglob("*"):
        if path.is_file() and str(path.relative_to(target)) not in content:
            path.unlink()
    for name, made in content.items():
        path = target / name
        if not path.exists() or path.read_bytes() != made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--run", default="", help="name of the run, as in the lock")
    arguments = parser.parse_args()
    die_with_run(arguments.run)
    folder = BUILD / arguments.profile
    with error_file(run_folder(arguments.profile, arguments.seed) / "logs" / "pages.error.json", "pages"):
        stage(arguments.profile, arguments.seed, folder / "source")
        render(folder / "source", html_folder(arguments.profile), folder / "jupyter-book.log")


if __name__ == "__main__":
    main()
