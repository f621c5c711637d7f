# Needs python3 (3.11 or newer, with venv and pip). Everything else is installed into .venv, pinned.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test check lint venv

demo: venv
	$(BIN)/indexer demo

test: venv
	$(BIN)/pytest

check: lint
	$(BIN)/pytest -m "not slow"

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
