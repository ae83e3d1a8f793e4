"""From executed notebooks and pages to HTML: fill in what the run says, then Sphinx renders it.

``python -m workflow.pages --profile book --seed 0`` makes all pages; ``--page 04-t5`` that one alone, in seconds.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import nbformat
import yaml
from jinja2 import TemplateError

from nbutils.claims import KINDS
from workflow import ROOT, Run, book, git, notebooks, report, sources
from workflow.pages import TEMPLATES, chapter, figures, render, verdicts
from workflow.report import Report

BOOK, MAINTENANCE, BENCHMARKS = ROOT / "book", ROOT / "maintenance", ROOT / "benchmarks" / "kept.json"
# Of a page alone: chapters that it points at are not there, and its own figures are counted from 1.
NOT_THERE = ["myst.xref_missing", "myst.xref_ambiguous", "ref.numref", "ref.ref", "toc.not_included"]


class NotRendered(Exception):
    """Sphinx found an error or a warning; what it wrote is in the log."""


def hosted(remote: str) -> str | None:
    """Web address of a git remote on a host, None for a path on this machine.

    >>> hosted("git@github.com:someone/book.git"), hosted("/somewhere/book")
    ('https://github.com/someone/book', None)
    """
    pattern = r"(?:https?://(?:[^@/]+@)?|ssh://git@|git@)([\w.-]+\.\w+)[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?"
    match = re.fullmatch(pattern, remote)
    return f"https://{match[1]}/{match[2]}" if match else None


def settings() -> dict[str, Any]:
    """``_config.yml`` with the repository of this checkout. Colab opens notebooks from GitHub only."""
    found = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    found["repository"]["url"] = hosted(git("remote", "get-url", "origin") or "") or found["repository"]["url"]
    if not found["repository"]["url"].startswith("https://github.com/"):
        found["launch_buttons"].pop("colab_url", None)
    return found


def configuration(quiet: Iterable[str] = ()) -> str:
    """``conf.py`` as Jupyter Book makes it, but that figures to move bring their own style and scripts."""
    from jupyter_book.config import get_final_config  # here: it takes a second, and tests need the rest

    given = {"latex_individualpages": False, "external_toc_path": "_toc.yml"}
    values, _ = get_final_config(user_yaml=settings(), sourcedir=BOOK, cli_config=given)
    for name in ("html_css_files", "html_js_files"):
        values[name] = sorted(file for file in values[name] if not file.startswith("explore/"))
    values["suppress_warnings"] += quiet
    values["packages"] = " ".join(sorted({f"{each.name} {each.version}" for each in distributions()}))
    return "".join(f"{name} = {value!r}\n" for name, value in sorted(values.items()))


def staged(run: Run, result: Report) -> tuple[dict[str, bytes], dict[str, figures.Figure]]:
    """The chapters of a run for Sphinx, with all files that pages load, by path; and the chapters' figures by name."""
    claims, banner = verdicts.judged(result), red(result)
    content, drawn = {"references.bib": (BOOK / "references.bib").read_bytes()}, dict[str, figures.Figure]()
    for path in (BOOK / "_static").rglob("*"):
        if path.is_file():
            content[str(path.relative_to(BOOK))] = path.read_bytes()
    for name in run.chapters:
        bound = chapter.grafted(name, run.notebook(name))
        chapter.bind(bound, name, claims)
        download = chapter.download(copy.deepcopy(bound), name, run.notebook(name), banner)
        content[f"executed/{name}.ipynb"] = nbformat.writes(download).encode()
        page, figures_of_page = chapter.page(bound, name, result, claims, banner)
        content[f"{name}.ipynb"] = nbformat.writes(page).encode()
        drawn |= figures_of_page
    for figure in drawn.values():
        content |= figure.files()
    return content, drawn


def texts(run: Run, result: Report, drawn: Mapping[str, figures.Figure]) -> dict[str, bytes]:
    """The pages that are no chapters, filled with what the run says."""
    claims, banner = verdicts.judged(result), red(result)
    known = meanings(run, result, claims, drawn)
    found = {}
    for path in sorted(BOOK.glob("*.md")):
        if path.stem not in book.chapters() and not path.stem.startswith("_"):
            text = chapter.below_title(
                verdicts.bind(path.read_text(encoding="utf-8"), claims, chapter.left_out), banner
            )
            found[path.name] = chapter.to_notebooks(filled(path.name, text, known)).encode()
    return found


def filled(page: str, text: str, known: Mapping[str, Any]) -> str:
    """A page whose placeholders show what the run says.

    Raises:
        ValueError: a placeholder that stands for nothing.
    """
    try:
        return TEMPLATES.from_string(text).render(known)
    except (TemplateError, KeyError) as error:
        raise ValueError(f"{page}: {error}") from None


def red(result: Report) -> str:
    """The box at the top of every page of a red run, with a link to each check that failed; "" for a green one."""
    if result.run["green"]:
        return ""
    failed = [record for record in result.records if record.fails]
    return render("banner.md.j2", problems=result.problems, failed=failed)


