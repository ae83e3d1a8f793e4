# Shared trainings → executed chapters → pages. Started by `python -m workflow run …` (see the Makefile), which holds the lock,
# passes the configuration and prints what a run is red for. `made` decides what runs again: it has the hash of all that the numbers
# of a chapter or of a training depend on; a result of another hash is removed before (workflow/sources.py).
import os
import sys

from workflow import ROOT, Run, sources

PROFILE, DEVICE = config["profile"], config["device"]
CHAPTERS = config["chapters"].split()
RUNS = [Run(PROFILE, int(seed), DEVICE) for seed in str(config["seeds"]).split()]
HASHES = sources.hashes()
PYTHON, RUN = sys.executable, os.getpid()
# What a result does not depend on: not in the rules' text, so that another value of it makes nothing run again.
HOW = f"--threads {config['threads']} --time-limit {config['time_limit']} --parent {RUN}"
JOB = " --profile {wildcards.profile} --seed {wildcards.seed} --device {params.device} {HOW} 2>{log}"
FOLDER = "_build/{profile}/seed-{seed}"


def path(file):
    return str(file.relative_to(ROOT))


wildcard_constraints:
    chapter=r"\d\d-[\w-]+",
    seed=r"\d+",
    profile=r"\w+",


rule html:
    input:
        path(RUNS[0].html / "index.html"),


rule notebooks:
    input:
        [path(run.notebook(chapter)) for run in RUNS for chapter in CHAPTERS],


for names in sources.families():

    rule:
        name:
            "train_" + names[0].replace("-", "_")
        output:
            expand(FOLDER + "/trainings/{training}/stats.json", training=names, allow_missing=True),
        log:
            FOLDER + f"/logs/{names[0]}.log",
        params:
            made=" ".join(f"{name}={HASHES[name]}" for name in names),
            device=DEVICE,
        resources:
            gpu=1 if DEVICE == "cuda" else 0,
        shell:
            "exec {PYTHON} -m workflow.job training {params.made}" + JOB


rule execute:
    input:
        lambda w: expand(
            FOLDER + "/trainings/{training}/stats.json", training=sources.trainings_of(w.chapter), allow_missing=True
        ),
    output:
        FOLDER + "/{chapter}.ipynb",
        FOLDER + "/{chapter}.json",
    log:
        FOLDER + "/logs/{chapter}.log",
    params:
        made=lambda w: f"{w.chapter}={HASHES[w.chapter]}",
        device=DEVICE,
    resources:
        gpu=1 if DEVICE == "cuda" else 0,
    shell:
        "exec {PYTHON} -m workflow.job chapter {params.made}" + JOB


rule pages:
    """Staged sources, then Sphinx. The old pages are replaced in one step at the end."""
    input:
        rules.notebooks.input,
        path(RUNS[0].reports / "metrics.json"),  # verdicts are collected once, before
        sources.of_pages(),
    output:
        path(RUNS[0].html / "index.html"),
    log:
        path(RUNS[0].logs / "pages.log"),
    shell:
        "exec {PYTHON} -m workflow.job pages pages=- --profile {PROFILE} --seed {RUNS[0].seed} --device {DEVICE} {HOW} 2>{log}"
