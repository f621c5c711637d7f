# Needs python3 (3.11 or newer, with venv and pip). Everything else is installed into .venv, pinned.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test check lint venv realnet bench-live bench-resync

demo: venv
	$(BIN)/indexer demo

test: venv realnet
	$(PYTEST)

# Bluesky's own PDS and PLC directory, for the tests that read them live; about a minute, once.
realnet:
	@if ! command -v npm > /dev/null; then echo "npm is absent: the tests of the live network will skip"; \
	else tests/realnet/setup.sh || echo "setup.sh failed: the tests of the live network will skip"; fi

check: lint
	$(PYTEST) -m "not slow" --hypothesis-profile quick

# docs/performance.md says what they measure; each has options, see `python -m benchmarks.live --help`.
bench-live bench-resync: bench-%: venv
	$(BIN)/python -m benchmarks.$*

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
