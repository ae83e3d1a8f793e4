"""From executed notebooks and pages to HTML: fill in what the run says, then let Jupyter Book render it.

``python -m workflow.stage --profile book --seed 0``
"""

from __future__ import annotations

import argparse
import html
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat
import yaml

from nbutils.claims import KINDS
from workflow import (
    BUILD,
    ROOT,
    alarms,
    chapters,
    dependencies,
    git,
    html_folder,
    mutants,
    notebooks,
    platforms,
    report,
    run_folder,
    speed,
)
from workflow.findings import FAILED, banner, below_title, bind, corrected, evidence, surprises
from workflow.jobs import die_with_run, error_file
from workflow.present import card, chapter_cards, present, verdict_box
from workflow.render import render
from workflow.scorecard import VERDICT_ORDER, badge, origin, scorecard


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


def with_box(notebook: Path, boxes: Sequence[str], result: report.Report) -> nbformat.NotebookNode:
    """An executed notebook as it is shown: no injected parameters, boxes below the title, and see ``present``."""
    node = nbformat.read(notebook, as_version=4)
    node.cells = [cell for cell in node.cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    bound(node, notebook.stem, result, *boxes)
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = to_notebooks(cell.source)
    return present(node, notebook.stem, [record for record in result.records if record.chapter == notebook.stem])


def bound(node: nbformat.NotebookNode, chapter: str, result: report.Report, *boxes: str) -> nbformat.NotebookNode:
    """A chapter's notebook with boxes below its title, without what the run does not bear, in captions too."""
    first = node.cells[0]
    if first.cell_type != "markdown":
        raise ValueError(f"{chapter}: a chapter begins with its title in a Markdown cell")
    surprised = surprises(chapter, result)
    for cell in node.cells:
        if cell.cell_type == "markdown":
            cell.source = bind(cell.source, result)
        elif surprised and "What to see" in cell.metadata.get("mystnb", {}).get("figure", {}).get("caption", ""):
            shown = cell.metadata["mystnb"]["figure"]
            shown["caption"] = f"{shown['caption'].partition('What to see')[0]}What to see is left out: {surprised}"
    first.source = below_title(first.source, *boxes)
    return node


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
    left = sum(record.role == "open" for record in result.records)
    left = f", {left} left open" if left else ""
    noted = (
        f" {result.run['noted']} noted: it did not hold at this seed and held at two others."
        if result.run["noted"]
        else ""
    )
    failed = f" {FAILED}" if "failed" in result.verdicts.values() else ""
    return "\n".join([*lines, f"{len(result.records)} checks in this run: {kinds}{left}.{noted}{failed}"])


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


def run_state(result: report.Report) -> str:
    """Whether the run is green, and of what, where and when it is."""
    run, word = result.run, "green" if result.run["green"] else "red"
    small = ", a small test whose numbers are rough" if run["profile"] == "smoke" else ""
    started = min(stats["started"] for stats in result.stats)[:10]
    what = f"profile `{run['profile']}`{small}, seed {run['seed']}, {started}"
    return (
        f"This run is **{word}**: {what}, on {run['hardware']}. [How this book was run](run.md) has times and versions."
    )


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
        "run_state": lambda: run_state(result),
        "chapter_cards": lambda: chapter_cards(result),
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
                numbers[chapter] = notebooks.glued(run / f"{chapter}.ipynb")
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
        boxes = banner(result), card(chapter, result), verdict_box(chapter, result, claims)
        notebook = with_box(run / f"{chapter}.ipynb", boxes, result)
        content[f"{chapter}.ipynb"] = nbformat.writes(notebook).encode()
        sure = lambda node, name=chapter: bound(node, name, result, banner(result))  # noqa: E731
        download = notebooks.executed(run / f"{chapter}.ipynb", ROOT / "book" / f"{chapter}.md", sure)
        content[f"executed/{chapter}.ipynb"] = nbformat.writes(download).encode()
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
