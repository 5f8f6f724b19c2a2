# Everything runs from a fresh checkout with nothing but Python 3.11 or newer and make.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
ROOMS := artifact hipkern quantize registry runtime
INSTALLED := $(VENV)/.installed

# Tests of one file share what they build, so a file stays on one core.
SPREAD := --numprocesses auto --maxprocesses 8 --dist loadfile

DEMO_SOURCE := tests/data/ds4-tiny
DEMO_FILE := demo/ds4-tiny.hfq
DEMO_PROMPT := Repeat exactly: kv_cache_block_17

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Without bytecode every worker rewrites all tests anew, and every command that tests start compiles
# the package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup links demo test test-slow test-gpu objects registry lint type check bench bench-gpu goldens docs clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(INSTALLED) ## make .venv and install ds4q with its tools, once

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ds4q needs Python 3.11 or newer; '$(PYTHON)' is not: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(MAKE) --no-print-directory links
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --editable '.[dev]'
	@touch $@

links: ## mend the links in ds4q/ where a checkout lost them
	@for room in $(ROOMS); do ln -sfn ../$$room ds4q/$$room; done

demo: setup ## quantize, verify and run the small trained model
	@mkdir -p demo
	$(RUN) ds4q quantize $(DEMO_SOURCE) -o $(DEMO_FILE) --force
	$(RUN) ds4q verify $(DEMO_FILE) --source $(DEMO_SOURCE)
	$(RUN) ds4q run $(DEMO_FILE) -p "$(DEMO_PROMPT)" --temp 0

test: setup ## the tests, without those that take minutes or need a GPU
	$(RUN) pytest -m "not slow and not gpu" $(SPREAD)

test-slow: setup ## the tests that take minutes
	$(RUN) pytest -m slow

test-gpu: setup ## the tests that need a GPU
	$(RUN) pytest -m gpu

objects: setup ## compile every kernel for five AMD GPUs, and check registers, scratch and LDS
	$(RUN) ds4q.hipkern.objects

registry: setup ## the registry document is what the files beside it say; needs no network
	$(RUN) ds4q registry gen --check

lint: setup ## style and formatting
	$(RUN) ruff check .
	$(RUN) ruff format --check .

type: setup ## types
	$(RUN) mypy

check: lint type registry test ## what has to pass before a change goes in

bench: setup ## the benchmarks; results go to benchmarks/results
	$(RUN) benchmarks.repack
	$(RUN) benchmarks.decode_cpu
	$(RUN) benchmarks.encode
	$(RUN) benchmarks.flash_plan
	$(RUN) benchmarks.quality
	$(RUN) benchmarks.imatrix
	$(RUN) benchmarks.frontier
	$(RUN) benchmarks.load_time
	$(RUN) benchmarks.pull
	$(RUN) benchmarks.paging_reads
	$(RUN) benchmarks.paging
	$(RUN) benchmarks.prefetch
	$(RUN) benchmarks.serve

bench-gpu: setup ## the benchmarks of kernels, a decode step, loading and paging on a GPU
	$(RUN) benchmarks.gpu --record
	$(RUN) benchmarks.paging_gpu

goldens: setup ## check the golden vectors with their own decoder; they came from outside
	$(VENV)/bin/python tests/data/golden/check_rocmfpx.py

docs: setup ## write docs/cli.md anew from the commands' help
	$(RUN) tools.cli_reference

clean: ## remove what make and the tools made, .venv included
	rm -rf $(VENV) demo build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find $(ROOMS) ds4q tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
