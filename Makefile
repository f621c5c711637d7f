# Needs python3 (3.11, 3.12 or 3.13, with venv and pip). Everything else is installed into .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
PYTEST := $(BIN)/pytest -n 3 --dist worksteal

# Write cached bytecode even if the environment disables it: collecting the tests takes half the time with it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-citus test-python-core crashes overload simulate soak check lint format docs screenshots coverage \
	venv native native-check fuzz mutants mutate dist release npm-packages realnet second \
	bench-live bench-cores bench-resync bench-feed bench-links bench-peers bench-citus bench-guard

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: venv ## Run the daemon against a small signed network on this machine and compare the two (a minute)
	$(BIN)/indexer demo

test: venv npm-packages ## Run all tests, on a Postgres that they start themselves
	$(PYTEST)

# Tests that depend on the core: planning, the live path, daemons, and the demo. They run with the native core hidden.
PYTHON_CORE_TESTS := tests/sync tests/service/live tests/daemon/test_stream.py tests/daemon/test_rejected.py \
	tests/daemon/test_hostile.py tests/daemon/test_lifecycle.py tests/test_crash.py tests/cli/test_demo.py

test-python-core: venv ## Run the tests of planning, daemon and demo without the native core
	PYTHONPATH=$(CURDIR)/tests/without_native_core $(PYTEST) --hypothesis-profile quick $(PYTHON_CORE_TESTS)

# Tests of what a cluster may change. Those in tests/citus always use one; these do with the option. Of the other tests
# of the daemon, test_stalls, test_status_in_browser and test_deadlocks do not run there. test_hostile does, and is left
# out: a cluster does not change what is refused before the database.
CITUS_TESTS := tests/test_crash.py tests/service/background/test_shard_ownership.py \
	$(addprefix tests/crashes/test_crash_points.py::test_,killed_at_each_point numbering_of_changes_is_killed) \
	tests/cli/test_demo.py::test_demo_writes_into_the_database_that_it_is_given \
	$(addprefix tests/daemon/test_,stream.py lifecycle.py accounts.py gaps.py rejected.py keys.py scope.py links.py \
	exports.py outages.py lenient.py refused_writes.py daemon_metrics.py typed_views.py privileges.py bystanders.py \
	event_loop.py scope_crashes.py)

test-citus: venv ## Run the tests of daemon, crashes and demo on a Citus cluster (tests/citus/setup.sh installs Citus)
	$(PYTEST) --hypothesis-profile quick --database citus $(CITUS_TESTS)

overload: venv ## Send more than the database can write, for ten minutes: make overload MINUTES=10
	$(BIN)/pytest -n 2 tests/crashes/test_overload.py --minutes $(or $(MINUTES),10)

crashes: venv ## Kill daemons at every crash point, and at random: make crashes DEATHS=5000
	$(PYTEST) tests/crashes/test_crash_points.py tests/daemon/test_scope_crashes.py --deaths $(or $(DEATHS),200)

check: lint ## Run lint, types, import contracts and the quick tests (under a minute)
	$(PYTEST) -n 2 -m "not slow" --hypothesis-profile quick

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

screenshots: venv ## Take the pictures of the status page in docs/images/ again (three minutes)
	tests/monitoring/install_chromium.sh
	$(BIN)/python -m docs.make_screenshots

coverage: venv ## Run the quick tests and report the lines that they do not reach
	$(PYTEST) -m "not slow" --hypothesis-profile quick --cov --cov-report term-missing:skip-covered

native: venv ## Build the native core and install it into the virtual environment (needs cargo; skipped without it)
	VENV=$(VENV) native/build

native-check: ## Check format and lints of the native core, and run its own tests (needs cargo; skipped without it)
	native/check

fuzz: venv ## Fuzz all targets (tests/fuzz/targets.py), two at a time, until Ctrl-C; TARGET=cars, or SECONDS=60 for all
	@if $(BIN)/pip install --quiet --disable-pip-version-check --only-binary :all: --constraint constraints.txt atheris; \
	then $(BIN)/python -m tests.fuzz --target $(or $(TARGET),all) --seconds $(or $(SECONDS),0) $(if $(CORPUS),--corpus $(CORPUS)); \
	else echo "NOT FUZZED: there is no wheel of atheris for this machine and this Python"; fi

