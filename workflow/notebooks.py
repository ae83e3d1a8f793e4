"""One source, two notebooks: a chapter's MyST text gives the notebook that papermill runs and the one that Colab opens.

Both have the same code, but for installation and Google Drive. Colab shows MyST raw, so prose is plain Markdown there.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflow import ROOT, book, sources

if TYPE_CHECKING:  # at run time where they are used: a run with nothing to do needs none of them
    from nbformat import NotebookNode
    from pybtex.database import Entry

NUMBERS = ROOT / "book" / "numbers.json"  # what the text of each chapter says of the last green run that was kept
ON_GPU = ROOT / "book" / "gpu.json"  # what profile gpu measured on a GPU: pages show it beside their own
# sentences that pages show only for the verdict they belong to: claims, each with "=verdict" or the expected one; text
OF_ANOTHER = re.compile(r"\{glue:text\}`([a-z0-9-]+)/(\w+)`")  # a number that another chapter keeps: chapter, name
FINDING = re.compile(r"^:::\{finding\}[ ]+([^\n]+)\n(.*?)^:::$", re.M | re.S)
PAGE = re.compile(r"\]\(([\w-]+)\.md(#[\w-]+)?\)")  # a link to a page that is no chapter, and so has no notebook
ADMONITION = re.compile(r"```\{(admonition|note|tip|warning|danger)\}[ ]?([^\n]*)\n(?::\w+:[^\n]*\n)*(.*?)\n```", re.S)


def executable(source: Path) -> NotebookNode:
    """The notebook that papermill runs: the source as it is, with fixed cell ids and no outputs."""
    import jupytext

    notebook = jupytext.read(source, fmt="md:myst")
    rest = notebook.cells[0].source.partition("\n")[2]
    notebook.cells[0].source = f"# {book.title(source.stem)}\n{rest}"
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = book.with_numbers(cell.source)
    for key in ("jupytext", "card"):  # how the text was written, not what the notebook is
        notebook.metadata.pop(key, None)
    return numbered(notebook)


def plain(source: Path) -> NotebookNode:
    """The notebook that Colab and Jupyter open: the same code cells, MyST prose turned into plain Markdown.

    Its text has the numbers of the last green run that was kept, its first cell installs the version it belongs to. A
    chapter that loads shared trainings offers to keep them.

    Raises:
        ValueError: a directive or role that has no plain form; the message names it.
    """
    import nbformat

    last_run = kept_numbers()
    numbers = last_run.get("chapters", {}).get(source.stem, {})
    notebook = in_plain_words(executable(source), source, numbers)
    title, _, rest = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = f"{title}\n\n{_card(source, last_run.get('run', ''), numbers)}\n{rest}"
    # what pip says of a tag that is gone would stand in red, though the newest is installed then
    tagged = f'[*pip, f"{{book}}@v{version("norm-growth")}"], stderr=subprocess.DEVNULL'
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "setup" in cell.metadata.get("tags", ()):
            cell.source = cell.source.replace(INSTALL, f"{tagged}) and subprocess.call({INSTALL}")
            if sources.trainings_of(source.stem):
                form = {"cellView": "form", "tags": ["drive", "hide-cell"]}
                cells.append(nbformat.v4.new_code_cell(DRIVE.rstrip(), metadata=form))
    notebook.cells = cells
    return numbered(notebook)


INSTALL = "[*pip, book]"  # the newest, where this version is gone
# the cell after the setup cell that keeps in Google Drive what a session on Colab loses: a folded form, off
DRIVE = """\
# @title Keep trainings in Google Drive? {display-mode: "form"}
keep_in_drive = False  # @param {type:"boolean"}
if keep_in_drive and "google.colab" in sys.modules:
    import os

    from google.colab import drive

    drive.mount("/content/drive")
    os.environ["NBUTILS_RESULTS"] = "/content/drive/MyDrive/norm-growth"