def meanings(
    run: Run, result: Report, claims: Mapping[str, verdicts.Claim], drawn: Mapping[str, figures.Figure]
) -> dict[str, Any]:
    """What pages and their tables may show, by name."""
    parts = TEMPLATES.get_template("parts.html.j2").module
    known: dict[str, Any] = {}
    glued: dict[str, dict[str, str]] = {}

    def number(name: str, key: str) -> str:
        if name not in glued:
            glued[name] = notebooks.glued(run.notebook(name))
        return glued[name][key]

    known |= {
        "show": lambda table, **more: render(f"{table}.j2", **known, **more),
        "verdict": lambda name: parts.badge(claims[name].verdict),
        "checks": lambda name: parts.link(claims[name]),
        "judged": lambda name: parts.judged(claims[name]),
        "badge": parts.badge,
        "number": number,
        "thumbnail": lambda name: parts.thumbnail(drawn[name]),
        "hero": lambda name: parts.hero(drawn[name]),
        "claims": claims,
        "figures": drawn,
        "cards": {name: book.card(name) for name in book.chapters()},
        "title": book.title,
        "run": result.run,
        "records": result.records,
        "stats": result.stats,
        "counts": verdicts.counts,
        "order": verdicts.ORDER,
        "kinds": KINDS,
        "red_runs": red_runs(),
        "benchmarks": benchmarks(),
        "modules": modules(),
    }
    return known


def modules() -> list[str]:
    """What the page on the module shows: what chapters share, then what one alone needs."""
    names = [name for name in sources.modules() if name not in ("nbutils", "nbutils.__main__")]
    return sorted(names, key=lambda name: (name.startswith("nbutils.chapters"), name))


def red_runs() -> dict[str, dict[str, Any]]:
    """How often a run is red although nothing is wrong, by profile; see ``verdicts.red_share``."""
    hashes = sources.hashes()
    return {name: verdicts.red_share(_kept(MAINTENANCE / f"alarms-{name}.json"), hashes) for name in ("smoke", "book")}


def benchmarks() -> list[dict[str, Any]]:
    """The kept benchmarks of modules that are today as they were when they were measured."""
    rows = _kept(BENCHMARKS).get("pairs", [])
    return [row for row in rows if row.get("made_from") == sources.of_modules(row["modules"])]


def _kept(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Make a folder hold these files. What has not changed keeps its time, so that Sphinx does not read it again."""
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in content:
            path.unlink()
    for name, made in content.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(made)


def sphinx(folder: Path, target: Path, log: Path, *options: str) -> None:
    """Render the sources of a folder beside their place, and put the pages there when they are whole.

    Raises:
        NotRendered: there was an error or, with ``-W``, a warning.
    """
    part, doctrees = folder / "part" / "html", folder / "doctrees"
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-a", "-d", str(doctrees), *options, str(folder / "source"), str(part)]
    with open(log, "a", encoding="utf-8") as text:
        done = subprocess.run(command, cwd=ROOT, stdout=text, stderr=subprocess.STDOUT)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line for line in lines if "WARNING" in line or "ERROR" in line]
    if done.returncode:
        shutil.rmtree(doctrees, ignore_errors=True)  # what was read with a warning would be taken as read without
        print("\n".join(found or lines[-30:]), file=sys.stderr)
        raise NotRendered(f"not rendered: {(found or lines[-1:] or ['no message'])[0]}")
    print("\n".join(found), file=sys.stderr)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.rename(target)


def pages(run: Run, log: Path) -> Path:
    """Render all pages of a run; its chapters are all there are. Returns the first page."""
    folder = run.reports / "pages"
    result = report.load(run.reports)
    content, drawn = staged(run, result)
    content |= texts(run, result, drawn)
    content["_toc.yml"] = (ROOT / "_toc.yml").read_bytes()
    content["conf.py"] = configuration().encode()
    write(folder / "source", content)
    sphinx(folder, run.html, log, "-W", "--keep-going", "-n")
    return run.html / "index.html"


def page(run: Run, log: Path) -> Path:
    """Render the page of the one chapter of a run, from its executed notebook alone. Links to others lead nowhere."""
    (name,) = run.chapters
    if not run.notebook(name).exists():
        raise ValueError(f"{name} has no result: `make {run.profile} SEED={run.seed} CHAPTERS={name}` executes it")
    folder = run.reports / "page"
    content, _ = staged(run, report.collect(run))
    content["bibliography.md"] = (BOOK / "bibliography.md").read_bytes()
    toc = {"format": "jb-book", "root": name, "chapters": [{"file": "bibliography"}]}
    content["_toc.yml"] = yaml.safe_dump(toc, sort_keys=False).encode()
    content["conf.py"] = configuration(NOT_THERE).encode()
    write(folder / "source", content)
    sphinx(folder, folder / "html", log)
    return folder / "html" / f"{name}.html"
