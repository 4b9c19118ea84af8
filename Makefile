# Everything that people and CI run. On a fresh machine `make demo` and `make test` set up what they need first.

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
NATIVE := $(shell find CMakeLists.txt native -type f 2>/dev/null)

.PHONY: demo test test-inprocess test-multiprocess test-multinode test-multinode-quick test-native test-matrix \
	test-conformance test-transports conformance megatron-matrix check format bench

demo: $(VENV)/built
	PYTHON=$(BIN)/python scripts/demo

test: test-inprocess test-native test-multiprocess test-multinode-quick

# Many small cases in one process: spread over the cores.
test-inprocess: $(VENV)/built
	$(PYTEST) -q -n 2 --dist worksteal --ignore=tests/multiprocess --ignore=tests/multinode

# Each test starts its own ranks, which wait for each other more than they compute: two tests at a time. With RERUNS a
# failing one is tried again, and told: on a shared machine a rank may be kept waiting longer than any test's patience.
RERUNS ?= 0
test-multiprocess: $(VENV)/built
	$(PYTEST) -q -n 2 --dist worksteal --reruns $(RERUNS) tests/multiprocess

# Ranks on several nodes of this machine, with links that are shaken and cut: a covering selection, and everything.
test-multinode-quick: $(VENV)/built
	$(PYTEST) -q -n 0 --reruns $(RERUNS) tests/multinode

test-multinode: $(VENV)/built
	$(PYTEST) -q -n 0 -m "slow or not slow" tests/multinode

test-native: $(VENV)/built
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/test_native

# The full product of cases: collective, operation, type, association, schedule, world size, message size.
test-matrix: $(VENV)/built
	$(PYTEST) -q -n auto -m matrix tests

test-conformance: $(VENV)/built
	$(PYTEST) -q -n 2 --dist worksteal tests/conformance

# Once more with the portable folds, and over each transport: what the default run does over shared memory. Hybrid takes
# two ranks for a host. MPI's ranks cannot be forked by a test; mpirun starts them. 25 minutes on two busy cores.
FOUNDATION := $(addprefix tests/multiprocess/test_,torch_reductions.py torch_async.py torch_errors.py torch_movement.py)
test-transports: $(VENV)/built
	DETCOMM_NATIVE=0 $(PYTEST) -q -n 2 --dist worksteal tests/conformance tests/property tests/unit
	DETCOMM_NATIVE=0 $(PYTEST) -q -n 0 $(FOUNDATION)
	for transport in shared_memory gloo; do \
	  DETCOMM_TEST_TRANSPORT=$$transport $(PYTEST) -q -n 0 $(FOUNDATION) || exit 1; \
	done
	DETCOMM_TEST_TRANSPORT=hybrid DETCOMM_TEST_RANKS_PER_HOST=2 $(PYTEST) -q -n 0 $(FOUNDATION)
	$(PYTEST) -q -n 0 tests/multiprocess/test_mpi_transport.py tests/multiprocess/test_launchers.py
	for transport in mpi hybrid_mpi; do \
	  DETCOMM_TRANSPORT=$$transport $(BIN)/mpirun -n 4 $(BIN)/python -m detcomm verify --quick || exit 1; \
	done

# Torch's own suite of distributed tests, gloo beside detcomm, in a quarter of an hour. Writes docs/conformance.md.
conformance: $(VENV)/built
	$(BIN)/python -m tests.torch_suite.run --page docs/conformance.md

# Megatron Core in every layout and precision, gloo beside detcomm. Writes docs/megatron-matrix.md; takes an hour.
megatron-matrix: $(VENV)/built
	$(BIN)/python scripts/megatron-matrix

check: $(VENV)/built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -q -n 0 tests/architecture

format: $(VENV)/built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/built
	$(BIN)/python scripts/bench_cpu

$(VENV)/installed: pyproject.toml constraints-dev.txt scripts/setup
	scripts/setup $(VENV)
	touch $@

# Installed in place: Python edits show at once, native ones are built anew.
$(VENV)/built: $(VENV)/installed $(NATIVE)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation --no-deps -e .
	touch $@
