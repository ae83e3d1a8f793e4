"""More than one machine: what jobs ask for, and the workflow through a real SLURM of one node or a submit script."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from conftest import ROOT, chapter

from workflow import cluster, jobs

SLURM = (
    "--slurm-no-account --slurm-status-command squeue --slurm-init-seconds-before-status-checks 3"
    " --default-resources slurm_partition=main"
)
WAIT = 'import time\ntime.sleep({})\nclaims.check("{}", "a", 1.0, (0, 2), kind="exact")'


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Resources of two jobs, recorded."""
    file = tmp_path / "resources.json"
    known = {"01-one": {"seconds": 90.0, "peak_mb": 400.0}, "lm-a": {"seconds": 10.0, "peak_mb": 1000.0}}
    file.write_text(json.dumps({"smoke": {"hardware": ["h"], "jobs": known}}))
    monkeypatch.setattr(cluster, "FILE", file)
    cluster.recorded.cache_clear()
    yield file
    cluster.recorded.cache_clear()


def test_a_job_asks_for_what_the_record_justifies(kept):
    """1.5 times the peak and 1000 MB; 4 times the seconds and 5 minutes."""
    assert cluster.memory_mb(["01-one"], "smoke") == 1600 and cluster.memory_mb(["lm-a"], "smoke") == 2500
    assert cluster.minutes(["01-one"], "smoke", 3600) == 6 + 5 and cluster.minutes(["lm-a"], "smoke", 3600) == 1 + 5
    assert cluster.minutes(["01-one"], "smoke", 60) == 1 + 5, "a job ends itself at its time limit"
    both = ["01-one", "lm-a"]
    assert cluster.memory_mb(both, "smoke") == 2500 and 6 + 5 <= cluster.minutes(both, "smoke", 3600) <= 7 + 5


def test_a_job_without_a_record_asks_as_the_largest(kept):
    assert cluster.memory_mb(["02-new"], "smoke") == 2500 and cluster.minutes(["02-new"], "smoke", 3600) == 60 + 5
    assert cluster.memory_mb(["01-one"], "gpu") == 4000 and cluster.minutes(["01-one"], "gpu", 120) == 2 + 5


def test_short_trainings_of_one_module_share_a_job(monkeypatch):
    """None of several is recorded with more than a minute; none mixes modules, which go stale by different changes."""
    module = {"lm-a": "lm", "lm-b": "lm", "lm-c": "lm", "lm-new": "lm", "t5-a": "t5", "t5-b": "t5"}
    seconds = {"lm-a": 30, "lm-b": 29, "lm-c": 2, "t5-a": 5, "t5-b": 70}
    monkeypatch.setattr(cluster.trainings, "names", lambda: list(module))
    monkeypatch.setattr(cluster.dependencies, "of_training", lambda name: [module[name]])
    monkeypatch.setattr(cluster.dependencies, "trainings_of", lambda chapter: ["lm-b", "t5-b"])
    monkeypatch.setattr(cluster, "recorded", lambda profile: {name: {"seconds": s} for name, s in seconds.items()})
    assert cluster.batches("smoke") == [["lm-a", "lm-b"], ["lm-c"], ["lm-new"], ["t5-a"], ["t5-b"]]
    assert cluster.trained_for("04-four", "smoke") == {"lm-a", "lm-b", "t5-b"}
    monkeypatch.setattr(cluster, "recorded", lambda profile: {})
    assert cluster.batches("gpu") == [[name] for name in module], "without a record each has a job of its own"


def test_resources_are_recorded_from_runs(kept, tmp_path, monkeypatch):
    """The longest and the largest over the seeds; other profiles stay."""
    monkeypatch.setattr(cluster, "BUILD", tmp_path / "_build")
    with pytest.raises(FileNotFoundError, match="run `make book` first"):
        cluster.record("book")
    for seed, seconds, peak in ((1, 5.0, 300.0), (2, 4.0, 350.0)):
        folder = tmp_path / "_build" / "book" / f"seed-{seed}" / "trainings" / "lm-a"
        folder.mkdir(parents=True)
        stats = {"seconds": seconds, "peak_mb": peak, "hardware": "h"}
        (folder / "stats.json").write_text(json.dumps({"training": "lm-a", **stats}))
        (folder.parent.parent / "01-one.json").write_text(json.dumps({"chapter": "01-one", **stats}))
    cluster.record("book")
    written = json.loads(kept.read_text())
    assert set(written) == {"smoke", "book"} and set(written["book"]["jobs"]) == {"01-one", "lm-a"}
    assert written["book"]["jobs"]["lm-a"] == {"seconds": 5.0, "peak_mb": 350.0}


