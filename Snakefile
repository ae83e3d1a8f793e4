# Shared trainings → executed chapters → pages. Started by `python -m workflow run …` (see the Makefile), which holds the lock,
# passes the configuration and prints what a run is red for. `made_from` decides what runs again: it has the hash of all that the
# numbers of a chapter or of a training depend on (workflow/sources.py). Where files lie says workflow.Run.
import os
import sys

sys.path.insert(0, workflow.basedir)  # a job on another machine has no variables of ours
from workflow import ROOT, TOKEN, Run, book, from_words, sources
from workflow.costs import Costs
from workflow.processes import Token

if workflow.remote_exec:  # before Snakemake makes room for outputs: this job may have been queued by a dead run
    Token(TOKEN, config["token"]).check()

PROFILE, DEVICE = config["profile"], config["device"]
RUNS = from_words(config["runs"], PROFILE, DEVICE)
GPU = 1 if DEVICE == "cuda" else 0
COSTS = Costs.of(PROFILE, DEVICE)
ANY = Run("{profile}", "{seed}", DEVICE)  # for the rules: its paths have Snakemake's wildcards in them
HASHES = sources.hashes()
PYTHON, RUN = sys.executable, os.getpid()
# What a result does not depend on: not in the rules' text, so that another value of it makes nothing run again.
OPTIONS = f"--time-limit {config['time_limit']} --token {config['token']} --parent {RUN}"
JOB = " --profile {wildcards.profile} --seed {wildcards.seed} --device {params.device} --threads {threads} {OPTIONS} 2>{log}"


def path(file):
    return str(file.relative_to(ROOT))


def training_stats(names):
    return expand(path(ANY.training_stats("{training}")), training=names, allow_missing=True)


localrules:
    pages,


wildcard_constraints:
    chapter="|".join(book.chapters()),
    seed=r"\d+",
    profile=r"\w+",


rule html:
    input:
        path(RUNS[0].index),


rule notebooks:
    input:
        [path(run.notebook(chapter)) for run in RUNS for chapter in run.chapters],


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
        threads: config["threads"]
        resources:
            gpu=GPU,
            mem_mb=lambda wildcards, attempt, names=names: COSTS.mem_mb(names, attempt),
            runtime=lambda wildcards, attempt, names=names: COSTS.minutes(names, attempt),
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
    threads: config["threads"]
    resources:
        gpu=GPU,
        mem_mb=lambda wildcards, attempt: COSTS.mem_mb([wildcards.chapter], attempt),
        runtime=lambda wildcards, attempt: COSTS.minutes([wildcards.chapter], attempt),
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
    threads: config["threads"]
    shell:
        "exec {PYTHON} -m workflow.job pages pages --profile {PROFILE} --seed {RUNS[0].seed} --device {DEVICE} --threads {threads} {OPTIONS} 2>{log}"
