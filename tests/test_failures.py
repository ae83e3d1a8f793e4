"""Bad days: nothing counts that did not finish, the last line says why, the next run repairs it."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import FAILS, HOLDS, ROOT, chapter, copy_project

from benchmarks import __main__ as benchmarks
from workflow import jobs, mutants

RUN = f'"{sys.executable}" -m workflow run --profile smoke'
PRINTS = 'print("x" * 3_000_000)\nclaims.check("one", "a", 1.0, (0, 2), kind="exact")'


class Outcome(NamedTuple):
    """What one run in a namespace left."""

    status: int
    said: str
    notebooks: set[str]
    metrics: dict

    @property
    def last(self) -> str:
        return self.said.strip().splitlines()[-1]


def unshare(*kinds: str) -> list[str]:
    """The words that start a command in namespaces of its own; as root, or where users may make their own.

    Elsewhere the test is skipped, in CI too: Docker's default and Ubuntu 24.04 may forbid it. The weekly job is root.
    """
    words = ["unshare", *([] if os.getuid() == 0 else ["--user", "--map-root-user"]), *kinds]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        pytest.skip(f"this machine permits no namespace of its own, not even to make a small disk: {said}")
    return words


def test_where_namespaces_are_forbidden_the_skip_says_why(tmp_path, monkeypatch):
    (tmp_path / "unshare").write_text(
        '#!/bin/sh\necho "unshare: unshare failed: Operation not permitted" >&2\nexit 1\n'
    )
    (tmp_path / "unshare").chmod(0o755)
    for path, said in ((tmp_path, "Operation not permitted"), (tmp_path / "none", "No such file or directory")):
        monkeypatch.setenv("PATH", str(path))
        with pytest.raises(pytest.skip.Exception, match=f"permits no namespace .*: .*{said}"):
            unshare("--mount")


def run_twice(project: Path, trouble: str, repair: str) -> list[Outcome]:
    """Run the workflow after the shell commands ``trouble`` and again after ``repair``, in a mount namespace.

    The mounts go with the namespace, whatever becomes of the test.
    """
    keep = (
        "{run} >{n}.txt 2>&1 && echo 0 >{n}.rc || echo $? >{n}.rc\n"
        "(ls _build/smoke/seed-0/*.ipynb 2>/dev/null || true) >{n}.ls\n"
        "cp _build/smoke/metrics.json {n}.json 2>/dev/null || true\n"
    )
    script = "\n".join([trouble, keep.format(run=RUN, n="first"), repair, keep.format(run=RUN, n="second")])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [*unshare("--mount"), "sh", "-euc", script]
    subprocess.run(words, cwd=project, env=environment, check=True, timeout=1200)
    outcomes = []
    for name in ("first", "second"):
        metrics = project / f"{name}.json"
        outcomes.append(
            Outcome(
                int((project / f"{name}.rc").read_text()),
                (project / f"{name}.txt").read_text(),
                {Path(line).stem for line in (project / f"{name}.ls").read_text().split()},
                json.loads(metrics.read_text()) if metrics.exists() else {},
            )
        )
    return outcomes


def repaired(second: Outcome) -> bool:
    return second.status == 0 and "GREEN: 2 checks hold" in second.last and second.metrics["run"]["green"]


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout.strip().splitlines()[-1]


def test_a_disk_that_fills_up(project):
    """Room for one notebook, not for the other."""
    (project / "book" / "01-one.md").write_text(chapter("01-one", PRINTS))
    first, second = run_twice(
        project,
        "mkdir -p _build; mount -t tmpfs -o size=2m none _build",
        "mount -o remount,size=60m _build",
    )
    assert first.status == 1 and first.last.startswith("RED") and "No space left on device" in first.last, first.said
    assert first.notebooks <= {"02-two"} and not first.metrics.get("run", {}).get("green")
    assert first.metrics.get("verdicts", {}) in ({}, {"two": "confirmed"})
    assert "Traceback" not in first.said
    assert repaired(second), second.said


@pytest.mark.parametrize(
    ("trouble", "repair"),
    [
        ("mkdir -p _build; mount -t tmpfs -o size=64k none _build; cat /dev/zero >_build/f || true", "rm _build/f"),
        (
            "mkdir -p .snakemake; mount -t tmpfs -o size=64k none .snakemake; cat /dev/zero >.snakemake/f || true",
            "umount .snakemake",
        ),
    ],
    ids=["_build", ".snakemake"],
)
def test_a_full_disk(project, trouble, repair):
    """Not a byte is left when the run starts: on the disk of the results, and on that of Snakemake's notes."""
    if "rm " in repair:
        repair += "; mount -o remount,size=60m _build"
    first, second = run_twice(project, f"({trouble}) 2>/dev/null", repair)
    assert first.status in (1, 2) and "No space left on device" in first.last, first.said
    assert not first.metrics.get("run", {}).get("green")
    if "rm " in repair:  # without Snakemake's notes alone, notebooks may still get to their end
        assert not first.notebooks and not first.metrics.get("verdicts")
    assert repaired(second), second.said


