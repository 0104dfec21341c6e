# `make demo` and `make test` are where to start. Each target sets up what it needs, in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint types unit test-ray test-integrations bench clean

demo: $(VENV)/.ready
	$(BIN)/python examples/quickstart.py

test: lint types unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -m "not ray and not integrations"

test-ray: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,ray]'
	RAY_USAGE_STATS_ENABLED=0 $(BIN)/python -m pytest -m ray

test-integrations: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,integrations]'
	$(BIN)/python -m pytest -m integrations tests/integration

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV)

# pip installs the package in place, so that only new dependencies make this run again.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@