def test_a_record_of_some_jobs_leaves_the_others(tmp_path, monkeypatch):
    """What did not run here keeps what it asks for; what is no longer in the book goes."""
    file, folder = tmp_path / "resources.json", tmp_path / "_build" / "smoke" / "seed-0"
    entry = {"seconds": 9.0, "peak_mb": 900.0}
    old = {name: entry for name in ("04-t5", "14-pretrained", "t5-own", "99-gone")}
    file.write_text(json.dumps({"smoke": {"hardware": ["a machine"], "jobs": old}}))
    monkeypatch.setattr(cluster, "FILE", file)
    monkeypatch.setattr(cluster, "BUILD", tmp_path / "_build")
    folder.mkdir(parents=True)
    stats = {"chapter": "04-t5", "seconds": 1.0, "peak_mb": 100.0, "hardware": "another"}
    (folder / "04-t5.json").write_text(json.dumps(stats))
    cluster.record("smoke")
    written = json.loads(file.read_text())["smoke"]
    assert written["hardware"] == ["a machine", "another"]
    assert written["jobs"]["04-t5"]["seconds"] == 1.0 and written["jobs"]["14-pretrained"] == entry
    assert set(written["jobs"]) == {"04-t5", "14-pretrained", "t5-own"}


def test_the_committed_record_is_of_chapters_and_trainings_that_exist():
    from nbutils import trainings
    from workflow import chapters

    for profile, entry in json.loads((ROOT / "tests" / "baselines" / "resources.json").read_text()).items():
        assert profile in ("smoke", "book", "gpu") and entry["hardware"]
        assert set(entry["jobs"]) <= {*chapters(), *trainings.names()}
        assert all(math.isfinite(value) and value > 0 for job in entry["jobs"].values() for value in job.values())


def test_a_job_gives_up_when_another_run_has_the_checkout(tmp_path):
    """On a cluster a job outlives a killed run. Its parent is alive, so the lock must tell it."""
    code = (
        "import sys, time, pathlib; from workflow import jobs; jobs.HOLDER = pathlib.Path(sys.argv[1], '.holder');"
        "jobs.die_with_run('run-a', interval=0.05); print('up', flush=True); time.sleep(60)"
    )
    (tmp_path / ".holder").write_text("process 1 on here\nrun-a\n")
    job = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    job.stdout.readline()
    time.sleep(2)
    assert job.poll() is None, "its own run holds the lock"
    (tmp_path / ".holder").write_text("")  # between two writes of the lock
    time.sleep(2)
    assert job.poll() is None
    (tmp_path / ".holder").write_text("process 2 on there\nrun-b\n")
    assert job.wait(timeout=20) == 1


