# Commands of the project; `make` without a target lists them. They first create the environment if it is missing.
# PYTHON is the interpreter for a new environment, VENV its folder, and WORKERS the number of test processes.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
HOOK := --jaxtyping-packages=attnconv,beartype.beartype

# Test workers share the cores, so one thread per worker is faster than as many threads as cores in every worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test check web page verify docs format install together unit doctests compile verify-tenth cli-reference clean site web-tests \
	oldest newest dist dist-test check-tag release-notes publish-site check-workflows

help:  ## list the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("PYTHON: the pinned versions need Python 3.11 or \
	newer, got " + sys.version.split()[0] + ". Run: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv with the pinned dependency versions

demo: $(STAMP)  ## convert a convolution, train a small model, write its report: under three minutes on two idle cores, no internet
	$(BIN)/attnconv demo

check: $(STAMP)  ## check formatting, lint rules and types: the quick part of `make test`
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: together unit compile verify-tenth  ## run everything that CI runs

# These targets use one process each; the other test targets use WORKERS processes.
together: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=$(WORKERS) --output-sync=target check web docs doctests

UNIT = tests -n $(WORKERS) --dist loadfile $(HOOK) -m "not compile and not verify"

# All tests of a file run in the same worker, so its shared fixtures are created once.
unit: $(STAMP)
	$(PYTEST) $(UNIT)

doctests: $(STAMP)
	$(PYTEST) --doctest-modules --doctest-glob='*.md' src/attnconv benchmarks README.md $(wildcard docs/*.md)

# The hook wraps every annotated function, which breaks torch.compile(fullgraph=True), so these tests run without it.
compile: $(STAMP)
	$(PYTEST) tests/compile -m compile -n $(WORKERS)

# npm installs the packages in the lock file, and writes this file to the folder when it is done.
PACKAGES := web/node_modules/.package-lock.json

$(PACKAGES): web/package.json web/package-lock.json
	cd web && npm ci --silent
	@touch $@

# NODE_MISSING is what was found instead of NODE_WANTED, and empty if nothing is missing. Vite requires this version.
NODE_WANTED := Node 20.19 or newer with npm
NODE_MISSING = $(shell command -v npm >/dev/null || { echo "none"; exit; }; \
	node -p 'const [a, b] = process.versions.node.split(".").map(Number); a > 20 || (a == 20 && b >= 19) ? "" : process.version')

page:  ## build the explorer page, web/dist/index.html (needs Node 20.19 or newer)
	@test -z "$(NODE_MISSING)" || { echo "node: the page needs $(NODE_WANTED), got $(NODE_MISSING). Install it."; exit 1; }
	@$(MAKE) --no-print-directory $(PACKAGES)
	cd web && npm run --silent build

web: $(STAMP)  ## run type checks, unit tests and browser tests of the page; skipped with a message without Node or Chromium
	@if test -z "$(NODE_MISSING)"; then $(MAKE) --no-print-directory page && $(MAKE) --no-print-directory web-tests; \
	else echo "web: skipped, the page needs $(NODE_WANTED), got $(NODE_MISSING)"; fi

web-tests:
	cd web && npm run --silent check && npm run --silent test && ATTNCONV_PYTHON="$(abspath $(BIN)/python)" npm run --silent e2e

verify-tenth: $(STAMP)
	$(PYTEST) tests/verify -m verify --verify-scale=0.1 -n $(WORKERS) --dist loadfile

# Uses all cores, because some of the claims are about run times.
verify: $(STAMP)  ## repeat the measurements behind the claims on exactness, training and resuming (takes hours)
	$(BIN)/python -m pytest tests/verify -m verify --verify-scale=1

docs: $(STAMP)  ## build the documentation in docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build/html

site: page  ## build the documentation with the live page: docs/_build/html can be served by any static host
	@$(MAKE) --no-print-directory docs

# One folder per version in SITE, and a page that opens the newest released one.
publish-site: site
	$(BIN)/python docs/publish_site.py docs/_build/html $(SITE) $(VERSION)

# These two need no pinned versions. Old releases warn about newer versions of their own dependencies, hence `-W default`.
oldest:  ## run the unit tests with the oldest supported versions; set PYTHON to Python 3.10
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[app,hub,test]'
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -W default $(UNIT)

newest:  ## run the unit tests with the newest versions of all dependencies; PIP_OPTIONS=--pre includes pre-releases
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(PIP_OPTIONS) -e '.[app,hub,test]'
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -W default $(UNIT)

cli-reference: $(STAMP)  ## regenerate docs/cli.md from the help of all commands
	$(BIN)/python docs/generate_cli.py

format: $(STAMP)  ## format the code and apply safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

RELEASE := $(VENV)/.release

$(RELEASE): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

# The files in the archives get the time of the last commit, so equal commits give equal archives.
dist: $(RELEASE)  ## build the wheel and the source distribution in dist/, and check them
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) PIP_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

dist-test: dist try-archives  ## build the archives and try them

# CONSTRAINTS can be empty, to let pip choose all versions as for a user.
CONSTRAINTS := -c constraints.txt
try-archives:  ## install the archives in dist/ in fresh environments, and run the demo there
	for archive in dist/*.whl dist/*.tar.gz; do \
		rm -rf build/try && $(PYTHON) -m venv build/try && \
		build/try/bin/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) "$$archive[app]" && \
		(cd build/try && bin/attnconv --version && bin/attnconv demo && bin/attnconv explore --export page) || exit 1; \
	done

check-tag: $(STAMP)
	@test "$(TAG)" = "v$$($(BIN)/python -c 'import attnconv; print(attnconv.__version__)')" || \
		{ echo "TAG: must be v followed by the version in src/attnconv/__init__.py, got '$(TAG)'"; exit 1; }
	@! grep -q 'Before the first release' README.md docs/index.md || \
		{ echo "README.md, docs/index.md: remove the paragraphs that begin with 'Before the first release'"; exit 1; }
	@! grep -q -- '- unreleased' CHANGELOG.md || { echo "CHANGELOG.md: the version must have a date, got 'unreleased'"; exit 1; }

# The newest section of the changelog.
release-notes:
	@awk '/^## \[/ {sections++} sections == 1' CHANGELOG.md

check-workflows: $(RELEASE)  ## check the workflows against their schema and for security problems
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/zizmor --offline --quiet .github

clean:  ## remove build outputs and caches, but not .venv, runs or data
	rm -rf build dist web/dist docs/_build docs/notebooks .mypy_cache .pytest_cache .ruff_cache .hypothesis
