# `make demo` and `make test` work on a fresh clone; everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
DEMO_STEPS ?= 1_000_000
PYTEST_ARGS ?= -n 2 --dist loadfile
# later ones work, and compile for a CPU so slowly that the tests take three times as long
JAX ?= jax<0.11.1
BENCH_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export JAX_PLATFORMS ?= cpu

.PHONY: help demo test test-all check docs bench clean

help:
	@echo "make demo      train MAPPO on MPE simple_spread for a few minutes"
	@echo "make test      run the tests"
	@echo "make test-all  run the slow tests too"
	@echo "make check     format, lint and types, as the pre-commit hooks check them"
	@echo "make docs      build the documentation into site/"
	@echo "make bench     measure beside jaxnasium, which it installs apart"

demo: $(VENV)/.installed-base
	@echo "Return per agent of uniformly random actions, for comparison:"
	@$(BIN)/python examples/random_policy.py jaxmarl/MPE_simple_spread_v3
	@echo "Training:"
	@$(BIN)/marl train mappo_mpe_spread training.total_steps=$(DEMO_STEPS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-base
	$(BIN)/python benchmarks/compare.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info

# A stamp per set of packages: a second call installs nothing, a changed pyproject.toml does.
$(VENV)/.installed-base: EXTRAS :=
$(VENV)/.installed-test: EXTRAS := [test,mabrax]
$(VENV)/.installed-dev: EXTRAS := [dev]
$(VENV)/.installed-docs: EXTRAS := [docs]

$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	@echo "installing marl$(EXTRAS) into $(VENV) (the first time downloads JAX and its friends)"
	@$(PIP) install --editable '.$(EXTRAS)' '$(JAX)'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "marl needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is not one of them:" >&2; \
		$(PYTHON) --version >&2; \
		echo "name another, as in: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV)
