# Everything runs in .venv, which each target makes when there is none. Needed: make, Python >= 3.10.
#
# Which torch: without an NVIDIA GPU an exact version, with one any that Saccade supports. The pin is
# exact because an open range picks the newest release, and on Linux the registry's default build of
# torch brings gigabytes of CUDA packages. If a CPU build is not what your registry offers first,
# name an index of CPU builds; pip then prefers the version marked "+cpu":
#     make demo PIP_ARGS="--extra-index-url URL"
# PIP_ARGS goes to the step that installs torch and to no other; pip's own settings (its
# configuration file and PIP_... in the environment) hold for every step.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Two pips at once would spoil .venv; pytest brings its own workers.
.NOTPARALLEL:
.PHONY: help install demo bench docs test test-slow test-quick test-newest test-training browser check kernels kernels-known wheel test-gpu clean

# Images of containers tell Python to keep no bytecode: each of a hundred processes would compile
# torch again, which takes 3 seconds, and each worker of pytest all tests and what they import.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles a module at its first import. All of them took pip half of its time.
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile

HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),torch>=2.11,torch==2.13.0)

# A torch without CUDA comes without Triton; the tests interpret and compile kernels all the same.
# The oldest Triton that is served is what they use, and kernels are compiled by the newest as well.
TRITON ?= $(if $(HAS_GPU),,$(if $(filter Linux,$(shell uname -s)),triton==3.6.0))
NEWEST_TRITON := triton==3.9.0

# More than 8 workers spend more on importing torch than they save; one core needs no worker (0). One
# more than there are cores: some tests wait, for processes that they start and for time to pass.
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
WORKERS ?= $(shell if [ $(CORES) -gt 7 ]; then echo 8; elif [ $(CORES) -gt 1 ]; then echo $$(( $(CORES) + 1 )); else echo 0; fi)

# A stamp says what .venv holds. The torch stamp carries the requirement in its name, so another
# TORCH=... is installed and the same one is not.
space := $(subst ,, )
PYTHON_STAMP := $(VENV)/.made
TORCH_STAMP := $(VENV)/.installed-$(subst /,_,$(subst :,_,$(subst $(space),_,$(subst >,ge,$(subst <,lt,$(subst =,-,$(TORCH)))))))
DEMO_STAMP := $(VENV)/.installed-demo
DEV_STAMP := $(VENV)/.installed-dev
DOCS_STAMP := $(VENV)/.installed-docs
TRAINING_STAMP := $(VENV)/.installed-training-tests
NEWEST := $(VENV)/newest-triton
NEWEST_STAMP := $(VENV)/.installed-newest-triton

help: ## show this help
	@echo "make TARGET [ARGS=...]"
	@echo
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'
	@echo
	@echo "  ARGS=...     passed on to demo, bench, docs and pytest"
	@echo "  PYTHON=...   the Python that makes $(VENV); default: the first of python3, python3.14 ... python3.10 that is >= 3.10"
	@echo "  TORCH=...    the torch to install; here it is \"$(TORCH)\""
	@echo "  PIP_ARGS=... options for the pip that installs torch; on Linux without a GPU, if pip would fetch"
	@echo "               CUDA packages: PIP_ARGS=\"--extra-index-url URL\", with the URL of an index of CPU builds"
	@echo "  WORKERS=...  pytest workers; here $(WORKERS)"
	@echo "  BROWSER=...  what test does without a Chromium: \"install\" one where that may be done, else skip the"
	@echo "               tests that need it (the default); \"require\" it (the default in CI); \"skip\""

install: $(DEV_STAMP) ## make .venv with Saccade and its development tools, as other targets do by themselves

demo: $(DEMO_STAMP) ## run the demonstration
	@$(BIN)/saccade demo $(ARGS)

bench: $(DEMO_STAMP) ## run the benchmarks
	@$(BIN)/saccade bench $(ARGS)

# The builder warns of its own next version at each start; pyproject.toml pins the one that is used.
# Told to be quiet, it would not count warnings, which end the build.
docs: $(DOCS_STAMP) ## run the chapters and build the site, out/site/index.html (ARGS=--quick: in a minute)
	@$(BIN)/python tools/chapters.py $(ARGS)
	@$(BIN)/python tools/site_pages.py
	@$(BIN)/python tools/reference_pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@$(BIN)/python tools/reference_pages.py --check
	@echo "Built out/site/index.html"

