# make demo      four prompts become pictures: out/demo.png
# make test      everything is checked (course, imports, tests, notebooks)
# make lab       the course in JupyterLab
# make bench     speed on this machine
# make quality   how well the shipped model knows its pictures (takes long)
#
# The first of them sets up .venv; later ones only when requirements.txt or pyproject.toml changed.
# Variables: PYTHON (3.11 or newer), TORCH_INDEX (where torch comes from), WORKERS (test processes).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# The CPU build of torch, a tenth of what PyPI sends to Linux. For a GPU: make demo TORCH_INDEX=https://download.pytorch.org/whl/cu130
# Empty: whatever pip's own index has.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Several test processes share the cores: one thread each.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: help setup demo test lab site bench quality
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(STAMP)

$(STAMP): requirements.txt pyproject.toml hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
ifneq ($(strip $(TORCH_INDEX)),)
	$(PIP) install -q --retries 1 --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' requirements.txt) || \
	  { echo "no torch from $(TORCH_INDEX); to take it from pip's own index instead: make TORCH_INDEX= $(MAKECMDGOALS)"; exit 1; }
endif
	$(PIP) install -q -r requirements.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m course.demo --output out/demo.png

test: $(STAMP)
	$(BIN)/course check
	$(BIN)/lint-imports
	$(ONE_THREAD) $(BIN)/pytest -q -rs -n $(WORKERS)
	$(ONE_THREAD) $(BIN)/pytest -q --nbval-lax --nbval-cell-timeout=120 -n $(WORKERS) --dist loadfile notebooks/zh

lab: $(STAMP)
	$(BIN)/course lab

site: $(STAMP)
	@$(BIN)/course site

bench: $(STAMP)
	@KINETO_LOG_LEVEL=5 $(BIN)/python -m recipes.bench

quality: $(STAMP)
	@$(BIN)/python -m recipes.quality
	@$(BIN)/python -m recipes.model_card