"""


def kept_numbers() -> dict[str, Any]:
    """What ``book/numbers.json`` keeps of the last green run: which it was, and by chapter the numbers of its text."""
    return json.loads(NUMBERS.read_text(encoding="utf-8")) if NUMBERS.exists() else {}


def with_numbers_of_others(text: str, numbers: Mapping[str, Mapping[str, str]]) -> str:
    """Text whose ``{glue:text}`chapter/name``` show what that chapter keeps, by chapter and name.

    A chapter that is not among ``numbers`` was not run: then those of the last green run stand.
    """
    kept = kept_numbers().get("chapters", {})

    def number(match: re.Match[str]) -> str:
        of_chapter = numbers.get(match[1]) or kept.get(match[1], {})
        return of_chapter.get(match[2], f"`{match[2]}`")

    return OF_ANOTHER.sub(number, text)


def glued(executed: NotebookNode) -> dict[str, str]:
    """The numbers that an executed chapter keeps for prose, by name."""
    numbers = {}
    for cell in executed.cells:
        for output in cell.get("outputs", ()):
            name = output.get("metadata", {}).get("scrapbook", {}).get("name")
            if name:
                numbers[name] = str(ast.literal_eval(output["data"]["application/papermill.record/text/plain"]))
    return numbers


def _card(source: Path, run: str, numbers: Mapping[str, str]) -> str:
    """The card of a page in plain words, with a link to it; "why believe it" only where there are numbers of a run."""
    card = book.card(source.stem)
    address = book.configuration()["html"]["baseurl"]
    words = {"asks": "Asked", "found": "Found", "remember": "Remember", "because": "Why believe it"}
    if not numbers:
        del words["because"]
    texts = {name: to_markdown(" ".join(card[name].split()), {}, {}, numbers) for name in words if card}
    lines = [f"> **{words[name]}.** {text}" for name, text in texts.items()]
    where = f"> [The page of this chapter]({address}{source.stem}.html) has its verdicts and figures,"
    where += f" [Notation]({address}notation.html) its symbols and words."
    where += f" Numbers in the text are those of a green run ({run}); yours print their own." if numbers else ""
    return "\n>\n".join([*lines, where])


def in_plain_words(notebook: NotebookNode, source: Path, values: Mapping[str, str]) -> NotebookNode:
    """Prose as plain Markdown with these values, each figure followed by its caption."""
    import nbformat

    text = source.read_text(encoding="utf-8")
    labels = {label: str(number) for number, label in enumerate(re.findall(r"^:label: (\S+)$", text, re.M), 1)}
    cells = []
    chapters = book.chapters()
    earlier = chapters[: chapters.index(source.stem)]
    before = sum(len(_figure_names(book.source(name))) for name in earlier)  # pages number figures through the book
    figures = {name: str(number) for number, name in enumerate(_figure_names(source), before + 1)}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = to_markdown(cell.source, labels, figures, values)
        cells.append(cell)
        figure = cell.metadata.get("mystnb", {}).get("figure")
        if figure:
            caption = to_markdown(" ".join(figure["caption"].split()), labels, figures, values)
            cells.append(nbformat.v4.new_markdown_cell(f"**Figure {figures[figure['name']]}.** {caption}"))
    notebook.cells = cells
    return numbered(notebook)


def _figure_names(source: Path) -> list[str]:
    return re.findall(r"^    name: (fig-\S+)$", source.read_text(encoding="utf-8"), re.M)


def numbered(notebook: NotebookNode) -> NotebookNode:
    """Give the cells ids that an edit of one does not change."""
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:03d}"
    return notebook


def to_markdown(text: str, labels: Mapping[str, str], figures: Mapping[str, str], values: Mapping[str, str]) -> str:
    """MyST prose as plain Markdown: equations with \\tag, quotes for admonitions, links for citations.

    A link to a chapter leads to its notebook, one to another page to that page on the web. A number of the run that is
    not among ``values`` stands by its name, in code.
    """
    text = re.sub(r"```\{math\}\n(?::label: (\S+)\n)?(.*?)\n```", lambda m: _equation(m, labels), text, flags=re.S)
    text = ADMONITION.sub(_quote, text)
    text = FINDING.sub(lambda m: "" if m[1].endswith("=open") else m[2].rstrip("\n"), text)
    text = re.sub(r"\{eq\}`([^`]+)`", lambda m: f"({labels[m[1]]})", text)
    text = re.sub(r"\{numref\}`([^`]+)`", lambda m: f"Figure {figures[m[1]]}", text)
    text = with_numbers_of_others(text, {})
    text = re.sub(r"\{glue:text\}`([^`]+)`", lambda m: values.get(m[1], f"`{m[1]}`"), text)
    text = re.sub(r"\{cite:([pt])\}`([^`]+)`", _cite, text)
    address = book.configuration()["html"]["baseurl"]
    text = PAGE.sub(lambda m: f"]({address}{m[1]}.html{m[2] or ''})", book.with_numbers(text))
    left = re.search(r"```\{[^}]*\}|\{[a-z][a-z:]*\}`[^`]*`", text)
    if left:
        raise ValueError(f"no plain form for {left[0]!r}: add a rule to workflow/notebooks.py")
    return text


def _equation(match: re.Match[str], labels: Mapping[str, str]) -> str:
    tag = f" \\tag{{{labels[match[1]]}}}" if match[1] else ""
    return f"$$\n{match[2].strip()}{tag}\n$$"


def _quote(match: re.Match[str]) -> str:
    title = match[2] or match[1].capitalize()
    return "\n".join(f"> {line}".rstrip() for line in [f"**{title}.**", *match[3].splitlines()])


@cache
def _bibliography() -> dict[str, Entry]:
    from pybtex.database import parse_file

    return dict(parse_file(str(ROOT / "book" / "references.bib")).entries)


def _cite(match: re.Match[str]) -> str:
    references = "; ".join(_reference(key.strip()) for key in match[2].split(","))
    return f"({references})" if match[1] == "p" else references


def _reference(key: str) -> str:
    """Authors and year of an entry of the bibliography, with its link."""
    entry = _bibliography()[key]
    authors = [
        " ".join(str(name) for name in (*person.rich_prelast_names, *person.rich_last_names))
        for person in entry.persons["author"]
    ]
    names = " and ".join(authors) if len(authors) <= 2 else f"{authors[0]} et al."
    return f"[{names}, {entry.fields['year']}]({entry.fields['url']})"