# Whose shape annotations the tests of operations check at run time, those of what calls operations
# not (tests/conftest.py). No module that holds kernels: the check wraps every annotated function,
# and Triton cannot compile a wrapped one ("tl is not defined"). Nor the public edge, which refuses
# wrong arguments with errors of its own.
OPS := attention linear_attention paged_attention
CHECKED := $(OPS:%=ops.%.reference) $(OPS:%=ops.%.cpu) runtime.dropout
comma := ,
CHECKED_MODULES := $(subst $(space),$(comma),$(CHECKED:%=saccade.%))

# A file stays with one worker, which makes its models, kernels and processes once; the longest come
# first (tests/conftest.py). One torch thread a worker: the workers already fill the cores.
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CHECK_SHAPES := --jaxtyping-packages=$(CHECKED_MODULES),shape_checks.typechecked
test: $(DEV_STAMP) browser ## run the tests that need no GPU (11 minutes on two cores)
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 SACCADE_BROWSER=$(BROWSER) $(PYTEST) \
	    -m "not gpu and not training and not slow" $(CHECK_SHAPES) $(ARGS)

# What finds little that those above do not, and takes a minute a test.
test-slow: $(DEV_STAMP) ## run what make test leaves out: the whole list of variants, training by FSDP2 (some minutes)
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) -m "slow and not gpu and not training" $(CHECK_SHAPES) $(ARGS)

# The front door, masks, scores and the reference.
QUICK_TESTS := tests/test_import.py tests/test_cli.py tests/test_masks.py tests/test_scores.py tests/ops/attention/test_reference.py
test-quick: $(DEV_STAMP) ## run a sample of the tests (a quarter of a minute on two cores)
	@OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) \
	    -m "not gpu and not training and not slow" $(QUICK_TESTS) $(ARGS)

# What a new Triton or torch has broken so far. By the newest torch as well, whose default build is
# gigabytes of CUDA packages: python tools/try_stack.py --help; what was found is in docs/stacks.md.
test-newest: $(DEV_STAMP) $(NEWEST_STAMP) ## run a sample of the tests by the newest Triton, in the torch that is there
	@PYTHONPATH=$(NEWEST) OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTEST) \
	    -m "not gpu and not training and not slow" $$($(BIN)/python tools/try_stack.py --list-sample) $(ARGS)

# Each case trains in processes of its own, three times: some minutes, and not a part of CI. None of
# them is waited for longer than 5 minutes; where pytest itself stands longer than three of them may
# take together, it says where.
test-training: $(TRAINING_STAMP) ## train tiny models by the tools that people use, and compare with sdpa
	@$(PYTEST) --dist load -o faulthandler_timeout=960 -m "not gpu" -rs tests/training $(ARGS)

# The report's page is tested in a headless Chromium. Debian has one without a desktop's parts; pip
# has none, and what other packages fetch comes from neither. A machine's own packages are touched
# only if asked: BROWSER=install, as CI asks. Without a browser its tests skip and say why, or fail
# with BROWSER=require.
BROWSER ?= find
CHROMIUM := chromium-headless-shell
browser: ## with BROWSER=install: install the Chromium that tests of the report need (Debian, as root)
	@[ "$(BROWSER)" = find ] || [ -n "$$SACCADE_CHROMIUM" ] && exit 0; \
	for name in $(CHROMIUM) chromium chromium-browser google-chrome google-chrome-stable; do \
	    if command -v $$name >/dev/null 2>&1; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then \
	    echo "No Chromium: $(CHROMIUM) is installed by apt-get, as root. Name one that is there by" >&2; \
	    echo "SACCADE_CHROMIUM=/path/to/chromium, or the tests of the report's page go without." >&2; \
	    exit 0; \
	fi; \
	echo "Installing $(CHROMIUM) (half a minute)"; \
	{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	    apt-get install -y -qq --no-install-recommends $(CHROMIUM); } >/dev/null || \
	    echo "No Chromium: apt-get could not install $(CHROMIUM)." >&2

# Both type checks have a core to themselves: side by side they take three quarters of the time.
check: $(DEV_STAMP) ## run the linters and the type checker, the latter on the public names too; compare README's table
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python tools/house_rules.py
	@$(BIN)/python tools/readme_table.py --check
	@$(BIN)/python tools/public_types.py & types=$$!; $(BIN)/pyright; found=$$?; \
	wait $$types && exit $$found

