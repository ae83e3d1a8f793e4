# Chapter → executed notebook → staged book → HTML. Started by `python -m workflow run …` (see the Makefile), which
# holds the lock, passes the configuration and prints what a red run is red for.
import hashlib
import sys

from workflow import cluster, dependencies, render

PROFILE = config["profile"]
SEEDS = str(config["seeds"]).split()
CHAPTERS = config["chapters"].split()
HTML = "_build/html" if PROFILE == "book" else f"_build/{PROFILE}/html"
PYTHON = sys.executable
# What a job's result does not depend on: not among its params, so that another value of it makes nothing run again.
JOB = "--threads {threads} --time-limit {time_limit} --run {run} --executor {executor} --gpus={gpus}".format(**config)


wildcard_constraints:
    chapter=r"\d\d-[\w-]+",
    seed=r"\d+",
    profile=r"\w+",


localrules:
    html,
    notebooks,
    pages,


rule html:
    input:
        f"{HTML}/index.html",


rule notebooks:
    input:
        expand("_build/{profile}/seed-{seed}/{chapter}.ipynb", profile=PROFILE, seed=SEEDS, chapter=CHAPTERS),


# Trainings that chapters share, each once for a profile and seed.
for names in cluster.batches(PROFILE):

    rule:
        name:
            "train_" + names[0].replace("-", "_")
        input:
            dependencies.HOW_IT_IS_RUN,  # of text and modules workflow.stale judges, before anything is started
        output:
            expand("_build/{{profile}}/seed-{{seed}}/trainings/{training}/history.csv", training=names),
            expand("_build/{{profile}}/seed-{{seed}}/trainings/{training}/stats.json", training=names),
        log:
            expand("_build/{{profile}}/seed-{{seed}}/logs/{training}.log", training=names),
        params:
            device=config["device"],
        threads: 1
        resources:
            gpu=1 if config["device"] == "cuda" else 0,
            mem_mb=cluster.memory_mb(names, PROFILE),
            runtime=cluster.minutes(names, PROFILE, int(config["time_limit"])),
        shell:
            "exec {PYTHON} -m workflow.train --profile {wildcards.profile} --seed {wildcards.seed}"
            " --device {params.device} {JOB} {output}"


rule execute:
    """One chapter through papermill. The failed notebook stays in logs/ with its traceback."""
    input:
        dependencies.HOW_IT_IS_RUN,
        trainings=lambda wildcards: expand(
            "_build/{{profile}}/seed-{{seed}}/trainings/{training}/history.csv",
            training=dependencies.trainings_of(wildcards.chapter),
        ),
    output:
        notebook="_build/{profile}/seed-{seed}/{chapter}.ipynb",
        stats="_build/{profile}/seed-{seed}/{chapter}.json",
    log:
        "_build/{profile}/seed-{seed}/logs/{chapter}.ipynb",
    params:
        device=config["device"],
    threads: 1
    resources:
        gpu=1 if config["device"] == "cuda" else 0,
        mem_mb=lambda wildcards: cluster.memory_mb([wildcards.chapter], PROFILE),
        runtime=lambda wildcards: cluster.minutes([wildcards.chapter], PROFILE, int(config["time_limit"])),
    shell:
        "exec {PYTHON} -m workflow.run_notebook {wildcards.chapter} --profile {wildcards.profile} --seed {wildcards.seed}"
        " --device {params.device} {JOB} {output.notebook} {output.stats} {log}"


rule pages:
    """The rendered book: staged sources, then Jupyter Book. The old pages are replaced in one step at the end."""
    input:
        expand(rules.notebooks.input),
        f"_build/{PROFILE}/metrics.json",  # verdicts are collected once, before
        dependencies.of_pages(),
    output:
        f"{HTML}/index.html",
    params:
        packages=hashlib.sha256(render.packages().encode()).hexdigest(),
    threads: 1
    shell:
        "exec {PYTHON} -m workflow.stage --profile {PROFILE} --seed {SEEDS[0]} --run {config[run]}"
