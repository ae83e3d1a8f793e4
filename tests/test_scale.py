"""Beyond one machine: jobs placed by a profile of Snakemake's, one GPU for each, many seeds in one run."""

import itertools
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, chapter, check, write_chapters

from nbutils.claims.records import Record
from workflow import Run, costs, execute, gpus, run, seeds, write
from workflow.collect import NOT_STARTED, Collected
from workflow.judge import Judgement, Problem
from workflow.processes import CANCELLED, SUPERSEDED, last_words

# ---- GPUs ----


@pytest.mark.parametrize(
    ("variable", "count", "names"),
    [
        (None, 3, ["0", "1", "2"]),
        ("1,3", 4, ["1", "3"]),  # what a scheduler gave
        ("GPU-8f6a-11, GPU-8f6a-12", 4, ["GPU-8f6a-11", "GPU-8f6a-12"]),
        ("", 4, []),
    ],
)
def test_the_gpus_of_a_job_are_what_it_was_given_or_all_of_the_machine(monkeypatch, variable, count, names):
    monkeypatch.setattr("nbutils.devices.cuda_count", lambda: count)
    if variable is None:
        monkeypatch.delenv(gpus.VISIBLE, raising=False)
    else:
        monkeypatch.setenv(gpus.VISIBLE, variable)
    assert gpus.visible() == names


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


def test_a_gpu_that_is_alone_is_neither_chosen_nor_locked(tmp_path, monkeypatch):
    monkeypatch.delenv(gpus.VISIBLE, raising=False)  # each job of a node may see its own as number 0
    with gpus.one_of(["0"], tmp_path), gpus.one_of(["0"], tmp_path):
        assert gpus.VISIBLE not in os.environ and not list(tmp_path.iterdir())


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
    taken = json.loads((project / "_build/smoke/costs-cpu.json").read_text())
    assert taken["01-one"] == {"seconds": round(stats["seconds"], 1), "peak_mb": round(stats["peak_mb"])}
    words = [sys.executable, "-m", "snakemake", "notebooks", "--dry-run", "--forceall", "--nolock", "--cores", "2"]
    settings = ["profile=smoke", "runs=0,1:01-one", "threads=1", "time_limit=60", "token=x"]
    plan_of = {}
    for device in ("cpu", "cuda"):
        done = subprocess.run(
            [*words, "--config", *settings, f"device={device}", "--profile", "none"],
            cwd=project,
            capture_output=True,
            text=True,
            check=True,
        )
        plan_of[device] = done.stdout
    memory = -(-3 * round(stats["peak_mb"]) // 2) + 500
    minutes = -(-round(stats["seconds"], 1) // 20) + 5
    assert f"mem_mb={memory}" in plan_of["cpu"] and f"runtime={minutes:.0f}" in plan_of["cpu"], plan_of["cpu"]
    assert plan_of["cpu"].count("rule execute") == 2, "one job a seed"
    assert "gpu=1" in plan_of["cuda"] and "mem_mb=6500" in plan_of["cuda"], "on a GPU it did not run yet"


@pytest.mark.parametrize(
    ("name", "taken", "changes"),
    [
        ("t5", costs.Cost(seconds=85, peak_mb=1010), False),  # three times as long, on a busy machine
        ("t5", costs.Cost(seconds=30, peak_mb=2500), True),  # more memory than a job would get
        ("t5", costs.Cost(seconds=5, peak_mb=1000), True),  # the work is another
        ("aligned", costs.Cost(seconds=30, peak_mb=1000), True),  # a new job
    ],
)
def test_kept_costs_change_only_where_they_no_longer_serve(monkeypatch, tmp_path, name, taken, changes):
    monkeypatch.setattr(costs, "KEPT", tmp_path / "costs.json")
    monkeypatch.setattr(costs, "BUILD", tmp_path)
    before = {"t5": costs.Cost(seconds=30, peak_mb=1000)}
    costs.KEPT.write_text(costs._text(before))
    (tmp_path / "book").mkdir()
    (tmp_path / "book/costs-cpu.json").write_text(costs._text({name: taken}))
    costs.keep()
    assert costs._read(costs.KEPT) == (before | {name: taken} if changes else before)


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
    assert (project / "_build/smoke/seed-0/01-one.ipynb").exists()
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
    assert {seed: record.measured for seed, record in spread.records.items()} == {0: 0.5, 1: 1.0, 2: 1.5}


def test_room_is_to_the_band_of_the_same_seed_as_the_value():
    measured = {0: (1.0, (0.0, 3.0)), 1: (1.9, (0.0, 2.0)), 2: (1.2, (0.0, 2.5))}
    spread = seeds.Spread({seed: replace(_record(seed, value), band=band) for seed, (value, band) in measured.items()})
    assert spread.room == pytest.approx(0.1 / np.std([1.0, 1.9, 1.2], ddof=1))
    assert spread.band == "[0, 3], varies"
    constant = seeds.Spread({seed: _record(seed, 0.1) for seed in range(3)})
    assert constant.room == math.inf


@pytest.mark.parametrize(
    ("all_ended", "reasons", "ended"),
    [
        (True, {}, [True, True]),
        (False, {1: "cell [3] x raised ValueError: y"}, [True, False]),  # of the other seed
        (False, {1: NOT_STARTED}, [False, False]),  # Ctrl-C
        (False, {}, [False, False]),
    ],
)
def test_a_seed_is_stopped_by_its_own_jobs_or_with_the_whole_run(monkeypatch, all_ended, reasons, ended):
    requests = [Run("smoke", seed, chapters=("t5",)) for seed in (0, 1)]
    missing = {seed: {"t5": reason} for seed, reason in reasons.items()}
    monkeypatch.setattr(execute, "chapters", lambda runs, options: all_ended)
    monkeypatch.setattr(run, "collect", lambda request: Collected(request, missing=missing.get(request.seed, {})))
    assert [result.ended for result in run.measured(requests, Namespace())] == ended


def test_a_new_run_withdraws_what_an_older_one_said_of_its_seed_and_of_several(tmp_path, monkeypatch):
    for module in ("workflow", "workflow.write"):
        monkeypatch.setattr(f"{module}.BUILD", tmp_path)
    older = [tmp_path / "smoke" / name for name in ("metrics.json", "seeds.json", "seed-0/metrics.json")]
    older[-1].parent.mkdir(parents=True)
    for file in older:
        file.write_text("{}")
    write.withdraw(Run("smoke", 0))
    assert not any(file.exists() for file in older)


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
