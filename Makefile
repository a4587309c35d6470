# make demo    set up, start a server with the embedded model, ask it a few questions, stop
# make serve   set up, start a server and leave it running (Ctrl-C stops it)
# make setup   create .venv and install Pagoda into it
# make test    set up with the test tools, then linters, types, import contracts and all tests
# make clean   remove .venv and everything that the tools leave behind
#
# PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0

.PHONY: setup demo serve test clean

setup: $(VENV)/.installed

demo: setup
	@$(BIN)/pagoda demo

serve: setup
	@exec $(BIN)/pagoda serve

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing later in the resolution can choose another version.
$(VENV)/.installed: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Pagoda needs Python 3.11 or newer as '$(PYTHON)'; name another with make PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "installing pagoda"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools"
	@$(PIP) install --editable '.[test]'
	@touch $@
