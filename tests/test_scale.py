"""Beyond one machine: jobs placed by a profile of Snakemake's, one GPU for each, many seeds in one run."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from conftest import ROOT, chapter, check, write_chapters

from nbutils.claims.records import Record
from workflow import execute, gpus, run, seeds
from workflow.judge import Judgement, Problem
from workflow.processes import CANCELLED, SUPERSEDED, last_words

# ---- GPUs ----


@pytest.mark.parametrize(
    ("variable", "files", "names"),
    [
        (None, ["nvidia0", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm"], ["0", "2", "10"]),
        ("1,3", ["nvidia0", "nvidia1", "nvidia2", "nvidia3"], ["1", "3"]),  # what a scheduler gave
        ("GPU-8f6a-11, GPU-8f6a-12", [], ["GPU-8f6a-11", "GPU-8f6a-12"]),
        ("", ["nvidia0"], []),
    ],
)
def test_the_gpus_of_a_machine_are_its_device_files_or_what_was_given(tmp_path, monkeypatch, variable, files, names):
    for name in files:
        (tmp_path / name).touch()
    if variable is None:
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VISIBLE, variable)
    assert gpus.visible(tmp_path) == names


def _hold(names, folder, seconds, uses):
    with gpus.one_of(names, folder) as name:
        assert os.environ[gpus.VISIBLE] == name
        started = time.monotonic()
        time.sleep(seconds)
        uses.put((name, started, time.monotonic()))


def test_six_jobs_share_four_gpus_and_no_two_have_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "POLL", 0.05)
    names = ["0", "1", "GPU-8f6a-11", "GPU-8f6a-12"]
    context = multiprocessing.get_context("fork")
    uses = context.Queue()
    jobs = [context.Process(target=_hold, args=(names, tmp_path, 0.5, uses)) for _ in range(6)]
    for job in jobs:
        job.start()
    held = [uses.get(timeout=60) for _ in jobs]
    for job in jobs:
        job.join()
    assert {name for name, *_ in held} == {*names}
    by_gpu = {name: sorted(times for gpu, *times in held if gpu == name) for name in names}
    for times in by_gpu.values():
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(times)), "two at once"


def test_without_a_gpu_a_job_says_so():
    with pytest.raises(RuntimeError, match="this machine shows no GPU: use DEVICE=cpu"), gpus.one_of([]):
        pass


@pytest.mark.parametrize(
    ("device", "given", "limits"),
    [
        ("cuda", {}, ["--cores", "4", "--resources", "gpu=4"]),  # as many jobs at once as there are GPUs
        ("cuda", {"gpus": 2}, ["--cores", "4", "--resources", "gpu=2"]),
        ("cuda", {"gpus": 2, "jobs": 4}, ["--cores", "4", "--resources", "gpu=2"]),
        ("cpu", {}, ["--cores", "4", "--resources", "gpu=0"]),
        ("cpu", {"jobs": 4}, ["--cores", "4", "--resources", "gpu=0"]),
    ],
)
def test_how_much_runs_at_once_on_this_machine(monkeypatch, device, given, limits):
    monkeypatch.setattr(execute, "cores", lambda: 4)
    monkeypatch.setenv(gpus.VISIBLE, "0,1,2,3")
    options = Namespace(**{"jobs": None, "gpus": None} | given)
    found, threads = execute._placed_here(options, device)
    jobs = given.get("jobs") or (2 if device == "cpu" else given.get("gpus", 4))
    assert (found, threads) == (limits, 4 // jobs)


# ---- a profile of Snakemake's ----


def test_a_profile_places_the_jobs_and_what_this_machine_has_says_nothing(monkeypatch):
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "slurm")
    options = Namespace(device="", jobs=None, gpus=None)
    assert run.requested("gpu", 0, ["t5"], options).device == "cuda", "a login node has no GPU"
    assert execute._placed_by_profile(options) == ([], 1), "limits are the profile's"
    with pytest.raises(ValueError, match="runs jobs on other machines, so name it: cpu or cuda"):
        run.requested("gpu", 0, ["t5"], Namespace(device="auto"))
    monkeypatch.setenv("SNAKEMAKE_PROFILE", "none")
    assert not execute.on_other_machines()


def test_a_run_through_a_profile_asks_for_what_the_last_one_took(project, workflow, monkeypatch):
    profile = project / "profile"
    profile.mkdir()
    (profile / "config.yaml").write_text("cores: 2\nretries: 1\nset-threads:\n  execute: 2\n")
    monkeypatch.setenv("SNAKEMAKE_PROFILE", str(profile))
    done = workflow(project)
    assert done.returncode == 0, done.stdout[-3000:]
    stats = json.loads((project / "_build/smoke/seed-0/01-one.json").read_text())
    assert stats["threads"] == 2, "the profile sets them"
    costs = json.loads((project / "_build/smoke/costs.json").read_text())
    assert costs["01-one"] == {"seconds": round(stats["seconds"], 1), "peak_mb": round(stats["peak_mb"])}
    words = [sys.executable, "-m", "snakemake", "notebooks", "--dry-run", "--forceall", "--nolock", "--cores", "2"]
    words += ["--config", "profile=smoke", "device=cuda", "runs=0:01-one", "threads=1", "time_limit=60", "token=x"]
    words = [*words, "--profile", "none"]
    plan = subprocess.run(words, cwd=project, capture_output=True, text=True, check=True).stdout
    memory = -(-3 * round(stats["peak_mb"]) // 2) + 500
    assert "gpu=1" in plan and f"mem_mb={memory}" in plan, plan
    assert f"runtime={-(-round(stats['seconds'], 1) // 20) + 5:.0f}" in plan, plan


# ---- jobs that end before their end ----


def start_job(project, token):
    log = (project / "job.log").open("w")
    words = [sys.executable, "-m", "workflow.job", "chapter", "01-one", "--profile", "smoke", "--seed", "0"]
    words += ["--device", "cpu", "--token", token]
    return subprocess.Popen(words, cwd=project, stdout=log, stderr=log)


@pytest.mark.parametrize("why", [CANCELLED, SUPERSEDED])
def test_a_job_that_is_cancelled_or_outlived_by_another_run_says_so_and_leaves_no_result(project, why):
    (project / "book/01-one.md").write_text(chapter("01-one", "import time\ntime.sleep(600)\n" + check()))
    (project / "_build").mkdir()
    (project / "_build/.run").write_text("first")
    job = start_job(project, "first")
    logs = project / "_build/smoke/seed-0/logs"
    deadline = time.monotonic() + 120
    while not list(logs.glob("01-one.*.ipynb")):
        assert time.monotonic() < deadline and job.poll() is None, (project / "job.log").read_text()
        time.sleep(0.2)
    if why == CANCELLED:
        job.send_signal(signal.SIGTERM)
    else:
        (project / "_build/.run").write_text("second")
    assert job.wait(timeout=60) != 0
    assert last_words(project / "job.log") == f"01-one: Cancelled: {why}"
    assert not (project / "_build/smoke/seed-0/01-one.ipynb").exists()
    assert (logs / "01-one.ipynb").exists(), "what there is of the notebook stays"


def test_a_job_that_outlives_its_run_counts_until_another_begins(project):
    (project / "_build").mkdir()
    (project / "_build/.run").write_text("first")
    assert start_job(project, "first").wait(timeout=300) == 0
    assert (project / "_build/smoke/seed-0/01-one.ipynb").exists()
    assert start_job(project, "older").wait(timeout=300) != 0
    assert last_words(project / "job.log") == f"01-one: Cancelled: {SUPERSEDED}"


# ---- many seeds ----

AT_SEEDS = {  # the value by seed, and its kind
    "01-noted": ("{0: 1.0, 1: 5.0, 2: 1.2}.get(seed, 1.1)", "derived"),
    "02-red": ("5.0 if seed == 2 else 1.0", "exact"),
    "03-sound": ("1.0", "exact"),
}


def test_many_seeds_are_one_run_each_is_judged_and_one_table_says_what_was_red(project, workflow):
    texts = {name: chapter(name, check(name[3:], *facts)) for name, facts in AT_SEEDS.items()}
    write_chapters(project, texts)
    done = workflow(project, "--seeds", "0-2")
    assert done.returncode == 1, done.stdout[-3000:]
    assert done.stdout.count("Building DAG of jobs") == 2, "all seeds together, and all reruns together"
    *_, command, last = done.stdout.strip().splitlines()
    assert last.startswith("RED: 1 of 3 seeds (2); the first: 02-red: red stated check does not hold")
    assert command == "to run the first again: make smoke SEED=2 CHAPTERS=02-red"
    report = json.loads((project / "_build/smoke/seeds.json").read_text())
    assert [entry["green"] for entry in report["seeds"]] == [True, True, False]
    checks = {entry["claim"]: entry for entry in report["checks"]}
    assert checks["noted"]["noted"] == [1] and checks["noted"]["red"] == []
    assert checks["noted"]["values"] == {"0": 1.0, "1": 5.0, "2": 1.2}
    assert checks["red"]["red"] == [2] and report["checks"][0]["claim"] == "red", "what failed comes first"
    of_seed = json.loads((project / "_build/smoke/seed-1/metrics.json").read_text())
    assert of_seed["run"]["green"] and of_seed["run"]["noted"] == 1
    assert not (project / "_build/smoke/metrics.json").exists(), "that of one whole run, which this is not"


def _record(seed, measured, holds=True):
    fields = {"chapter": "t5", "claim": "c", "check": "a", "kind": "derived", "role": "stated", "band": (0.0, 2.0)}
    return Record(**fields, measured=measured, holds=holds, profile="smoke", seed=seed, device="cpu", anchor=None)


def test_room_is_the_least_distance_to_an_edge_in_standard_deviations():
    judgements = [
        Judgement({"seed": seed}, [_record(seed, value)], {}, []) for seed, value in enumerate((0.5, 1.0, 1.5))
    ]
    (spread,) = seeds.spreads(judgements)
    assert spread.room == pytest.approx(0.5 / 0.5)
    assert spread.values == {0: 0.5, 1: 1.0, 2: 1.5} and not spread.red


@pytest.mark.parametrize("text", ["", "3-1", "1,1", "a", "0-", "-3", "1-2-3"])
def test_seeds_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="seeds"):
        seeds.parse(text)


def test_what_stopped_one_seed_is_said_of_that_seed_alone():
    problem = Problem("t5", "", "its job was killed before its end")
    judgements = [
        Judgement({"seed": 0}, [_record(0, 1.0)], {}, []),
        Judgement({"seed": 1}, [], {}, [problem]),
    ]
    assert seeds.lines(seeds.spreads(judgements), judgements)[-1] == f"seed 1: t5: {problem.what}"


def test_pages_are_of_one_seed(workflow):
    done = workflow(ROOT, "--html", "--seeds", "0-2")
    assert done.returncode == 2 and "error: pages are of one seed" in done.stdout
