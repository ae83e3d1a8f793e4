"""Fixtures: the smoke run of the real book, and a small copy of the project whose chapters a test may break."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hub import Hub

from nbutils import devices

if TYPE_CHECKING:
    from playwright.sync_api import Browser

ROOT = Path(__file__).resolve().parent.parent

CHAPTER = """---
jupytext:
  text_representation: {{extension: .md, format_name: myst}}
kernelspec: {{name: python3, display_name: Python 3, language: python}}
---

# {title}

```{{code-cell}} ipython3
:tags: [parameters]

profile = "auto"
seed = 0
device = "auto"
```

```{{code-cell}} ipython3
from nbutils.claims import Ledger
{imports}
claims = Ledger("{name}", profile=profile, seed=seed, device=device)
```

```{{code-cell}} ipython3
{code}
```
"""
CLAIM = """- id: {word}
  chapters: [{name}]
  source: "Eq. 1"
  statement: A claim.
  object: proof
  expected: confirmed
  why: a test
"""


def check(claim: str = "one", value: object = 1.0, kind: str = "exact") -> str:
    """A cell with a check that holds from 0 to 2; ``value`` may be an expression of ``seed``."""
    return f'claims.check("{claim}", "a number", {value}, (0, 2), kind="{kind}")'


def chapter(name: str, code: str, imports: str = "from normgrowth import norms") -> str:
    """Source of a small chapter."""
    return CHAPTER.format(title=name, name=name, code=code, imports=imports)


def write_chapters(root: Path, sources: Mapping[str, str]) -> None:
    """Make a book of these chapters and no others, with a claim each: ``one`` of ``01-one``."""
    for page in (root / "book").glob("[!_]*.md"):
        if page.read_text().startswith("---\njupytext:"):
            page.unlink()
    for name, text in sources.items():
        (root / "book" / f"{name}.md").write_text(text)
    (root / "book" / "claims.yml").write_text("".join(CLAIM.format(name=name, word=name[3:]) for name in sources))
    pages = [*sources, "scorecard", "errata", "running", "run", "api", "bibliography"]
    entries = "".join(f"  - file: {page}\n" for page in pages)
    (root / "_toc.yml").write_text(f"format: jb-book\nroot: index\nchapters:\n{entries}")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: minutes; left to `make test-all`")
    config.addinivalue_line("markers", "colab: every notebook once more, as on Colab; `make test-colab`, and CI")
    config.addinivalue_line("markers", "whole: needs a whole run of the book, which the first of these tests makes")
    config.addinivalue_line("markers", "project: runs a small copy of the project, which needs git")
    config.addinivalue_line(
        "markers", "gpu: needs CUDA; `pytest -m gpu tests` runs these where there is no more than torch"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m gpu``, leave out files without such tests: they need packages that a machine with a GPU may lack."""
    if config.option.markexpr.startswith("gpu") and collection_path.suffix == ".py":
        return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_cuda = pytest.mark.skip(reason="torch finds no CUDA device here")
    for item in items:
        if item.get_closest_marker("gpu") and not devices.cuda_count():
            item.add_marker(no_cuda)
        given = getattr(getattr(item, "callspec", None), "params", {})  # by parametrize: no fixtures
        for fixture, marker in (("smoke", "whole"), ("project", "project")):
            if fixture in getattr(item, "fixturenames", ()) and fixture not in given:
                item.add_marker(marker)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client's own requests, answered on this machine."""
    from huggingface_hub import constants

    hub = Hub(tmp_path / "hub")
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    for name, value in (("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", template), ("HF_HUB_OFFLINE", False),
                        ("HF_HUB_CACHE", str(tmp_path / "cache"))):  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield hub
    hub.close()


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What draws from torch's own generator draws the same, whichever tests ran before."""
    torch.manual_seed(0)


def copy_project(target: Path) -> None:
    """What git has or would add, without builds and environments."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project with two small chapters, 01-one and 02-two, and a claim each."""
    root = tmp_path / "project"
    root.mkdir()
    copy_project(root)
    shutil.rmtree(root / "book" / "notebooks")
    two = chapter("02-two", check("two"), "from nbutils import profiles")
    write_chapters(root, {"01-one": chapter("01-one", check()), "02-two": two})
    (root / "book" / "index.md").write_text('# A book\n\n{{ show("verdict_counts.md") }}\n')
    (root / "book" / "errata.md").write_text('# Errata\n\nNone. {{ judged("one") }}\n')
    for page in ("callbacks", "cluster", "new", "notation"):  # they link to chapters that are not here
        (root / "book" / f"{page}.md").unlink()
    api = root / "workflow" / "pages" / "api.py"  # pages of all modules take longer than all others
    few = 'codes = {"nbutils.intervals": "", "normgrowth.fits": ""}'
    api.write_text(api.read_text().replace("codes = sources.modules()", few))
    (root / "book" / "running.md").write_text("# Running\n\nAs usual.\n")
    (root / "book" / "api.md").write_text("# The module\n\nEach has its page.\n")
    return root


@pytest.fixture(scope="session")
def workflow() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the workflow of a checkout: ``workflow(root, "--html")``. Output is in ``stdout``, both streams together."""

    def run(
        root: Path, *arguments: str, command: str = "run", profile: str = "smoke"
    ) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "workflow", command, "--profile", profile, *arguments]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        return subprocess.run(
            words, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3000
        )

    return run


@pytest.fixture(scope="session")
def whole_smoke(workflow: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[[], float]:
    """Run the whole book in the smoke profile, once no other worker of the tests does. Returns the seconds it took."""

    def run() -> float:
        while True:
            started = time.monotonic()
            done = workflow(ROOT, "--html")
            if "another run is active" not in done.stdout:
                assert done.returncode == 0, done.stdout[-6000:]
                return time.monotonic() - started
            time.sleep(5)

    return run


@pytest.fixture(scope="session")
def smoke(whole_smoke: Callable[[], float]) -> Path:
    """The whole book in the smoke profile, executed, checked and rendered. Returns its build folder."""
    whole_smoke()
    return ROOT / "_build" / "smoke"


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium. Without one the test is skipped, except in CI, which skips none."""
    from workflow.pages import pdf

    with contextlib.suppress(RuntimeError):
        return pdf.browser()
    if os.environ.get("CI"):
        pytest.fail("CI runs the browser tests, and there is no Chromium: .ci/run installs it")
    pytest.skip("no Chromium on this machine: install Debian's package chromium to run the browser tests")


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright  # here, so that tests without a browser need none to be collected

    off = ("no-sandbox", "disable-gpu", "disable-background-networking", "disable-component-update", "disable-sync")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=[f"--{each}" for each in off])
        yield opened
        opened.close()
