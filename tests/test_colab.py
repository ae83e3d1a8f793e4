"""Every notebook alone, as on Colab: an empty folder, Colab's packages and no others, and this checkout's wheel.

Colab's machine is imitated by an environment that shows nothing but the packages below and what they need: links to
those that are installed here, so it costs a second and no download. Each notebook gets an environment of its own, and
its first cell really installs the module, from the wheel in place of the repository's address.

Twice the work of the smoke run: `make test-colab`, which CI runs.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_notebooks import committed_text

from nbutils.claims.check import records_of
from workflow import ROOT, book

pytestmark = pytest.mark.colab
COLAB = ["numba", "numpy", "torch", "transformers", "matplotlib", "seaborn", "pandas", "scipy", "tqdm"]
COLAB += ["ipykernel", "pip"]
AT_ONCE = 2
LIMIT = 900  # seconds a notebook


def closure(names):
    """The installed distributions that ``names`` need, themselves included, by canonical name."""
    found, waiting = {}, [Requirement(name) for name in names]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        key = (name, frozenset(wanted.extras))
        if key in found:
            continue
        found[key] = here = distribution(name)
        for line in here.requires or ():
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in (*wanted.extras, "")):
                waiting.append(need)
    return {name: here for (name, _), here in found.items()}


def environment(folder):
    """A Python environment with Colab's packages alone. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    for here in closure(COLAB).values():
        for top in {file.parts[0] for file in here.files} - {"..", "__pycache__"}:
            target, link = Path(here.locate_file(top)), site / top
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return python


def installed(python):
    """What pip sees there: names and versions."""
    code = "from importlib.metadata import distributions as d; print(*sorted(f'{x.name}=={x.version}' for x in d()))"
    return set(
        subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )


class Executed(NamedTuple):
    code: int
    output: str
    notebook: Path
    added: set  # packages after less packages before
    lost: set
    left: list  # files beside the notebook


def execute(chapter, wheel, base):
    """Run one committed notebook in a fresh environment and an empty folder."""
    place = base / chapter
    python = environment(place / "colab")
    spec = place / "jupyter" / "kernels" / "colab"
    spec.mkdir(parents=True)
    words = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": words, "display_name": "colab", "language": "python"}))
    address = f"git+{yaml.safe_load((ROOT / '_config.yml').read_text())['repository']['url']}"
    text = committed_text(chapter)
    assert text.count(f'\\"{address}\\"') == 1
    source = place / f"{chapter}.ipynb"
    source.write_text(text.replace(address, str(wheel)), encoding="utf-8")
    empty, out, before = place / "content", place / "out.ipynb", installed(python)
    empty.mkdir()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "NBUTILS", "PIP_"))}
    settings = {"JUPYTER_PATH": str(place / "jupyter"), "HOME": str(base / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "papermill", str(source), str(out), "--kernel", "colab", "--cwd", str(empty)]
    command += ["--no-progress-bar", "-p", "profile", "smoke", "-p", "device", "cpu"]
    try:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(command, env=inherited | settings, timeout=LIMIT, **pipes)
        code, output = done.returncode, done.stdout[-4000:]
    except subprocess.TimeoutExpired:
        code, output = 124, f"{chapter} took more than {LIMIT} s"
    after = installed(python)
    return Executed(code, output, out, after - before, before - after, [file.name for file in empty.iterdir()])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (built,) = folder.glob("norm_growth-*.whl")
    return built


@pytest.fixture(scope="module")
def executions(request, wheel, tmp_path_factory):
    """All selected notebooks, two at once; each test waits for its own."""
    base = tmp_path_factory.mktemp("colab")
    (base / "home").mkdir()
    ours = [item for item in request.session.items if item.module.__name__ == __name__ and hasattr(item, "callspec")]
    wanted = dict.fromkeys(item.callspec.params["chapter"] for item in ours)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {chapter: pool.submit(execute, chapter, wheel, base) for chapter in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("chapter", book.chapters())
def test_notebook_runs_alone(chapter, executions):
    """It installs the module and nothing else, runs to its end, and its checks hold."""
    run = executions[chapter].result()
    assert run.code == 0, run.output
    assert {name.split("==")[0] for name in run.added} == {"norm-growth"} and not run.lost
    assert run.left == [], "it left files beside the notebook"
    records = records_of(run.notebook)
    assert records and all(record.holds is not False for record in records)
    cells = nbformat.read(run.notebook, as_version=4).cells
    printed = " ".join(output.get("text", "") for cell in cells for output in cell.get("outputs", ()))
    assert "restart" not in printed.lower()
