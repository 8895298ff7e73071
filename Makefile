# Every target installs what it needs into VENV first. On a machine whose Python is called otherwise: make PYTHON=...
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEEDS ?= 20000
TP ?= 2

.PHONY: run test check simulate bench clean

run: $(VENV)/.ready
	$(BIN)/python launch.py generate --tp $(TP) "What is 47 + 38?" "What is 82 - 35?" \
	    "What day comes after Tuesday?" "Count on from 17."

test: $(VENV)/.ready
	$(BIN)/python -m pytest

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

simulate: $(VENV)/.ready
	$(BIN)/python -m tests.scheduler.simulate --seeds $(SEEDS)

bench: $(VENV)/.ready
	$(BIN)/python -m benchmarks.load_memory

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
