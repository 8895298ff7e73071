# Every target but gpu-check installs what it needs into VENV first.
# Is Python called something else? make PYTHON=...
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEEDS ?= 20000
TP ?= 2

# Every program that a test starts would compile our modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test test-slow test-programs test-nodes test-clients check simulate soak screenshots bench bench-throughput \
    gpu-check clean

run: $(VENV)/.ready
	$(BIN)/python launch.py generate --tp $(TP) "What is 47 + 38?" "What is 82 - 35?" \
	    "What day comes after Tuesday?" "Count on from 17."

PYTEST := $(BIN)/python -m pytest
# Collecting the other files takes seconds.
ENGINE_TESTS = $(shell grep -rl --include='test_*.py' mark.engine tests/cluster)
FIRST_ENGINE_TESTS := tests/cluster/test_default_model.py tests/cluster/test_llm.py
SLOW_TESTS := $(filter-out %/test_gpu_check.py,$(wildcard tests/benchmarks/test_*.py)) \
    $(addprefix tests/kernels/,test_avx2.py test_gpu_compile.py test_cache.py test_scratch_memory.py)

# Tests that start engines run one after another, the others in three processes, since some wait: a
# process takes neighbors, which share what they prepare; one that is done takes over from others.
test: $(VENV)/.ready
	$(PYTEST) -n 3 --dist worksteal -m "not engine" $(SLOW_TESTS:%=--ignore=%)
	$(PYTEST) -m "engine and not programs and not nodes" $(FIRST_ENGINE_TESTS)

# The programs of benchmarks/, what compiles many kernels, and the other tests of engines.
test-slow: $(VENV)/.ready
	$(PYTEST) -n 3 --dist worksteal -m "not engine" $(SLOW_TESTS)
	$(PYTEST) -m "engine and not programs and not nodes" \
	    $(filter-out $(FIRST_ENGINE_TESTS),$(ENGINE_TESTS))

# The command line, the server, engines whose processes are killed: whole programs, which take long.
test-programs: $(VENV)/.ready
	$(PYTEST) -m programs $(ENGINE_TESTS)

# Clusters of several nodes that are lost, cut off, brought up by ssh; most need root.
test-nodes: $(VENV)/.ready
	$(PYTEST) -m nodes tests/cluster/nodes

# Real client programs from PyPI and npm against the server; installs gigabytes below the user's cache.
test-clients: $(VENV)/.ready
	$(BIN)/python -m tests.clients

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

simulate: $(VENV)/.ready
	$(BIN)/python -m tests.scheduler.simulate --seeds $(SEEDS)

# What takes minutes: wrong requests, many streams, clients that leave, processes that die.
soak: $(VENV)/.ready
	$(BIN)/python -m tests.cluster.api.fuzz --requests 50000
	$(BIN)/python -m tests.cluster.api.capacity
	$(BIN)/python -m tests.cluster.serve.disconnects
	$(BIN)/python -m tests.cluster.serve.soak
	$(BIN)/python -m tests.cluster.grammar.many
	$(BIN)/python -m tests.cluster.recovery.soak
	$(BIN)/python -m tests.cluster.recovery.soak --faults 30 --steps-ahead 0 --seed 1
	$(BIN)/python -m tests.cluster.recovery.soak --faults 30 --steps-ahead 2 --seed 2
	$(BIN)/python -m tests.cluster.recovery.soak --faults 25 --tp 1 --seed 3
	$(BIN)/python -m tests.cluster.recovery.soak --faults 25 --experts --seed 4
	$(BIN)/python -m tests.cluster.recovery.soak --faults 12 --kinds rank,driver --lose-calls 3
	$(BIN)/python -m tests.cluster.recovery.false_alarm

# The pictures of the page and of the dashboard in docs/.
screenshots: $(VENV)/.ready
	EAGLERAY_SCREENSHOTS=$(CURDIR)/docs $(BIN)/python -m pytest tests/cluster/serve -k "page or dashboard"

bench: $(VENV)/.ready
	for name in load_memory scheduler_scaling idle dispatch prefix_cache latency; do \
	    $(BIN)/python -m benchmarks.$$name || exit 1; \
	done

# make bench-throughput MODEL=DIR WORKLOAD=FILE.jsonl PEER='CMD {model} {workload} {tp}'
# Without PEER it compares with transformers only.
bench-throughput: $(VENV)/.ready
	$(BIN)/python -m benchmarks.throughput --model "$(MODEL)" --workload "$(WORKLOAD)" \
	    $(if $(PEER),--peer-command "$(PEER)")

# On a machine with a GPU, with the packages that $(PYTHON) has: nothing is installed.
# OUT=DIR puts the JSON elsewhere. KERNELS=DIR begins with the compiled kernels of an earlier run, if
# any are there, and leaves all of them beside the JSON. SECTIONS=sanitizer runs CUDA's checkers.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(if $(OUT),--out "$(OUT)/gpu_check.json") \
	    $(if $(KERNELS),--triton-cache "$(KERNELS)") $(if $(SECTIONS),--sections $(SECTIONS))

# Modules are compiled when they are first imported: compiling all takes a minute.
# After installing, the CPU's kernels are compiled in two processes, so that no first start waits.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -m workers.compilation first-step & \
	    $(BIN)/python -m workers.compilation other-steps; wait
	touch $@

clean:
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	rm -rf $(VENV) build *.egg-info
