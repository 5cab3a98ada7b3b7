# make quickstart | test | test-all | test-engines | test-environments | test-long | test-chance | lint | docs | benchmarks | clean
#
# Everything runs in .venv, which is made once and brought up to date when pyproject.toml or the constraints change.
# Variables:
#   PYTHON=python3.12                  the Python that .venv is made with (3.11 or newer); make test-long tries the
#                                      wheel with it, too
#   SEED=1                             seed of the quickstart
#   TEST_PROCESSES=0                   tests one after the other, in this process (default: three at a time, by file)
#   VENV_ENGINES=.venv-engines         where vLLM and SGLang for CPUs are installed (test-engines makes it)
#   VENV_ENVIRONMENTS=.venv-environments   where packages of environments are installed (test-environments makes it)
#   CONSTRAINTS=                       no version pins; the default pins what was tested on CPUs
#   VENV_ARGS=--system-site-packages   use the torch that the machine brings (GPU images)
#   PIP_ARGS="--no-deps --no-build-isolation"   a machine without a package index that has everything already
#   CHECKS_LOG=FILE.jsonl              what each test took goes there (benchmarks/checks.py sets it)
# A GPU image: make test CONSTRAINTS= VENV_ARGS=--system-site-packages

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
VENV_ENGINES ?= .venv-engines
VENV_ENVIRONMENTS ?= .venv-environments
VENV_ARGS ?=
CONSTRAINTS ?= constraints/cpu.txt
PIP_ARGS ?=
SEED ?= 0
PYTEST_ARGS ?=
# One more than the processors that they are made for: many tests wait, for a process or for what a limit ends.
TEST_PROCESSES ?= 3

# Warnings of pip and setuptools that say nothing to anybody here.
PIP_NOISE := /^WARNING: Location .* is ignored/d; /BuildBackendWarning/,/wheel_obj:/d

BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# For tests/test_wheel.py.
export RONDO_PYTHON := $(PYTHON)
# Otherwise every process compiles the modules of rondo and of the tests anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help
help:
	@echo "make quickstart   a small language model learns by reinforcement learning, on the CPU (SEED=0)"
	@echo "make test         the tests, without those marked slow"
	@echo "make test-all     the slow ones, too"
	@echo "make test-engines the same conformance suite on real vLLM and SGLang, in an environment of their own"
	@echo "make test-environments   tests of environments of other packages (TextWorld, ALFWorld, …), S3, torchao, beside .venv"
	@echo "make test-long    what all of these leave out: the tests of tests/long.txt, with their reasons (an hour)"
	@echo "make test-chance  the tests of tests/chance.txt (TESTS=) twenty times (TIMES=), in random order, on a busy machine"
	@echo "make lint         ruff, mypy, import rules, the measure of the house"
	@echo "make docs         the site, in build/site, with every link checked (open it: python -m http.server -d build/site)"
	@echo "make benchmarks   decode against transformers and the roofline; a GRPO step against TRL"
	@echo "make clean        remove .venv, .venv-engines, .venv-environments, caches and build products (runs/ stays)"
	@echo "The first of them makes $(VENV) and installs into it (a few minutes). Variables: see the head of this file."

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "rondo needs Python 3.11 or newer; '$(PYTHON)' is not. Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)

# .stamp-quickstart and .stamp-dev: the extra of that name is installed. Uncompiled, as in all environments: of 25,000
# modules few are ever imported, and compiled then; to compile all takes half of the installation.
$(VENV)/.stamp-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing rondo-rl[$*] into $(VENV) (torch is the largest part; minutes on the first time) …"
	@$(BIN)/python -m pip install --progress-bar off --no-compile $(PIP_ARGS) $(addprefix --constraint ,$(CONSTRAINTS)) \
	  --editable ".[$*]" 2> >(sed '$(PIP_NOISE)' >&2) | awk '/Downloading .*MB/ { print "  " $$2, $$3, $$4; fflush() } \
	  /^Installing collected/ { print "  unpacking", NF - 3, "packages"; fflush() }'
	@touch $@

