# Needs python3 (3.11 or newer, with venv and pip). Everything else is installed into .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PYTEST := $(BIN)/pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help demo test check lint format docs coverage venv realnet second bench-live bench-resync bench-guard

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: venv ## Run the daemon against a small signed network on this machine and compare the two (a minute)
	$(BIN)/indexer demo

test: venv realnet ## Run all tests, on a Postgres that they start themselves
	$(PYTEST)

check: lint ## Run lint, types, import contracts and the quick tests (under a minute)
	$(PYTEST) -m "not slow" --hypothesis-profile quick

lint: venv ## Check format, lint rules, spelling, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## Generate the generated parts of docs/ and config/
	$(BIN)/python -m docs.generate

coverage: venv ## Run the quick tests and report the lines that they do not reach
	$(PYTEST) -m "not slow" --hypothesis-profile quick --cov --cov-report term-missing:skip-covered

second: ## Run the quick tests with another interpreter: make second PYTHON=/usr/bin/python3.11
	$(MAKE) VENV=.venv-second PYTHON=$(PYTHON) venv
	.venv-second/bin/pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile quick

realnet: ## Install Bluesky's own PDS and PLC directory for the tests that use them (two minutes, once)
	@if ! command -v npm > /dev/null; then echo "npm is absent: tests that need the real PDS will be skipped"; \
	else tests/realnet/setup.sh || echo "setup.sh failed: tests that need the real PDS will be skipped"; fi

bench-live: venv ## Measure the live path (docs/performance.md)
	$(BIN)/python -m benchmarks.live

bench-resync: venv ## Measure resyncs (docs/performance.md)
	$(BIN)/python -m benchmarks.resync

bench-guard: venv ## Compare the cost of each stage with the floor of the same run
	$(BIN)/python -m benchmarks.guard --check

venv: $(INSTALLED) ## Create the virtual environment with everything pinned

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@