@pytest.mark.parametrize("folder", ["_build", "_build/smoke/seed-0"])
def test_a_read_only_folder(project, folder):
    """Root ignores permission bits, so the folder is mounted read-only."""
    trouble = f"mkdir -p {folder}; mount --bind {folder} {folder}; mount -o remount,ro,bind {folder}"
    first, second = run_twice(project, trouble, f"umount {folder}")
    assert first.status in (1, 2) and "Read-only file system" in first.last, first.said
    assert not first.notebooks and not first.metrics.get("verdicts")
    assert repaired(second), second.said


@pytest.mark.parametrize(
    "keep",
    [
        lambda file: mutants.keep({"new": 1}, file),
        lambda file: benchmarks.keep("pairs", [{"what": "new"}], file),
        lambda file: benchmarks.write(file, [{"what": "new"}]),
    ],
    ids=["mutants", "bench --keep", "bench"],
)
def test_a_disk_that_fills_up_leaves_the_kept_result_whole(tmp_path, monkeypatch, keep):
    """The pages read these files: half of one would end every later run."""
    file = tmp_path / "kept.json"
    file.write_text('{"pairs": []}')

    def half(path: Path, text: str, **how: str) -> None:
        with open(path, "w", **how) as target:
            target.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left on device"):
        keep(file)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]
    assert json.loads(file.read_text()) == {"pairs": []}


def kernel(folder: Path, code: str) -> None:
    """A kernel specification ``python3`` that starts ``code`` in the place of a kernel."""
    target = folder / "kernels" / "python3"
    target.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-c", code, "{connection_file}"], "display_name": "broken", "language": "python"}
    (target / "kernel.json").write_text(json.dumps(spec))


def test_a_kernel_that_does_not_start(project, workflow, monkeypatch, tmp_path):
    kernel(tmp_path / "jupyter", "import ipykernel_is_not_installed")
    with monkeypatch.context() as broken:
        broken.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
        done = workflow(project, "--html")
    assert done.returncode == 1 and "Kernel died" in last_line(done), done.stdout[-2000:]
    assert "No module named 'ipykernel_is_not_installed'" in last_line(done)
    assert not list((project / "_build/smoke/seed-0").glob("*.ipynb"))
    assert workflow(project).returncode == 0


def test_a_kernel_of_another_environment_is_not_taken(project, workflow, monkeypatch, tmp_path):
    """A user's own python3 kernel, left by another environment, comes first in Jupyter's search."""
    kernel(tmp_path / "data", "import of_another_environment")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    assert workflow(project).returncode == 0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "DeadKernel"),
        ("os.kill(os.getppid(), signal.SIGKILL); import time; time.sleep(20)", jobs.KILLED),
    ],
    ids=["kernel", "job"],
)
def test_killed_as_for_want_of_memory(project, workflow, code, said):
    code = f'import os, signal\nclaims.check("one", "a", 1.0, (0, 2), kind="exact")\n{code}'
    (project / "book" / "01-one.md").write_text(chapter("01-one", code))
    done = workflow(project)
    assert done.returncode == 1 and "01-one" in last_line(done) and said in last_line(done), done.stdout[-2000:]
    metrics = json.loads((project / "_build/smoke/metrics.json").read_text())
    assert metrics["verdicts"] == {"two": "confirmed"} and not metrics["run"]["green"]
    (project / "book" / "01-one.md").write_text(chapter("01-one", HOLDS))
    assert workflow(project).returncode == 0


QUICK = """

def _quick(*, profile, seed, device):
    import time
    import pandas as pd
    from nbutils.training import Run

    time.sleep({seconds})
    return Run(pd.DataFrame({{"step": [0, 1], "norm": [1.0, 1.5]}}), settings={{"seed": seed}})


RECIPES = {{"quick": _quick}}
"""
LOADS = """
run = trainings.load("quick", profile=profile, seed=seed, device=device)["quick"]
claims.check("one", "a", run.history.norm.iloc[-1], (1.4, 1.6), kind="exact")
"""


def share_a_training(project: Path, seconds: float = 0) -> None:
    module = project / "nbutils" / "trainings" / "__init__.py"
    module.write_text((ROOT / "nbutils" / "trainings" / "__init__.py").read_text() + QUICK.format(seconds=seconds))
    text = chapter("01-one", LOADS, imports="from nbutils import trainings")
    (project / "book" / "01-one.md").write_text(text)


