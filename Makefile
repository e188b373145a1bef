# Needs Python 3.11 or newer with venv, and make. Everything else is installed into .venv.
#
#   make train      a small model on 2 processes with stage 3: the package alone, no test tools
#   make test       the tests, with a random sample of the long combinations
#   make test-all   the tests, with every combination
#   make check      style, types and spelling
#   make clean      remove what the above have made
#
#   PYTHON=python3.12                                    which Python makes .venv
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu     which wheels of torch (default: pip's own)
#   RUN=folder                                           where the run is recorded (runs/<time>)
#   ARGS='...' DATA=path                                 passed on: `make train ARGS='--steps 20'`
#   SEED=1234                                            repeat a test run's random choices
#   WORKERS=0                                            one test at a time, in one process: for --pdb, or little memory

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
STAGE ?= 3
NPROC ?= 2
ARGS ?=
DATA ?=
RUN ?= runs/$(shell date +%Y%m%d-%H%M%S)
SEED ?=
# Tests are many processes that wait for one another: two at a time keep two cores busy.
WORKERS ?= 2

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Said here, not drawn by pytest: all workers must choose the same tests.
RUN_SEED := $(or $(SEED),$(shell od -An -N3 -tu4 /dev/urandom | tr -d ' '))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --seed $(RUN_SEED)

.PHONY: train test test-all check clean
.DELETE_ON_ERROR:

train: $(VENV)/.package
	$(BIN)/onecopy train --stage $(STAGE) --nproc $(NPROC) --record '$(RUN)' $(if $(DATA),--data '$(DATA)') $(ARGS)

test: $(VENV)/.test
	$(PYTEST) $(ARGS)

test-all: $(VENV)/.test
	$(PYTEST) --all $(ARGS)

check: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find onecopy tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that no other package's needs choose its wheel.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'onecopy needs Python 3.11 or newer: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') torch
	@touch $@

$(VENV)/.package: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(PIP_INSTALL) -e '.[test]'
	@touch $@ $(VENV)/.package

$(VENV)/.dev: $(VENV)/.test
	$(PIP_INSTALL) -e '.[test,dev]'
	@touch $@