.PHONY: quickstart
quickstart: $(VENV)/.stamp-quickstart
	$(BIN)/rondo train quickstart trainer.seed=$(SEED) trainer.run_dir=runs/quickstart-$(SEED)

# By file, longest first (tests/conftest.py).
BY_FILE = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(LOG)
LOG = $(if $(CHECKS_LOG),--report-log=$(CHECKS_LOG))
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(BY_FILE)
# Which of the slow ones: make test-long sets it.
WHICH = not long

.PHONY: test
test: $(VENV)/.stamp-dev
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/.stamp-dev
	$(PYTEST) -m "$(WHICH)" $(PYTEST_ARGS)

.PHONY: test-long
test-long:
	@$(MAKE) --no-print-directory --keep-going test-all test-engines test-environments WHICH=long

# vLLM and SGLang for CPUs: all that is in their constraints and nothing else, so that pip has nothing to work out, and
# uncompiled: few of the modules are ever imported, and compiled then. Of what vLLM asks for, torchaudio and torchcodec
# are built for CUDA and die on import; SGLang's own dependencies would replace torch by a CUDA build. torchvision, which
# both want, dies on import beside a CPU torch, too: rondo_engines.pth has every process of this environment import the
# remedy (tests/engines/cpu/rondo_engines_on_cpus.py).
PIP_ENGINES = $(VENV_ENGINES)/bin/python -m pip install --quiet --progress-bar off --no-deps --no-compile $(PIP_ARGS)
QUIETLY := 2> >(sed '$(PIP_NOISE)' >&2)

$(VENV_ENGINES)/.stamp-packages: constraints/engines.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'
	@echo "Installing vLLM and SGLang into $(VENV_ENGINES) (4 minutes) …"
	@test -x $(VENV_ENGINES)/bin/python || $(PYTHON) -m venv $(VENV_ENGINES)
	@$(PIP_ENGINES) --requirement constraints/engines.txt $(QUIETLY)
	@touch $@

$(VENV_ENGINES)/.stamp-engines: $(VENV_ENGINES)/.stamp-packages pyproject.toml
	@$(PIP_ENGINES) --editable . $(QUIETLY)
	@touch $@

# hypothesis' plugin, where some package brought it, imports itself at the very end, beside threads that engines leave
# behind; two threads that parse at once are an error of Python 3.11's ("AST constructor recursion depth mismatch").
.PHONY: test-engines
test-engines: $(VENV_ENGINES)/.stamp-engines $(VENV)/.stamp-dev
	@printf '%s\n' "$(CURDIR)/tests/engines/cpu" "import rondo_engines_on_cpus" > \
	  "$$($(VENV_ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/rondo_engines.pth"
	OMP_NUM_THREADS=1 $(VENV_ENGINES)/bin/python -m pytest tests/engines -m "$(WHICH)" $(BY_FILE) -p no:hypothesispytest --maxfail 4 $(PYTEST_ARGS)
	RONDO_ENGINE_PYTHON=$(VENV_ENGINES)/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(LOG:.jsonl=-elsewhere.jsonl) -m "$(WHICH)" tests/engines/test_elsewhere.py
	OMP_NUM_THREADS=1 $(VENV_ENGINES)/bin/python -m pytest -n $(TEST_PROCESSES) $(LOG:.jsonl=-kernels.jsonl) -p no:hypothesispytest -m "$(WHICH)" \
	  -k "interpreter or compile" tests/rollout/test_fused.py tests/training/test_fused_head.py

# Environments of other packages. Some pin what rondo's tests have in another version (mcp, openai), so that they get an
# environment of their own; rondo_environments.pth puts the packages of .venv on its path after its own, so that torch
# and all the rest are there once, pip and setuptools too. As for the engines, pip has nothing to work out.
PURELIB = -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'

