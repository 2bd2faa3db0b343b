# `make demo`, `make test` and `make lint` do all their own set-up in .venv; the second time only what has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
OLD_TRITON := $(VENV)/triton-3.6
OP ?= ops
BENCH_start_program := python -m fusedcomm.bench.start_program
NATIVE_SOURCES := setup.py build_backend.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)

# Tests start hundreds of processes, each of which would compile all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup models demo test test-torch nightly lint docs wheel wheels bench figures results host-cost gpu-check clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   one matmul and its all_to_all, unfused and fused, on this machine"
	@echo "make test   every capability, at most 8 minutes on 2 cores; THOROUGH=1 adds what else CI runs: more parameters"
	@echo "make nightly  what takes longer: all parts, or PART=name of those in tests/nightly.py; outcomes: JSON in"
	@echo "            build/nightly.jsonl; PART=torch TORCH=2.15.0 is make test with another release of torch: GBs, as it has CUDA"
	@echo "make lint   ruff, mypy, codespell, and whether docs/api and the map of the rooms follow the sources"
	@echo "make docs   docs/api from the docstrings, and the map of the rooms in docs/architecture.md from the imports"
	@echo "make wheel  dist/*.whl, with the native part for this Python and this release of torch if there is a C++ compiler,"
	@echo "            and the sources; make wheels TORCH=\"2.13.0 2.15.0\" PYTHON=\"python3.11 python3.12\": one for each"
	@echo "make bench  speed of each op against its baseline and its roof, on 2 CPU ranks: fusedcomm bench, OP=matmul_all_to_all"
	@echo "            for one; OP=start_program, a program under torch.compile; BENCH_ARGS=--help has the options"
	@echo "make figures  the figures of docs/benchmark.md and others, into bench/results; 20 minutes of a machine that does nothing else"
	@echo "make results  bench/results.csv, a line per measured figure of bench/results"
	@echo "make host-cost  what a call costs the host of a GPU, in instructions, and what the streams are given; without a GPU,"
	@echo "            with valgrind: 0.8 GB the first time, and 15 minutes; HOST_COST_ARGS= --ranks, --torch, --json FILE"
	@echo "make gpu-check  what one GPU can prove, in two halves of 380 s, with a Python that has torch, PYTHON=; what was"
	@echo "            found is in build/gpu-check.jsonl and build/gpu-*.json; GPU_CHECK_ARGS= --only right or fast, --json FILE"
	@echo "make models  the packages whose models make nightly PART=models runs: 0.6 GB, minutes, Python 3.11 or newer"
	@echo "make setup  what the others need: .venv with the development tools, this checkout built into it"
	@echo "make clean  remove .venv and everything built"

setup: $(VENV)/.built $(VENV)/.dev

models: $(VENV)/.models

demo: $(VENV)/.built
	$(BIN)/python -m fusedcomm demo

TIERS := $(if $(THOROUGH),not nightly,not thorough and not nightly)
test: setup $(if $(THOROUGH),$(VENV)/.old_triton)
	$(BIN)/python -m pytest -n 2 --max-worker-restart 0 -m "$(TIERS)" $(PYTEST_ARGS)

nightly: setup $(VENV)/.old_triton
	TORCH="$(TORCH)" $(BIN)/python -m tests.nightly $(PART)

# In a copy of the checkout, as an editable install puts its native part there. torch chooses its Triton and its
# setuptools; NumPy is older than 2.4 for the interpreter of the Triton 3.6 that torch 2.11 comes with.
OTHER := build/$(notdir $(PYTHON))-torch-$(TORCH)
GOAL ?= test
test-torch:
	@test -n "$(TORCH)" || { echo "Name releases of torch: TORCH=2.15.0" >&2; exit 1; }
	mkdir -p $(OTHER)
	find $(OTHER) -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --preserve=timestamps -t $(OTHER)
	sed -E '/^(triton|setuptools|numpy)==/d; s/^torch==.*/torch==$(TORCH)\nnumpy<2.4/' constraints.txt >$(OTHER)/constraints.txt
	touch -r constraints.txt $(OTHER)/constraints.txt
	$(MAKE) -C $(OTHER) $(GOAL)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m docs.generate --check

