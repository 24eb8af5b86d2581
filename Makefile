# Everything anyone must remember. Each target makes .venv first where it is missing or out of date.
#
#   make demo               a fleet of sixteen on this machine, broken and mended
#   make test               all checks and all tests
#   make check              format, lint, types, import layers
#   make fuzz N=10000       properties, with so many new examples each
#   make test-real-wheels   the tests that download gigabytes of real CUDA wheels
#   make lock               resolve the dependencies anew

PYTHON ?= python3
# Tests wait more than they compute: one worker more than there are processors, and four at most.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 4 ? n + 1 : 4)))
PYTEST_ARGS ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# As root these tests get a process table of their own: a training job of a lab, or of this machine, that
# maps another environment would rightly block them.
APART := $(shell [ "$$(id -u)" = 0 ] && unshare --pid --fork --mount --mount-proc true 2>/dev/null \
	&& echo unshare --pid --fork --mount --mount-proc)

.PHONY: demo test fuzz test-real-wheels check lock
.DEFAULT_GOAL := test

demo: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh scripts/demo.sh

test: check
	$(BIN)/pytest $(PYTEST_ARGS)

N ?= 10000
fuzz: $(READY)
	$(BIN)/pytest $(PYTEST_ARGS) --timeout 0 --fuzz $(N) $(shell grep -rl hypothesis tests/unit tests/engine tests/contract --include=test_*.py)

test-real-wheels: $(READY)
	$(APART) $(BIN)/pytest -m real_wheels -s --timeout 3600

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lock: $(READY)
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --upgrade --quiet --output-file requirements.lock
	@! grep -nE '(://|--(extra-)?index|--find-links)' requirements.lock \
		|| { echo "requirements.lock names a place to download from; it must not" >&2; exit 1; }

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fleetfix needs Python 3.11 or newer; say which one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
