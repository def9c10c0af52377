# Commands of the project. Each creates the environment first if it is missing; `make` alone lists them.
# PYTHON chooses the interpreter for a new environment, VENV its place, WORKERS the processes of the unit tests.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOOK := --jaxtyping-packages=attnconv,beartype.beartype

# The workers of the test suite share the cores: one thread each is faster than all of them for everybody.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test check verify docs format install unit doctests compile verify-tenth cli-reference clean page

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PYTHON: the pinned versions need Python 3.11 or \
	newer, got " + sys.version.split()[0] + ". Run: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv with the pinned versions

demo: $(STAMP)  ## convolution as attention, a small training, its report: three minutes, no network
	$(BIN)/attnconv demo

check: $(STAMP)  ## formatting, lint and types: the quick part of `make test`
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check unit doctests compile docs verify-tenth  ## everything that CI runs

unit: $(STAMP)
	$(PYTEST) tests -n $(WORKERS) $(HOOK) -m "not compile and not verify"

doctests: $(STAMP)
	$(PYTEST) --doctest-modules --doctest-glob='*.md' src/attnconv README.md $(wildcard docs/*.md)

# The hook wraps every annotated function, which breaks torch.compile(fullgraph=True): hence a session of its own.
compile: $(STAMP)
	$(PYTEST) tests -m compile

verify-tenth: $(STAMP)
	$(PYTEST) tests/verify -m verify --verify-scale=0.1

# All cores here: among the claims are times.
verify: $(STAMP)  ## re-measure what the README claims of exactness, training and resumption (hours)
	$(BIN)/python -m pytest tests/verify -m verify --verify-scale=1

page:  ## build the explorer's page into web/dist/index.html (needs Node 20 or newer)
	cd web && npm ci --no-audit --no-fund && npm run build

docs: $(STAMP)  ## build the pages into docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

cli-reference: $(STAMP)  ## write docs/cli.md again from the help of every command
	$(BIN)/python docs/generate_cli.py

format: $(STAMP)  ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what builds and caches left, but not .venv, runs or data
	rm -rf build dist docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
