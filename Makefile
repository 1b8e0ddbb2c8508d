# Everything lives in .venv. Needs Python 3.11 or later, pip and make; nothing else.
#
#   make train                     train the quickstart model into runs/quickstart, or go on with it
#   make train RUN=DIR ARGS=...    another run folder; more arguments for `equigrad train`
#   make test ARGS=...             the whole test suite, JOBS=2 tests at a time; more arguments for pytest
#   make lint types docs bench     what their names say
#   make clean                     remove what building and testing leave behind; .venv and runs stay

PYTHON ?= python3
RUN ?= runs/quickstart
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help train test lint types docs bench clean

help:
	@sed -n '1,/^$$/s/^#/ /p' Makefile

train: $(VENV)/.installed
	@if [ -e '$(RUN)/job.toml' ]; then \
	  echo '$(RUN) holds a run already: going on with it. `make train RUN=runs/another` starts a new one.'; \
	fi
	@$(BIN)/equigrad train --run '$(RUN)' --resume $(ARGS)

# pytest's own exit status goes into the file STATUS, if that is given; make itself knows only 0 and 2.
test: $(VENV)/.installed-test
	@$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadgroup $(ARGS) $(if $(STATUS),; echo $$? > '$(STATUS)')

lint: $(VENV)/.installed-lint
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: $(VENV)/.installed-lint
	@$(BIN)/mypy

docs: $(VENV)/.installed-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed-bench
	@for program in $(filter-out benchmarks/common.py benchmarks/optimizers.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$program $(ARGS) || exit; done

clean:
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Stamps: installed once, and again when pyproject.toml changes. `.installed-test` is the extra `test`, and so on.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'installing equigrad into $(VENV) ...'
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	@echo 'installing equigrad[$*] into $(VENV) ...'
	@$(PIP) --editable '.[$*]'
	@touch $@ $(VENV)/.installed

# Some systems ship Python without ensurepip; their own pip can then install one into the environment.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'equigrad needs Python 3.11 or later; name one with: make PYTHON=python3.11 ...' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) 2> /dev/null || { rm -rf $(VENV); \
	  $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