docs: $(VENV)/.made
	$(BIN)/python -m docs.generate

# build/lib* would bring back modules that are gone from the checkout.
WHEELS ?= dist
wheel: $(VENV)/.torch
	rm -rf build/lib* $(WHEELS)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir $(WHEELS) .
	$(BIN)/python -c "import build_backend; build_backend.build_sdist('$(WHEELS)')" >/dev/null 2>&1
	@ls $(WHEELS)/*
	@! ls $(WHEELS)/*-none-any.whl >/dev/null 2>&1 || echo "without the native part: no C++ compiler, or pip wheel --verbose says why"

wheels:
	@for torch in $(or $(TORCH),""); do for python in $(PYTHON); do $(MAKE) test-torch GOAL=wheel TORCH=$$torch PYTHON=$$python \
	  WHEELS=$(CURDIR)/dist/torch-$$torch-$$(basename $$python) || exit; done; done

bench: $(VENV)/.built
	$(BIN)/$(or $(BENCH_$(OP)),fusedcomm bench $(OP)) $(BENCH_ARGS)

# The figures that the README and docs/ quote, with nothing else running; about 20 minutes. They are measured with
# default numbers, whatever this user has tuned.
RESULTS := bench/results/cpu-2-ranks
figures: export FUSEDCOMM_CACHE_DIR := $(CURDIR)/$(VENV)/figures
figures: setup
	rm -rf $(VENV)/figures
	$(BIN)/fusedcomm bench ops --dtype float32 bfloat16 --json $(RESULTS)-ops.json
	$(BIN)/fusedcomm bench overhead --json $(RESULTS)-overhead.json
	$(BIN)/python -m fusedcomm.bench.start_program --json $(RESULTS)-compile.json
	$(BIN)/fusedcomm tune --json $(RESULTS)-tune.json
	$(MAKE) results

results:
	$(PYTHON) bench/results_csv.py

# A CUDA build of torch in a venv of its own, without CUDA.
HOST_COST_ARGS ?=
host-cost:
	$(PYTHON) tests/host_cost $(HOST_COST_ARGS)

# Without .venv: a machine with a GPU often has torch, and no network. From a bare clone or after README's install.
GPU_CHECK_ARGS ?=
gpu-check:
	$(PYTHON) -m fusedcomm.bench.gpu_check --json build/gpu-check.jsonl $(GPU_CHECK_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f kernels/cpu/*.so
	find fusedcomm kernels bench tests docs -name __pycache__ -type d -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "fusedcomm needs Python 3.10 to 3.13, and $(PYTHON) is: $$($(PYTHON) --version 2>&1)." \
	         "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch and setuptools first: without build isolation setup.py builds the native part against them. Without
# NumPy torch works, but complains. ninja compiles the native part's sources beside each other.
$(VENV)/.torch: $(VENV)/.made constraints.txt
	@echo "Installing PyTorch, Triton and what they need into $(VENV), then building fusedcomm: minutes the first time"
	$(PIP) "setuptools>=77" torch numpy ninja
	@touch $@

$(VENV)/.built: constraints.txt pyproject.toml fusedcomm/__init__.py $(NATIVE_SOURCES) | $(VENV)/.torch
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) --no-build-isolation --editable .
	@touch $@

# fusedcomm itself is there already: this adds what the extra names, and builds nothing again.
$(VENV)/.dev: constraints.txt pyproject.toml | $(VENV)/.built
	$(PIP) "fusedcomm[dev]"
	@touch $@

# DeepSpeed comes as source only; without isolation it is built beside the torch that is there.
$(VENV)/.models: constraints.txt pyproject.toml | $(VENV)/.dev
	$(PIP) --no-build-isolation "fusedcomm[models]"
	@touch $@

# tests/kernels/test_compile_only.py asserts the signal order in PTX under this version too.
$(VENV)/.old_triton: $(VENV)/.made
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	  --target $(OLD_TRITON) triton==3.6.0
	@touch $@
