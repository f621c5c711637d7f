# Needs python3 (3.11, 3.12 or 3.13, with venv and pip). Everything else is installed into .venv, pinned by constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALL := $(BIN)/uv pip install --python $(BIN)/python --constraint constraints.txt
PYTEST := $(BIN)/pytest -n 3 --dist worksteal

# Write cached bytecode even if the environment disables it: collecting the tests takes half the time with it.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test check lint quick format docs screenshots coverage native native-check proof mutants dist release venv \
	bench-live bench-cores bench-resync bench-feed bench-links bench-peers bench-citus bench-plc bench-sparse bench-guard

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: venv ## Run the daemon against a small signed network on this machine and compare the two (a minute)
	$(BIN)/indexer demo

check: venv ## Run lint, types, import contracts and the quick tests (a minute)
	@$(MAKE) --no-print-directory --jobs 2 lint quick

test: venv ## Run the tests that each change must pass, on a Postgres that they start themselves (five minutes)
	$(PYTEST)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/codespell
	$(BIN)/lint-imports
	$(BIN)/mypy

quick: venv
	$(PYTEST) -n 2 -m "not slow" --hypothesis-profile quick

format: venv ## Format the code and apply the safe fixes of the linter
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: venv ## Generate the generated parts of docs/ and config/
	$(INSTALL) --editable '.[docs]'
	$(BIN)/python -m docs.generate

screenshots: venv ## Take the pictures of the status page in docs/images/ again (three minutes)
	tests/serve/install_chromium.sh
	$(BIN)/python -m docs.make_screenshots

coverage: venv ## Run the quick tests and report the lines that they do not reach
	$(PYTEST) -m "not slow" --hypothesis-profile quick --cov --cov-report term-missing:skip-covered

native: venv ## Build the native core and install it into the virtual environment (needs cargo; skipped without it)
	VENV=$(VENV) native/build

native-check: ## Check format and lints of the native core, and run its own tests (needs cargo; skipped without it)
	native/check

# The parts of `make proof` (docs/testing.md). Those without a recipe below are tests with the mark `proof`.
PARTS := daemon native crashes simulation overload realnet clients browser deploy cluster fuzz mutants mutmut soak second image speed

proof: venv ## Run everything that `make test` leaves out, for hours, or one part: make proof PART=crashes DEATHS=5000
	@$(MAKE) --no-print-directory --keep-going $(addprefix proof-,$(or $(PART),$(PARTS)))

# Tests that depend on the core: formats, planning, the live path, daemons, deaths, worlds and the demo.
NATIVE_TESTS := tests/atproto tests/sync tests/core tests/db/test_native_rows.py tests/live tests/daemon \
	tests/crashes tests/simulation tests/cli/test_demo.py
# Tests whose result may differ on a cluster.
CLUSTER_TESTS := tests/crashes/test_crash_points.py tests/daemon tests/tasks/test_shard_ownership.py

proof-%: venv
	$(PYTEST) --proof=$*

proof-native: native-check native # what depends on the core again, with the native core
	$(PYTEST) $(NATIVE_TESTS)

proof-crashes: venv
	$(PYTEST) --proof=crashes --deaths $(or $(DEATHS),600)

proof-simulation: venv
	SIMULATION_FIRST_SEED=$(or $(SEED),$(FIRST),1) SIMULATION_SEEDS=$(or $(if $(SEED),1),$(SEEDS),100) \
		SIMULATION_RUNS=$(or $(RUNS),1) $(PYTEST) --proof=simulation $(if $(SEED),-k random_worlds)

proof-overload: venv
	$(PYTEST) -n 2 --proof=overload --minutes $(or $(MINUTES),10)

proof-realnet: venv
	tests/realnet/setup.sh
	REALNET_STEPS=$(STEPS) REALNET_SEED=$(SEED) $(PYTEST) --proof=realnet

proof-clients: venv
	tests/feed_clients/setup.sh
	tests/lexicons/setup.sh
	$(PYTEST) --proof=clients

proof-browser: venv
	$(INSTALL) --editable '.[docs]'
	tests/serve/install_prometheus.sh
	tests/serve/install_chromium.sh
	$(PYTEST) --proof=browser

proof-deploy: venv
	tests/deploy/setup.sh
	$(PYTEST) --proof=deploy

proof-cluster: venv # tests/citus, and again what a cluster may change
	$(PYTEST) --proof=cluster
	$(PYTEST) --database citus $(CLUSTER_TESTS)
	$(PYTEST) --database citus --proof=daemon $(CLUSTER_TESTS)

proof-fuzz: venv # new examples, then all targets, two at a time, for SECONDS (0: until Ctrl-C); TARGET=cars: one
	$(if $(TARGET),,$(PYTEST) -m hypothesis --hypothesis-profile random)
	$(INSTALL) --only-binary :all: atheris
	$(BIN)/python -m tests.fuzz --target $(or $(TARGET),all) --seconds $(or $(SECONDS),600) $(if $(CORPUS),--corpus $(CORPUS))

proof-mutants: mutants

mutants: venv ## Show that the tests find each bug in tests/mutants/seeded.toml (ONLY="high-s-*": those)
	$(BIN)/python -m tests.mutants --jobs $(or $(JOBS),2) $(ONLY)

proof-mutmut: venv # the tests find each changed expression of atproto and sync; ONLY=indexer/sync/verify.py
	$(INSTALL) mutmut
	$(BIN)/python -m tests.mutants.general_mutants --jobs $(or $(JOBS),2) $(ONLY)

proof-soak: venv
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),120) $(if $(SAMPLES),--samples $(SAMPLES)) $(if $(LINKS),--links)

proof-second: # the quick tests with another interpreter
	$(MAKE) VENV=.venv-second PYTHON=$(or $(SECOND),python3) venv
	.venv-second/bin/pytest -n 2 -m "not slow" --hypothesis-profile quick

proof-image:
	deploy/check --install

proof-speed: bench-guard

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

bench-plc: venv ## Measure the verification of logs of did:plc operations (docs/performance.md)
	$(BIN)/python -m benchmarks.plc

bench-sparse: venv ## Compare sparse resyncs with exports, and hints with the firehose (docs/performance.md)
	$(BIN)/python -m benchmarks.sparse

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
	$(INSTALL) --editable '.[dev]'
	touch $@
