# Shared trainings → executed chapters → pages. Started by `python -m workflow run …` (see the Makefile), which holds the lock,
# passes the configuration and prints what a run is red for. `made_from` decides what runs again: it has the hash of all that the
# numbers of a chapter or of a training depend on (workflow/sources.py). Where files lie says workflow.Run.
import os
import sys

from workflow import ROOT, Run, book, sources

PROFILE, DEVICE = config["profile"], config["device"]
CHAPTERS = config["chapters"].split()
RUNS = [Run(PROFILE, int(seed), DEVICE) for seed in str(config["seeds"]).split()]
ANY = Run("{profile}", "{seed}", DEVICE)  # for the rules: its paths have Snakemake's wildcards in them
HASHES = sources.hashes()
PYTHON, RUN = sys.executable, os.getpid()
# What a result does not depend on: not in the rules' text, so that another value of it makes nothing run again.
OPTIONS = f"--threads {config['threads']} --time-limit {config['time_limit']} --parent {RUN}"
JOB = " --profile {wildcards.profile} --seed {wildcards.seed} --device {params.device} {OPTIONS} 2>{log}"


def path(file):
    return str(file.relative_to(ROOT))


def training_stats(names):
    return expand(path(ANY.training_stats("{training}")), training=names, allow_missing=True)


wildcard_constraints:
    chapter="|".join(book.chapters()),
    seed=r"\d+",
    profile=r"\w+",


rule html:
    input:
        path(RUNS[0].index),


rule notebooks:
    input:
        [path(run.notebook(chapter)) for run in RUNS for chapter in CHAPTERS],


for names in sources.families():

    rule:
        name:
            "train_" + names[0].replace("-", "_")
        output:
            training_stats(names),
        log:
            path(ANY.log(names[0])),
        params:
            names=" ".join(names),
            made_from=[HASHES[name] for name in names],
            device=DEVICE,
        resources:
            gpu=1 if DEVICE == "cuda" else 0,
        shell:
            "exec {PYTHON} -m workflow.job training {params.names}" + JOB


rule execute:
    input:
        lambda wildcards: training_stats(sources.trainings_of(wildcards.chapter)),
    output:
        path(ANY.notebook("{chapter}")),
        path(ANY.stats("{chapter}")),
    log:
        path(ANY.log("{chapter}")),
    params:
        made_from=lambda wildcards: HASHES[wildcards.chapter],
        device=DEVICE,
    resources:
        gpu=1 if DEVICE == "cuda" else 0,
    shell:
        "exec {PYTHON} -m workflow.job chapter {wildcards.chapter}" + JOB


rule pages:
    """Staged sources, then Sphinx. The old pages are replaced in one step at the end."""
    input:
        rules.notebooks.input,
        path(RUNS[0].metrics),  # verdicts are written once, before
        sources.page_sources(),
    output:
        path(RUNS[0].index),
    log:
        path(RUNS[0].log("pages")),
    shell:
        "exec {PYTHON} -m workflow.job pages pages --profile {PROFILE} --seed {RUNS[0].seed} --device {DEVICE} {OPTIONS} 2>{log}"
