"""From staged sources to HTML by Jupyter Book; where only the body of some pages changed, these alone are made anew."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from workflow import ROOT
from workflow.jobs import JobError

# What other pages show of a page: headings, and what they can point at; what it cites is listed in the bibliography.
SEEN_ELSEWHERE = re.compile(r"^#+ .*|^\([\w-]+\)=|^:(?:name|label): .*|\{cite[^`]*`[^`]*`", re.MULTILINE)


def jupyter_book(source: Path, output: Path) -> list[str]:
    """The command that builds the pages of a folder; the package cannot be run with ``-m``."""
    start = "from jupyter_book.cli.main import main; main()"
    return [sys.executable, "-c", start, "build", str(source), "--path-output", str(output)]


def render(source: Path, target: Path, log: Path) -> None:
    """Build the pages beside their place and put them there when they are whole.

    Raises:
        JobError: Jupyter Book found an error or a warning; its last lines are printed.
    """
    output, now = source.parent / "rendered", frame(source)
    mark = output / "frame"  # there only beside whole pages
    same = mark.exists() and mark.read_text(encoding="utf-8") == now
    if same:
        mark.unlink()
    else:
        shutil.rmtree(output, ignore_errors=True)
    command = [*jupyter_book(source, output), "-W", "-n", "--keep-going", *([] if same else ["--all"])]
    with open(log, "w", encoding="utf-8") as text:
        done = subprocess.run(command, stdout=text, stderr=subprocess.STDOUT)
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if "WARNING" in line or "ERROR" in line] or lines[-30:]
        print("\n".join(told), file=sys.stderr)
        shutil.rmtree(output)
        raise JobError(f"not rendered: {told[-1] if told else 'no message'} (log: {log.relative_to(ROOT)})")
    whole = target.with_name(f"{target.name}.part")
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(output / "_build" / "html", whole)
    shutil.rmtree(target, ignore_errors=True)
    whole.rename(target)
    mark.write_text(now, encoding="utf-8")


def packages() -> str:
    """All that is installed, a line each: pages of other packages are others."""
    return "\n".join(sorted({f"{package.name} {package.version}" for package in distributions()}))


def frame(source: Path) -> str:
    """Digest of all that more pages than one depend on. Sphinx by itself does not see that a sidebar is old."""
    digest = hashlib.sha256(packages().encode())
    for path in sorted(source.rglob("*")):
        if path.is_file():
            seen = "\n".join(_seen_elsewhere(path)).encode() if path.suffix in (".md", ".ipynb") else path.read_bytes()
            digest.update(f"{path.relative_to(source)} {len(seen)}\n".encode() + seen)
    for path in sorted([*(ROOT / "workflow").glob("*.py"), *(ROOT / "nbutils").rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _seen_elsewhere(page: Path) -> Iterator[str]:
    if page.suffix == ".md":
        yield from SEEN_ELSEWHERE.findall(page.read_text(encoding="utf-8"))
        return
    import nbformat  # here: most runs render nothing

    for cell in nbformat.read(page, as_version=4).cells:
        if cell.cell_type == "markdown":
            yield from SEEN_ELSEWHERE.findall(cell.source)
        if name := cell.metadata.get("mystnb", {}).get("figure", {}).get("name"):
            yield str(name)
