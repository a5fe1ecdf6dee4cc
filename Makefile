# Every target sets up what it needs: a virtual environment in .venv with the pinned, known-good versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.test-installed
QUICK := tests/test_schema.py tests/test_layers.py tests/functional tests/objectives tests/files

.PHONY: demo demo-chat test test-suites test-versions quick check docs bench clean

demo: $(STAMP)  ## Learn, play and compare: about ten minutes, tables and pictures in runs/demo
	$(BIN)/python -m torchrl_lang demo

demo-chat: $(STAMP)  ## A chat model of 135 M parameters plays, learns, and is read side by side: ten to fifteen minutes (ARGS="--task shop")
	$(BIN)/python -m torchrl_lang demo-chat $(ARGS)

test: $(TEST_STAMP)  ## Lint, types, documentation, tests and the documentation's examples
	$(MAKE) -j 2 check docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Packages that pin versions of others get environments of their own, of 1.5 GB each.
SUITES := gem openenv trl
gem_PACKAGES := gem-llm==0.1.0
openenv_PACKAGES := openenv-core==0.3.0 websockets
trl_PACKAGES := trl==1.16.0 peft

test-suites: $(SUITES:%=.venv-suites-%/.installed)  ## Tests with GEM, OpenEnv and TRL, each in an environment of its own
	set -e; for suite in $(SUITES); do \
	  OMP_NUM_THREADS=1 .venv-suites-$$suite/bin/python -m pytest -p no:cacheprovider tests/suites/test_$$suite.py; \
	done

.venv-suites-%/.installed: pyproject.toml constraints.txt
	test -x .venv-suites-$*/bin/python || $(PYTHON) -m venv .venv-suites-$*
	.venv-suites-$*/bin/python -m pip install --quiet --upgrade pip
	grep -E '^(torch|torchrl|tensordict|transformers|numpy|pytest)==' constraints.txt > .venv-suites-$*/constraints.txt
	.venv-suites-$*/bin/python -m pip install --quiet -c .venv-suites-$*/constraints.txt torch
	.venv-suites-$*/bin/python -m pip install --quiet -c .venv-suites-$*/constraints.txt -e . pytest $($*_PACKAGES)
	touch $@

# Lower bounds of pyproject.toml become pins. One environment at a time, of up to 7 GB with PyTorch for CUDA, which pip takes on
# Linux; with PIP_EXTRA_INDEX_URL set to PyTorch's index for CPUs it takes that build.
PYTHONS = $(shell for minor in 11 12 13; do python3.$$minor -c "" 2> /dev/null && echo python3.$$minor; done; true)
BUILD := .venv-versions-build
ONE := .venv-versions-one

test-versions:  ## The wheel alone, with newest and lowest versions, on each Python that is here (PYTHONS="python3.12 ...")
	rm -rf $(BUILD) $(ONE) dist
	$(PYTHON) -m venv $(BUILD)
	$(BUILD)/bin/python -m pip install --quiet build twine
	$(BUILD)/bin/python -m build --outdir dist .
	$(BUILD)/bin/python -m twine check --strict dist/*
	touch $(BUILD)/newest.txt
	sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml > $(BUILD)/lowest.txt
	sed -n '/^```python/,/^```/{/^```/!p}' README.md > $(BUILD)/readme.py
	set -e; for python in $(or $(PYTHONS),$(error name Pythons by PYTHONS=)); do for versions in newest lowest; do \
	  echo "== $$python, $$versions versions"; \
	  rm -rf $(ONE); $$python -m venv $(ONE); \
	  $(ONE)/bin/python -m pip install --quiet --no-compile --only-binary :all: -c $(BUILD)/$$versions.txt dist/*.whl; \
	  $(ONE)/bin/python -m pip freeze | grep -E '^(numpy|tensordict|torch|torchrl|transformers)=='; \
	  (cd $(BUILD); OMP_NUM_THREADS=1; export OMP_NUM_THREADS; ../$(ONE)/bin/python readme.py; \
	    ../$(ONE)/bin/python -m torchrl_lang --help > /dev/null; \
	    ../$(ONE)/bin/python -c "$$IMPORT_PACKAGES"); \
	done; done
	rm -rf $(BUILD) $(ONE)

define IMPORT_PACKAGES
from importlib import import_module
from pkgutil import walk_packages
import torchrl_lang
for module in walk_packages(torchrl_lang.__path__, "torchrl_lang."):
    if module.ispkg:
        import_module(module.name)
endef
export IMPORT_PACKAGES

quick: $(STAMP)  ## While editing, under a minute: lint, and the core's tests without those marked slow
	$(BIN)/ruff check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(QUICK)

check: $(STAMP)  ## Lint, import order and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)  ## Build the documentation into docs/_build/html; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(STAMP)  ## Measure speed and memory into benchmarks/results; the rivals need an environment of 1.3 GB (ARGS="--quick scaling")
	$(BIN)/python -m benchmarks $(ARGS)

# PyTorch comes first, at its pinned version, so that nothing pulls in another build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# Packages of others that only tests use.
$(TEST_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	touch $(TEST_STAMP)

clean:
	rm -rf $(VENV) .venv-agilerl .venv-suites-* .venv-versions-* docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
