"""From executed notebooks and pages to HTML: fill in what the run says, then Sphinx renders it.

``python -m workflow run --html`` makes all pages, ``python -m workflow page t5`` one, in seconds.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import nbformat
import yaml
from jinja2 import TemplateError

from nbutils import __version__
from nbutils.claims import KINDS
from workflow import ROOT, Run, book, notebooks
from workflow.collect import edited
from workflow.judge import Judgement
from workflow.pages import api, chapter, figures, verdicts
from workflow.pages.chapter import Evidence
from workflow.pages.rendering import TEMPLATES, gpu, render
from workflow.pages.verdicts import Claim
from workflow.processes import die_with

BOOK, STATIC = ROOT / "book", ROOT / "book" / "_static"
PARTS = '{% from "parts.html.j2" import badge, verdict, checks, judged, number, show, scope, hero with context %}'
WARNING = re.compile(r"\b(?:WARNING|ERROR|CRITICAL|SEVERE): ")
HEADING = re.compile(r"(?:Exception occurred|[A-Z][\w ]* error(?: \(.*\))?):")  # of what ended Sphinx
HOW_TO_REPORT = ("The full traceback has been saved", "Please also report", "This can happen with very large")
# Warnings that a page alone gives, since what it points at is not there.
NOT_THERE = ["myst.xref_missing", "myst.xref_ambiguous", "ref.numref", "ref.ref", "toc.not_included"]


def configuration(quiet: Iterable[str] = ()) -> str:
    """``conf.py`` as Jupyter Book makes it, but that figures to move bring their own style and scripts."""
    from jupyter_book.config import get_final_config  # here: it takes a second, and tests need the rest

    given = {"latex_individualpages": False, "external_toc_path": "_toc.yml"}
    values, _ = get_final_config(user_yaml=book.configuration(), sourcedir=BOOK, cli_config=given)
    for name in ("html_css_files", "html_js_files"):
        values[name] = sorted(file for file in values[name] if not file.startswith("explore/"))
    values["suppress_warnings"] += quiet
    templates = str(Path(__file__).with_name("templates"))
    values |= {"project": values["html_title"], "version": __version__, "templates_path": [templates]}
    return "".join(f"{name} = {value!r}\n" for name, value in sorted(values.items()))


def staged(run: Run, judgement: Judgement, pages: Iterable[Path]) -> dict[str, bytes]:
    """The sources of pages for Sphinx, by path: the run's chapters, other pages, and all files that they load.

    Raises:
        ValueError: a chapter was edited after it was judged, so the judgement is not on its text and outputs.
    """
    if outdated := edited(run.chapters, judgement.run["notebooks"]):
        raise ValueError(f"{outdated[0]} was edited after it was judged: run it again")
    executed = {name: nbformat.read(run.notebook(name), as_version=4) for name in run.chapters}
    numbers = {name: notebooks.glued(notebook) for name, notebook in executed.items()}
    claims = verdicts.claims_of(judgement, ChainMap(*numbers.values()))
    banner = red(judgement)
    content = {"references.bib": (BOOK / "references.bib").read_bytes()}
    content |= {str(path.relative_to(BOOK)): path.read_bytes() for path in STATIC.rglob("*") if path.is_file()}
    drawn: dict[str, figures.Figure] = {}
    shown: Evidence = {}
    for name, notebook in executed.items():
        node = chapter.select_findings_in(chapter.grafted(name, notebook), name, claims)
        for cell in node.cells:
            cell.source = notebooks.with_numbers_of_others(cell.source, numbers)
        download = copy.deepcopy(node)
        shown = chapter.evidence(node.cells) | shown
        node, figures_of_page = chapter.page(node, name, judgement, claims, banner)
        drawn |= figures_of_page
        content[f"{name}.ipynb"] = nbformat.writes(node).encode()
        download.cells[0].source = chapter.below_title(download.cells[0].source, banner)
        download = notebooks.in_plain_words(download, book.source(name), numbers[name])
        content[f"executed/{name}.ipynb"] = nbformat.writes(download).encode()
    for figure in drawn.values():
        content |= figure.files()
    content["_static/explore/trained.js"] = along_the_ray(numbers)
    content |= claim_pages(claims, shown, drawn)
    for_templates: dict[str, Any] = {
        "run": judgement.run,
        "records": judgement.records,
        "claims": claims,
        "figures": drawn,
        "numbers": numbers,
        "cards": {name: book.card(name) for name in book.chapters()},
        "title": book.title,
        "counts": verdicts.counts,
        "by_object": verdicts.by_object,
        "order": verdicts.ORDER,
        "kinds": KINDS,
        "modules": api.groups(),
        "gpu": gpu(),
    }
    for path in pages:
        text = chapter.select_findings(path.read_text(encoding="utf-8"), claims)
        text = filled(path.name, chapter.below_title(text, banner), for_templates)
        content[path.name] = book.with_numbers(text).encode()
    return content


def along_the_ray(numbers: Mapping[str, Mapping[str, str]]) -> bytes:
    """A script with what the chapter on scaling measured, for its figure to move; null where it was not run."""
    curves = numbers.get("survives", {}).get("sv_curves", "null")
    return f"globalThis.exploreTrained = {curves};\n".encode()


def claim_pages(
    claims: Mapping[str, Claim], shown: Evidence, drawn: Mapping[str, figures.Figure]
) -> Iterator[tuple[str, bytes]]:
    """Path and content of the page of each claim, which is a link to send, and of all claims for programs."""
    config = book.configuration()
    for_programs = []
    for name, claim in claims.items():
        first = claim.listed["chapters"][0]
        figure, code = shown.get(name, ("", ""))
        card = book.card(first)
        if not figure and name in card.get("claims", ())[:1]:
            figure = card.get("figure", "")  # which is of the claim that the card begins with
        page = render(
            "claim.md.j2",
            claim=claim,
            chapter=first,
            title=book.title(first),
            code=code,
            config=config,
            figure=drawn.get(figure),
        )
        yield f"claims/{name}.md", page.encode()
        for_programs.append(
            {
                "id": name,
                "verdict": claim.verdict,
                "page": f"claims/{name}.html",
                "objects": [{"object": kind, "detail": detail} for kind, detail in claim.objects.items()],
                "evidence": claim.evidence,
                "scale": claim.scale,
                "finding": claim.finding,
                "where": book.origin(claim.listed),
                "version": book.version(claim.listed),
                "statement": claim.listed["statement"],
                "chapters": claim.listed["chapters"],
            }
        )
    yield "files/claims.json", json.dumps(for_programs, indent=1, ensure_ascii=False).encode()


def filled(page: str, text: str, values: Mapping[str, Any]) -> str:
    """A page whose placeholders show what the run says; ``parts.html.j2`` has those that take a name.

    Raises:
        ValueError: a placeholder that stands for nothing.
    """
    try:
        return TEMPLATES.from_string(PARTS + text).render(values)
    except TemplateError as error:
        raise ValueError(f"{page}: {error}") from None


def red(judgement: Judgement) -> str:
    """The box at the top of every page of a red run, with a link to each check that failed; "" for a green one."""
    failed = [record for record in judgement.records if record.fails]
    return "" if judgement.run["green"] else render("banner.md.j2", problems=judgement.problems, failed=failed)


def write(folder: Path, content: Mapping[str, bytes]) -> None:
    """Make a folder hold these files. What has not changed keeps its time, so that Sphinx does not read it again."""
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in content:
            path.unlink()
    for name, data in content.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def cause(lines: Sequence[str]) -> str:
    """Why Sphinx did not render, from what it printed: the exception that ended it, or else its first warning.

    "" if it printed neither. Sphinx prints an exception below a heading, after its traceback, and then how to report.

    >>> cause(["x.md:1: WARNING: a", "Exception occurred:", '  File "x.py"', "KeyError: 'b'", "Please also report"])
    "KeyError: 'b'"
    >>> cause(["reading", "x.md:1: WARNING: a", "x.md:2: WARNING: b"])
    'x.md:1: WARNING: a'
    """
    headings = [number for number, line in enumerate(lines) if HEADING.fullmatch(line)]
    if headings:
        heading = lines[headings[-1]]
        below = takewhile(lambda line: not line.startswith(HOW_TO_REPORT), lines[headings[-1] + 1 :])
        message = [line for line in below if line.strip() and not line.startswith((" ", "Traceback "))]
        if message:
            return " ".join(message if heading.startswith("Exception") else [heading, *message])
    warnings = [number for number, line in enumerate(lines) if WARNING.search(line)]
    if not warnings:
        return ""
    end = warnings[0] + 1
    if lines[warnings[0]].endswith(":"):  # what is wrong stands in the next line
        end += 1
    return " ".join(lines[warnings[0] : end])


def sphinx(folder: Path, target: Path, log: Path, *options: str) -> None:
    """Render the sources of a folder beside their place, and put the pages there when they are whole.

    Raises:
        RuntimeError: there was an error or, with ``-W``, a warning.
    """
    part = folder / "part" / "html"
    doctrees = folder / "doctrees"
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-a", "-d", str(doctrees), *options, str(folder / "source"), str(part)]
    with open(log, "w", encoding="utf-8") as text:
        dies_too = partial(die_with, os.getpid())
        done = subprocess.run(command, cwd=ROOT, stdout=text, stderr=subprocess.STDOUT, preexec_fn=dies_too)
    text_of_log = log.read_text(encoding="utf-8", errors="replace").replace(f"{folder / 'source'}/", "")
    lines = text_of_log.splitlines()
    warnings = [line for line in lines if WARNING.search(line)]
    if done.returncode:
        shutil.rmtree(doctrees, ignore_errors=True)  # what was read with a warning would be taken as read without
        print("\n".join([*warnings, *lines[-30:]]), file=sys.stderr)
        raise RuntimeError(f"not rendered: {cause(lines) or f'Sphinx ended with status {done.returncode}'}")
    print(*warnings, sep="\n", end="", file=sys.stderr)
    old = folder / "old"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():  # renamed and not deleted, so that there are whole pages whenever this ends
        target.rename(old)
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def pages(run: Run, judgement: Judgement) -> None:
    """Render all pages of a run, whose chapters are all there are."""
    others = [path for path in sorted(BOOK.glob("[!_]*.md")) if path.stem not in run.chapters]
    content = staged(run, judgement, others)
    content |= api.pages()
    content["_toc.yml"] = (ROOT / "_toc.yml").read_bytes()
    content["conf.py"] = configuration().encode()
    folder = run.staging
    write(folder / "source", content)
    sphinx(folder, run.html, folder / "sphinx.log", "-W", "--keep-going", "-n")


def page(run: Run, name: str, judgement: Judgement) -> Path:
    """Render the page of one chapter from its executed notebook alone.

    Its links lead to no other, and its figures are counted from 1.
    """
    folder = run.reports / "page"
    content = staged(replace(run, chapters=(name,)), judgement, [BOOK / "bibliography.md"])
    toc = {"format": "jb-book", "root": name, "chapters": [{"file": "bibliography"}]}
    content["_toc.yml"] = yaml.safe_dump(toc, sort_keys=False).encode()
    content["conf.py"] = configuration(NOT_THERE).encode()
    write(folder / "source", content)
    sphinx(folder, folder / "html", folder / "sphinx.log")
    return folder / "html" / f"{name}.html"