# docs/kernels.json knows what unchanged kernels take, so that only others are compiled, and a sample.
# The committed table holds what the pinned Triton makes; the newest, which takes longer for each,
# compiles the forward pass at one width, unless asked for more: NEWEST_ONLY=
KNOWN := --known docs/kernels.json
NEWEST_ONLY ?= --kernel forward --head-dim 128
kernels: $(DEV_STAMP) $(NEWEST_STAMP) ## compile what changed in the kernels, for every architecture, by the oldest and the newest Triton
	@$(BIN)/saccade kernels --arch all --check $(KNOWN) --markdown docs/kernels.md
	@PYTHONPATH=$(NEWEST) $(BIN)/saccade kernels --arch all --check $(KNOWN) $(NEWEST_ONLY)

kernels-known: $(DEV_STAMP) $(NEWEST_STAMP) ## the same, and write what was found: docs/kernels.md and docs/kernels.json
	@$(BIN)/saccade kernels --arch all $(KNOWN) --markdown docs/kernels.md
	@PYTHONPATH=$(NEWEST) $(BIN)/saccade kernels --arch all $(KNOWN) $(NEWEST_ONLY)

# Without machine code, `pip wheel .` makes one in a moment; its kernels are compiled when first used.
wheel: $(DEV_STAMP) ## build a wheel that holds machine code (ARCH=sm_90 ARGS=--sample: in minutes)
	@$(BIN)/python tools/compile_wheel.py $(if $(ARCH),--arch $(ARCH)) $(ARGS)

# Installs nothing: it tests the torch that is there, in .venv or, without one, in PYTHON.
test-gpu: ## run the tests that need an NVIDIA GPU, in the torch that is installed
	@python=$(BIN)/python; [ -x $$python ] || python="$(or $(PYTHON),python3)"; \
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $$python -m pytest -q -m gpu $(ARGS)

clean: ## remove .venv and everything that was built or cached
	rm -rf $(VENV) build dist out/chapters out/docs out/site .pytest_cache .ruff_cache .hypothesis
	find src tests tools docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(PYTHON_STAMP):
	@python=; \
	for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python3.10); do \
	    if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "error: found no Python >= 3.10 under the name of $(or $(PYTHON),python3 or python3.10 to python3.14)." >&2; \
	    echo "       Install one, or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; \
	    exit 1; \
	fi; \
	if ! $$python -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "error: $$python has no venv module, which makes $(VENV)." >&2; \
	    echo "       On Debian and Ubuntu it is the package python3-venv; or name another PYTHON=..." >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): $(PYTHON_STAMP)
	@echo "Installing $(TORCH) in $(VENV) (a minute or so)"
	@rm -f $(VENV)/.installed-*
# --upgrade, or a CPU build that is there would satisfy the open range of a machine with a GPU.
	@$(PIP_INSTALL) --upgrade $(PIP_ARGS) "$(TORCH)"
	@touch $@

# Torch comes first, in a step of its own: the packages below then take the torch that is there.
$(DEMO_STAMP): $(TORCH_STAMP) pyproject.toml
	@echo "Installing Saccade in $(VENV) (less than a minute)"
	@$(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(DOCS_STAMP): $(TORCH_STAMP) pyproject.toml
	@echo "Installing Saccade and what builds its site in $(VENV) (less than a minute)"
	@$(PIP_INSTALL) -e '.[docs]' $(TRITON)
	@touch $@

$(DEV_STAMP): $(TORCH_STAMP) pyproject.toml
	@echo "Installing Saccade and its development tools in $(VENV) (a minute or so)"
	@$(PIP_INSTALL) -e '.[dev,bench]' $(TRITON)
	@touch $@ $(DEMO_STAMP)

$(TRAINING_STAMP): $(DEV_STAMP)
	@echo "Installing trl, peft, accelerate and lightning in $(VENV) (a minute or so)"
	@$(PIP_INSTALL) -e '.[dev,bench,training-tests]' $(TRITON)
	@touch $@

$(NEWEST_STAMP): $(PYTHON_STAMP)
	@echo "Installing $(NEWEST_TRITON) beside $(VENV)'s own"
	@$(PIP_INSTALL) --no-deps --upgrade --target $(NEWEST) $(NEWEST_TRITON)
	@touch $@