def test_a_clusters_gpu_is_taken_as_given(monkeypatch, tmp_path):
    """The scheduler has set CUDA_VISIBLE_DEVICES; this machine's slots must not change it."""
    seen = []
    monkeypatch.setattr(jobs, "die_with_run", lambda run: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    words = ["--profile", "gpu", "--seed", "0", "--device", "cuda", "--executor", "slurm"]
    arguments = jobs.parser("").parse_args(words)
    for name in (*jobs.THREADS, "PYTHONPATH", "PYTHONHASHSEED", "NBUTILS_BOOK", "JUPYTER_PREFER_ENV_PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    jobs.start(lambda arguments: seen.append(os.environ["CUDA_VISIBLE_DEVICES"]), arguments)
    assert seen == ["3"] and not list(tmp_path.iterdir())


def last_line(done):
    return done.stdout.strip().splitlines()[-1]


def need(plugin):
    if find_spec(f"snakemake_executor_plugin_{plugin}") is None:
        pytest.skip(f"no snakemake-executor-plugin-{plugin.replace('_', '-')}: pip install '.[slurm]'")


@pytest.fixture(scope="module")
def slurm():
    """A SLURM of one node, from Debian's packages; stopped at the end."""
    need("slurm")
    started = subprocess.run(["bash", ROOT / ".ci" / "slurm", "start"], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"no SLURM: {started.stderr.strip().splitlines()[-1]}")
    yield
    subprocess.run(["bash", ROOT / ".ci" / "slurm", "stop"], check=True)


def queue():
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_through_slurm(project, workflow, slurm):
    kept = project / "tests" / "baselines" / "resources.json"
    kept.write_text(json.dumps({"smoke": {"hardware": ["h"], "jobs": {"01-one": {"seconds": 90.0, "peak_mb": 400.0}}}}))
    done = workflow(project, "--executor", "slurm", "--executor-args", SLURM)
    assert done.returncode == 0 and "GREEN: 2 checks hold" in done.stdout, done.stdout[-4000:]
    shown = subprocess.run(["scontrol", "show", "job", "--oneliner"], capture_output=True, text=True).stdout
    asked = [line for line in shown.splitlines() if f"WorkDir={project}" in line]
    assert len(asked) == 2 and all("JobState=COMPLETED" in line for line in asked)
    assert {re.search(r"MinMemoryNode=(\S+)", line)[1] for line in asked} == {"1600M"}
    assert "TimeLimit=00:11:00" in "".join(asked), "4 times 90 seconds and 5 minutes"

    stamp = (project / "_build/smoke/seed-0/01-one.ipynb").stat().st_mtime_ns
    assert workflow(project).returncode == 0
    assert (project / "_build/smoke/seed-0/01-one.ipynb").stat().st_mtime_ns == stamp, "who runs it changes nothing"


@pytest.mark.slow
def test_a_failure_on_slurm_names_chapter_and_cell(project, workflow, slurm):
    (project / "book" / "01-one.md").write_text(chapter("01-one", 'x = 1\nraise KeyError("no such thing")'))
    done = workflow(project, "--executor", "slurm", "--executor-args", SLURM)
    assert done.returncode == 1 and "01-one: cell [4] x = 1 raised KeyError: 'no such thing'" in last_line(done)


@pytest.mark.slow
def test_a_killed_run_on_slurm_leaves_no_writer(project, workflow, slurm):
    """Its jobs go on in the queue. The next run takes the checkout, and they end without a result."""
    (project / "book" / "01-one.md").write_text(chapter("01-one", WAIT.format(600, "one")))
    words = [sys.executable, "-m", "workflow", "run", "--profile", "smoke"]
    words += ["--executor", "slurm", "--executor-args", SLURM]
    with open(project / "killed.log", "w") as log:
        run = subprocess.Popen(words, cwd=project, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + 240
    while "cell" not in (project / "killed.log").read_text() and time.monotonic() < deadline:
        if (project / "_build/smoke/seed-0/logs/01-one.ipynb").exists():
            break  # papermill is at work
        time.sleep(1)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert queue(), "the job outlives its run"
    (project / "book" / "01-one.md").write_text(chapter("01-one", WAIT.format(1, "one")))
    done = workflow(project, "--executor", "slurm", "--executor-args", SLURM)
    assert done.returncode == 0 and "GREEN: 2 checks hold" in last_line(done), done.stdout[-4000:]
    deadline = time.monotonic() + 60
    while queue() and time.monotonic() < deadline:
        time.sleep(1)
    assert not queue()


@pytest.mark.slow
def test_looked_at_again_and_alarms_through_slurm(project, workflow, slurm):
    """What fails at seed 0 alone is noted there too, and a measurement of red runs goes through the scheduler."""
    code = 'claims.check("one", "a number", 1.0 + 4 * (seed == 0), (0, 2), kind="derived")'
    (project / "book" / "01-one.md").write_text(chapter("01-one", code))
    words = ["--executor", "slurm", "--executor-args", SLURM]
    done = workflow(project, *words)
    assert done.returncode == 0 and "1 noted" in last_line(done), done.stdout[-4000:]
    done = workflow(project, "--first", "5", "--seeds", "2", *words, command="alarms")
    assert done.returncode == 0 and "0.0 % of smoke runs red" in last_line(done), done.stdout[-4000:]


SUBMIT = """#!/bin/sh
# What a scheduler does: take the job, say its name, run it elsewhere. The script's arguments are what it may use.
echo "$2 $3 $4" >>submitted.txt
nohup sh "$1" >"$1.log" 2>&1 </dev/null &
echo $!
"""


def submitted(project, workflow, *words):
    """A run through a submit script; what it asked for, a line a job: memory, minutes, GPUs."""
    need("cluster_generic")
    (project / "submit").write_text(SUBMIT)
    (project / "submit").chmod(0o755)
    # Snakemake puts the job's script after the command and its requests
    command = "'sh -c \"./submit \\$0 {resources.mem_mb} {resources.runtime} {resources.gpu}\"'"
    arguments = ["--executor", "cluster-generic", "--executor-args", f"--cluster-generic-submit-cmd {command}"]
    done = workflow(project, *words, *arguments)
    return done, (project / "submitted.txt").read_text().splitlines()


@pytest.mark.slow
def test_through_a_submit_script(project, workflow):
    """Any scheduler: the generic plugin, a script that submits, the same requests."""
    done, asked = submitted(project, workflow)
    assert done.returncode == 0 and "GREEN: 2 checks hold" in last_line(done), done.stdout[-4000:]
    assert len(asked) == 2 and all(re.fullmatch(r"\d+00 \d+ 0", line) for line in asked), asked


@pytest.mark.slow
def test_a_gpu_is_asked_for_where_it_is_used(project, workflow):
    """Here the jobs end in an error where there is none; what they asked for is what counts."""
    asked = submitted(project, workflow, "--device", "cuda")[1]
    assert len(asked) == 2 and all(line.endswith(" 1") for line in asked), asked