$(VENV_ENVIRONMENTS)/.stamp-environments: constraints/environments.txt | $(VENV)/.stamp-dev
	@echo "Installing rondo-rl[apart] into $(VENV_ENVIRONMENTS), beside what is in $(VENV) (a minute) …"
	@test -x $(VENV_ENVIRONMENTS)/bin/python || $(BIN)/python -m venv --without-pip $(VENV_ARGS) $(VENV_ENVIRONMENTS)
	@echo "import site; site.addsitedir('$$($(abspath $(BIN)/python) $(PURELIB))')" > \
	  "$$($(VENV_ENVIRONMENTS)/bin/python $(PURELIB))/rondo_environments.pth"
	@$(VENV_ENVIRONMENTS)/bin/python -m pip install --quiet --progress-bar off --no-deps --no-compile $(PIP_ARGS) \
	  --requirement constraints/environments.txt $(QUIETLY)
	@touch $@

# Of these the cases on a server of S3, and beside torchao and mathruler.
APART := $(addprefix tests/,rondo_verl/test_scoring.py checkpoint/test_far_store.py system/test_far_models.py trainers/test_far_runs.py training/test_adamw_8bit.py)
.PHONY: test-environments
test-environments: $(VENV_ENVIRONMENTS)/.stamp-environments
	OMP_NUM_THREADS=1 $(VENV_ENVIRONMENTS)/bin/python -m pytest $(BY_FILE) \
	  tests/rondo_worlds/packages -m "$(WHICH)" $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(VENV_ENVIRONMENTS)/bin/python -m pytest -n $(TEST_PROCESSES) $(LOG:.jsonl=-apart.jsonl) -m "$(WHICH)" \
	  -k "s3 or torchao or mathruler" $(APART) $(PYTEST_ARGS)

# A test that fails once in many runs is found here: make test-chance TESTS="tests/x.py::test_y tests/z.py"
TESTS ?= $(shell grep -v '^\#' tests/chance.txt)
TIMES ?= 20
CHANCE := pytest-random-order==1.2.0 pytest-repeat==0.9.4
.PHONY: test-chance
test-chance: $(VENV)/.stamp-dev
	@$(BIN)/python -m pip install --quiet --progress-bar off $(PIP_ARGS) --no-deps $(CHANCE)
	@for loop in 1 2; do while :; do :; done & loops="$${loops-} $$!"; done; trap "kill $$loops" EXIT; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) $(LOG) --count $(TIMES) --random-order $(PYTEST_ARGS) $(TESTS)

.PHONY: lint
lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py tests/test_house.py

# The site's pages are made of docs/, the code and the recipes; mkdocs builds them; all that it made is looked at.
# KaTeX comes from npm, as it was looked at (its checksum), and is shipped in the site.
KATEX := 0.19.1
KATEX_SHA512 := jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==
build/katex-$(KATEX):
	@command -v npm > /dev/null || { echo "make docs needs npm, for KaTeX: apt-get install npm" >&2; exit 1; }
	@mkdir -p build && cd build && npm pack --silent katex@$(KATEX) > /dev/null
	@test "$$(openssl dgst -sha512 -binary build/katex-$(KATEX).tgz | base64 -w 0)" = "$(KATEX_SHA512)" || { \
	  echo "katex-$(KATEX).tgz is not the file that was looked at" >&2; exit 1; }
	@mkdir -p $@.new && tar -xzf build/katex-$(KATEX).tgz -C $@.new --strip-components 1 && mv $@.new $@

.PHONY: docs
docs: $(or $(wildcard $(VENV)/.stamp-dev),$(VENV)/.stamp-docs) build/katex-$(KATEX)
	$(BIN)/python -m docs.site.pages build/katex-$(KATEX)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	$(BIN)/python -m docs.site.check

.PHONY: benchmarks
benchmarks: $(VENV)/.stamp-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/decode.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/vs_trl.py

.PHONY: clean
clean:
	rm -rf $(VENV) $(VENV_ENGINES) $(VENV_ENVIRONMENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
