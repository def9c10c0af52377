# Commands of the project. Each creates the environment first if it is missing; `make` alone lists them.
# PYTHON chooses the interpreter for a new environment, VENV its place, WORKERS the processes of the tests.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOOK := --jaxtyping-packages=attnconv,beartype.beartype

# The workers of the test suite share the cores: one thread each is faster than all of them for everybody.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test check web page verify docs format install together unit doctests compile verify-tenth cli-reference clean web-tests

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

test: together unit compile verify-tenth  ## everything that CI runs

# Each of these is one process; the others start as many as there are workers.
together: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=$(WORKERS) --output-sync=target check web docs doctests

# A file stays with one worker: what its tests share is made once.
unit: $(STAMP)
	$(PYTEST) tests -n $(WORKERS) --dist loadfile $(HOOK) -m "not compile and not verify"

doctests: $(STAMP)
	$(PYTEST) --doctest-modules --doctest-glob='*.md' src/attnconv benchmarks README.md $(wildcard docs/*.md)

# The hook wraps every annotated function, which breaks torch.compile(fullgraph=True): hence a session of its own.
compile: $(STAMP)
	$(PYTEST) tests/compile -m compile -n $(WORKERS)

# The page's packages are those of its lock file; npm leaves this file in the folder that it fills.
PACKAGES := web/node_modules/.package-lock.json

$(PACKAGES): web/package.json web/package-lock.json
	cd web && npm ci --silent
	@touch $@

# Says what is missing, or nothing. Vite asks for this version.
NODE_WANTED := Node 20.19 or newer with npm
NODE_MISSING = $(shell command -v npm >/dev/null || { echo "none"; exit; }; \
	node -p 'const [a, b] = process.versions.node.split(".").map(Number); a > 20 || (a == 20 && b >= 19) ? "" : process.version')

page:  ## build the page of the explorer: web/dist/index.html (Node 20.19 or newer)
	@test -z "$(NODE_MISSING)" || { echo "node: the page needs $(NODE_WANTED), got $(NODE_MISSING). Install it."; exit 1; }
	@$(MAKE) --no-print-directory $(PACKAGES)
	cd web && npm run --silent build

web:  ## types, numbers and browser tests of the page; skipped in words where Node or Chromium is missing
	@if test -z "$(NODE_MISSING)"; then $(MAKE) --no-print-directory page && $(MAKE) --no-print-directory web-tests; \
	else echo "web: skipped, the page needs $(NODE_WANTED), got $(NODE_MISSING)"; fi

web-tests:
	cd web && npm run --silent check && npm run --silent test && ATTNCONV_PYTHON="$(abspath $(BIN)/python)" npm run --silent e2e

verify-tenth: $(STAMP)
	$(PYTEST) tests/verify -m verify --verify-scale=0.1 -n $(WORKERS) --dist loadfile

# All cores here: among the claims are times.
verify: $(STAMP)  ## re-measure what the README claims of exactness, training and resumption (hours)
	$(BIN)/python -m pytest tests/verify -m verify --verify-scale=1

docs: $(STAMP)  ## build the pages into docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

cli-reference: $(STAMP)  ## write docs/cli.md again from the help of every command
	$(BIN)/python docs/generate_cli.py

format: $(STAMP)  ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what builds and caches left, but not .venv, runs or data
	rm -rf build dist web/dist docs/_build docs/notebooks .mypy_cache .pytest_cache .ruff_cache .hypothesis
