# `make demo` and `make test` set up everything they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
export PIP_CONSTRAINT :=
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name '*.map' -o -name CMakeLists.txt)
FORMATTED := $(filter %.cpp %.h,$(NATIVE))
SANITIZE ?=
COMMA := ,
NATIVE_BUILD := build/native$(addprefix -,$(firstword $(subst $(COMMA), ,$(SANITIZE))))

.PHONY: help demo test test-in-python quick native-test lint format docs bench clean
help:
	@echo "make demo        train a small GPT through Orchard and through torch, side by side"
	@echo "make test        lint, type-check and run every test"
	@echo "make test-in-python   the tests of BatchQueue once more, without its compiled part"
	@echo "make quick       the tests that take seconds"
	@echo "make native-test the library's own tests; SANITIZE=thread or SANITIZE=address,undefined"
	@echo "make lint        ruff, mypy and clang-format"
	@echo "make format      let ruff and clang-format rewrite the sources"
	@echo "make docs        write the generated parts of README and docs again"
	@echo "make bench       the quick benchmark preset"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt $(filter-out native/tests/%,$(NATIVE)) | $(BIN)/python
	$(PIP) torch && $(PIP) --editable '.[cli,plot]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.runtime
	$(BIN)/orchard demo

test: lint
	$(BIN)/python -m pytest -n 2
	$(MAKE) test-in-python

test-in-python: $(VENV)/.dev
	PYTHONPATH='$(CURDIR)/tests/in_python' $(BIN)/python -m pytest -n 2 $(wildcard tests/serving/test_[beow]*.py)

quick: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not slow and not compile and not stress"

native-test:
	cmake -S native -B $(NATIVE_BUILD) -DORCHARD_BUILD_TESTS=ON -DORCHARD_SANITIZE='$(subst $(COMMA),;,$(SANITIZE))'
	cmake --build $(NATIVE_BUILD) --parallel $(shell getconf _NPROCESSORS_ONLN)
	cd $(NATIVE_BUILD) && ctest --output-on-failure

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(FORMATTED)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

bench: $(VENV)/.runtime
	$(BIN)/orchard bench quick

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
