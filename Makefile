# From nothing but Python 3.11 or newer and make: every target sets up .venv by itself.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$python; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CACHES := .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Tests start hundreds of processes: without its cache each would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-all check lint format clean house sabotage mutants figures figures-age measure

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## the main job: six peers train on digits while datagrams and peers get lost
	$(BIN)/ragtag demo

test: $(STAMP) ## the fast tests
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow"

test-all: $(STAMP) ## all tests, the slow ones too
	$(BIN)/pytest

lint: $(STAMP) ## format, lint, types and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks tools
	$(BIN)/lint-imports
	$(BIN)/python tools/house.py --check > /dev/null

house: $(STAMP) ## lines by room, modules with one importer, cycles, names used twice
	$(BIN)/python tools/house.py

sabotage: $(STAMP) ## break the code in a copy, case by case: something must turn red each time
	$(BIN)/python tools/sabotage.py

mutants: $(STAMP) ## change the code by rule, and count what the tests do not notice: make mutants ROOMS="codecs optim"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mutants]'
	$(BIN)/python tools/mutants.py $(ROOMS)

figures: $(STAMP) ## write the tables of measured figures in README and docs from benchmarks/results
	$(BIN)/python tools/figures.py

figures-age: $(STAMP) ## which stored results are older than the code that they speak of
	$(BIN)/python tools/figures.py --age

measure: $(STAMP) ## run the benchmarks of all results that are older than their code, and store them: a day
	$(BIN)/python tools/measure.py

check: lint test ## lint, then the fast tests

format: $(STAMP) ## rewrite the source as the linter wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) $(CACHES) dist build
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: resolved together with the rest, a larger build might be taken.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ragtag needs Python 3.11 or newer, with its venv module (on Debian:" \
		"apt-get install python3-venv). None was found; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"ragtag needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
