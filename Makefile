# Two commands: `make demo` shows the main job on a small model, `make test` checks everything.
# Both create .venv where it is missing; a second run installs nothing.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= modelopt,nncf,dev
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Tests of what differs between versions of Python: imports, child processes, simulated GPU, keys of code, a run in simulation.
QUICK_TESTS := tests/test_imports.py tests/harness/accuracy/test_ptq.py tests/harness/runtimes/test_gpu.py tests/harness/workers tests/harness/replay/test_search_key.py

.PHONY: demo test quick check lint bench clean

demo: $(INSTALLED)
	$(BIN)/qdq run experiments/demo.yaml --out out/demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# For a second version of Python: make quick PYTHON=python3.13 VENV=.venv-3.13 EXTRAS=cpu,nncf,dev
quick: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(QUICK_TESTS)

# Lint, types, and the quick tests of the modules that differ from the last commit: for use while editing.
check: lint
	$(BIN)/python -m pytest -q -m "not slow" tests/test_architecture.py $$($(BIN)/python -P tests/affected.py)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/python -m pytest tests/benchmarks --benchmark-enable --benchmark-only -q -m "not study"

clean:
	rm -rf .venv .venv-* build *.egg-info out

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed; say which: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
