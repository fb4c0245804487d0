# From a bare machine (Python 3.11, a C compiler, make): `make demo` and `make test`.

PYTHON ?= python3.11
TORCH  ?= torch==2.13.0
ARGS   ?=
JOBS   ?= $(shell nproc 2>/dev/null || echo 2)

BIN    := .venv/bin
NATIVE := setup.py $(wildcard kiln/*.c kiln/*.h)

export OMP_NUM_THREADS ?= 1

.PHONY: help install develop build demo test test-ops test-page fuzz test-gpu smoke lint types pytest docs bench clean

help:
	@echo "demo: compile a small model and show what happened    test: lint, types, all tests    smoke: tests of seconds"
	@echo "docs: the documentation as a site, in build/site"
	@echo "bench: every benchmark                                 build: the C extension           clean: remove .venv and builds"

# torch comes first: it is large, pinned here, and the package then finds its requirement met.
.venv/torch.stamp:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip setuptools wheel
	$(BIN)/pip install --quiet "$(TORCH)" numpy
	@touch $@

.venv/install.stamp: .venv/torch.stamp pyproject.toml $(NATIVE)
	$(BIN)/pip install --quiet --no-build-isolation --editable .
	@touch $@

.venv/develop.stamp: .venv/install.stamp
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[dev,models]"
	@touch $@

install: .venv/install.stamp
develop: .venv/develop.stamp
build: .venv/torch.stamp
	$(BIN)/python setup.py --quiet build_ext --inplace

demo: install
	$(BIN)/python examples/demo.py $(ARGS)

test: lint types pytest

lint: develop
	$(BIN)/ruff check .

types: develop
	$(BIN)/mypy

pytest: develop
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(ARGS)

# Everything that takes more than ten seconds: all samples of all ops, in all dtypes.
test-ops: develop
	$(BIN)/python -m pytest -n $(JOBS) -m slow $(ARGS)
	KILN_ALL_SAMPLES=1 $(BIN)/python -m pytest -n $(JOBS) tests/ops/test_rules_opinfo.py \
		tests/differentiate/test_opinfo.py tests/differentiate/test_modules.py tests/compiler $(ARGS)

# Random tensor programs, compiled to native code and compared with eager.
fuzz: develop
	KILN_FUZZ=$(or $(PROGRAMS),20000) $(BIN)/python -m pytest tests/fuse/test_random.py $(ARGS)

# The page of `kiln report` in a real browser: Chromium, found by name or in KILN_CHROMIUM.
test-page: develop
	$(BIN)/python -m pytest tests/page $(ARGS)

# On a machine with a GPU: values and gradients beside eager's, then the speed of kernels.
test-gpu: develop
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'no GPU here'"
	$(BIN)/python -m pytest -n $(JOBS) tests/gpu $(ARGS)
	KILN_DEVICE=cuda $(BIN)/python -m pytest -n $(JOBS) tests/compiler/test_opinfo.py tests/compiler/test_modules.py $(ARGS)
	KILN_DEVICE=cuda KILN_DTYPE=bfloat16 $(BIN)/python -m pytest -n $(JOBS) tests/compiler/test_opinfo.py tests/compiler/test_modules.py $(ARGS)
	KILN_DEVICE=cuda KILN_FUZZ=$(or $(PROGRAMS),5000) $(BIN)/python -m pytest tests/fuse/test_random.py $(ARGS)
	$(BIN)/python benchmarks/gpu.py

smoke: develop
	$(BIN)/python -m pytest -m smoke $(ARGS)

# The pages that are made of code, then the site, in build/site.
docs: develop
	$(BIN)/pip install --quiet ".[docs]" --no-build-isolation
	$(BIN)/python docs/generate.py
	$(BIN)/python -m mkdocs build --strict

bench: develop
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/guards.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/differentiate.py
	$(BIN)/python benchmarks/fake.py
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/optimizers.py
	$(BIN)/python benchmarks/compile_time.py

clean:
	rm -rf .venv build *.egg-info kiln/*.so
