# `make demo` and `make test` set up everything they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export PIP_CONSTRAINT :=

.PHONY: help demo test quick lint format docs bench clean
help:
	@echo "make demo    train a small GPT through Orchard and through torch, side by side"
	@echo "make test    lint, type-check and run every test"
	@echo "make quick   the tests that take seconds"
	@echo "make lint    ruff and mypy"
	@echo "make format  let ruff rewrite the sources"
	@echo "make docs    write the generated parts of README and docs again"
	@echo "make bench   the quick benchmark preset"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) torch && $(PIP) --editable '.[cli,plot]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/orchard demo

test: lint
	$(BIN)/python -m pytest -n 2

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not compile and not stress"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

bench: $(VENV)/.runtime
	$(BIN)/orchard bench quick

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