def test_a_training_past_its_time_limit(project, workflow):
    share_a_training(project, seconds=600)
    done = workflow(project, "--time-limit", "20")
    assert done.returncode == 1 and "quick: training raised TimeoutError: not finished after 20 s" in last_line(done)
    share_a_training(project)
    assert workflow(project).returncode == 0


def test_damaged_results_are_made_anew(project, workflow):
    share_a_training(project)
    assert workflow(project).returncode == 0
    folder = project / "_build" / "smoke"
    notebook, stats = folder / "seed-0" / "02-two.ipynb", folder / "seed-0" / "02-two.json"
    history = folder / "seed-0" / "trainings" / "quick" / "history.csv"
    whole = notebook.read_text()
    notebook.write_text(whole[: len(whole) // 2])
    history.write_text(history.read_text().replace("1.5", "7.5"))
    (folder / "metrics.json").write_text('{"run": {"green": tr')
    done = workflow(project)
    assert done.returncode == 0 and "GREEN: 2 checks hold" in last_line(done), done.stdout[-3000:]
    assert "02-two.ipynb is damaged" in done.stdout and "trainings/quick is damaged" in done.stdout
    assert json.loads((folder / "metrics.json").read_text())["run"]["green"]

    notebook.write_text(notebook.read_text().replace('"holds": true', '"holds": false'))
    stats.write_text("")
    history.with_name("stats.json").unlink(missing_ok=True)
    assert workflow(project).returncode == 0, "a verdict changed by hand does not count"


def test_results_of_an_older_text_do_not_count(project, workflow):
    """The workflow does not even start, and what lies there is green."""
    assert workflow(project).returncode == 0
    (project / "book" / "01-one.md").write_text(chapter("01-one", FAILS))
    rules = (project / "Snakefile").read_text()
    (project / "Snakefile").write_text(rules + "\nthis is no rule\n")
    done = workflow(project)
    assert done.returncode == 1 and last_line(done).startswith("RED"), done.stdout[-2000:]
    metrics = json.loads((project / "_build/smoke/metrics.json").read_text())
    assert metrics["verdicts"] == {"two": "confirmed"} and not metrics["run"]["green"]
    (project / "Snakefile").write_text(rules)
    assert "measured 5, band [0, 2]" in last_line(workflow(project))


def test_pages_that_cannot_be_rendered(project, workflow):
    (project / "book" / "errata.md").write_text("# Errata\n\n{{ no_such_claim }}\n")
    done = workflow(project, "--html")
    assert done.returncode == 1 and "pages: ValueError: nothing stands for {{ no_such_claim }}" in last_line(done)
    metrics = json.loads((project / "_build/smoke/metrics.json").read_text())
    assert not metrics["run"]["green"]
    (project / "book" / "errata.md").write_text("# Errata\n\nNone.\n")
    assert workflow(project, "--html").returncode == 0


LO_UP = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))  # SIOCSIFFLAGS: up and running
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def in_no_network(root: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the workflow with no network but the loopback, which the kernels need."""
    words = [*unshare("--net"), sys.executable, "-c", LO_UP, "-m", "workflow", "run", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment["HF_HOME"] = str(home)  # nothing from an earlier download
    return subprocess.run(
        words, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
    )


def test_the_hub_out_of_reach(project, tmp_path):
    """A chapter that asks for a public series ends, and says what is missing."""
    imports = "from nbutils import checkpoints"
    code = (
        'try:\n    checkpoints.series(["EleutherAI/pythia-14m@step1000"])\nexcept (OSError, ValueError) as why:\n'
        '    claims.leave_open("one", f"no public series here: {why}")'
    )
    (project / "book" / "01-one.md").write_text(chapter("01-one", code, imports))
    (project / "tests" / "baselines" / "verdicts.yml").write_text(
        "one: {verdict: open, reason: a test}\ntwo: {verdict: confirmed, reason: a test}\n"
    )
    done = in_no_network(project, tmp_path / "empty", "--profile", "book")
    assert done.returncode == 0 and "1 confirmed, 1 open" in last_line(done), done.stdout[-3000:]
    metrics = json.loads((project / "_build/book/metrics.json").read_text())
    (record,) = [record for record in metrics["records"] if record["claim"] == "one"]
    assert record["role"] == "open" and record["holds"] is None
    assert "EleutherAI/pythia-14m" in record["reason"] and "no public series here" in record["reason"]


@pytest.mark.slow
def test_the_smoke_book_without_a_network(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    copy_project(root)
    done = in_no_network(root, tmp_path / "empty", "--profile", "smoke")
    assert done.returncode == 0 and "GREEN" in last_line(done) and "open" in last_line(done), done.stdout[-3000:]