simulate: venv ## Index random worlds with faults: make simulate SEED=17 RUNS=20, or SEEDS=1000 FIRST=5000 (default: 100 from 1)
	SIMULATION_FIRST_SEED=$(or $(SEED),$(FIRST),1) SIMULATION_SEEDS=$(or $(if $(SEED),1),$(SEEDS),100) SIMULATION_RUNS=$(or $(RUNS),1) \
		$(PYTEST) tests/simulation $(if $(SEED),-k random_worlds)

soak: venv ## Show that nothing grows in hours: make soak MINUTES=120 LINKS=1; SEEDS=1000 DEATHS=5000: simulate, crashes first
	$(if $(SEEDS),$(MAKE) simulate)
	$(if $(DEATHS),$(MAKE) crashes)
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),120) $(if $(SAMPLES),--samples $(SAMPLES)) $(if $(LINKS),--links)

mutants: venv ## Show that the tests find every bug in tests/mutants (half an hour with JOBS=2); ONLY="sync high-s-*" JOBS=2
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),1) $(if $(ALLOW_SKIPPED),--allow-skipped) $(ONLY)

mutate: venv ## Change each expression of atproto and sync with mutmut, and check the survivors; ONLY=indexer/sync/verify.py
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt mutmut
	$(BIN)/python -m tests.mutants.general_mutants --jobs $(or $(JOBS),1) $(ONLY)

second: ## Run the quick tests with another interpreter: make second PYTHON=/usr/bin/python3.11
	$(MAKE) VENV=.venv-second PYTHON=$(PYTHON) venv
	.venv-second/bin/pytest -n 2 --dist worksteal -m "not slow" --hypothesis-profile quick

npm-packages: ## Install Bluesky's own PDS, PLC directory, relay, clients and lexicons for the tests (three minutes, once)
	@if ! command -v npm > /dev/null; then echo "npm is absent: tests that need the real PDS will be skipped"; \
	else tests/realnet/setup.sh || echo "setup.sh failed: tests that need the real PDS will be skipped"; \
	tests/feed_clients/setup.sh || echo "setup.sh failed: tests that need clients from npm will be skipped"; \
	tests/lexicons/setup.sh || echo "setup.sh failed: tests that need published lexicons will be skipped"; fi

realnet: venv npm-packages ## Index a random scenario on Bluesky's PDSes and relay: make realnet STEPS=2000 SEED=7 (needs npm, Go)
	REALNET_STEPS=$(STEPS) REALNET_SEED=$(SEED) $(BIN)/pytest -q tests/realnet/test_random_scenario.py

bench-live: venv ## Measure the live path (docs/performance.md)
	$(BIN)/python -m benchmarks.live

bench-cores: venv ## Compare the native core with the Python core on the live path, in turns (docs/performance.md)
	$(BIN)/python -m benchmarks.cores

bench-resync: venv ## Measure resyncs (docs/performance.md)
	$(BIN)/python -m benchmarks.resync

bench-feed: venv ## Measure the feed to ten Jetstream clients beside the live path (docs/performance.md)
	$(BIN)/python -m benchmarks.feed

bench-links: venv ## Measure counts and the backfill of links for a post with a million likes (docs/performance.md)
	$(BIN)/python -m benchmarks.links

bench-peers: venv ## Compare with tap on this machine: live, backfill, one large repo (docs/performance.md)
	$(BIN)/python -m benchmarks.peers

bench-citus: venv ## Compare Citus (a coordinator and two workers) with one Postgres (docs/performance.md)
	$(BIN)/python -m benchmarks.citus

bench-guard: venv ## Compare the cost of each stage with the floor of the same run
	$(BIN)/python -m benchmarks.guard --check

dist: venv ## Build the wheel and the source distribution in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation # the wheel is built from the source distribution

release: ## Build the wheel, the source distribution and the image, and check all three
	deploy/release

venv: $(INSTALLED) ## Create the virtual environment with everything pinned

$(INSTALLED): pyproject.toml constraints.txt
	@echo "Installing the packages pinned in constraints.txt into $(VENV)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	$(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	touch $@
