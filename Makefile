# The environment is set up on the first call and again whenever pyproject.toml changes. To use one of
# your own, with nothing set up, name its interpreter: make test-gpu PY=python3

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=
export CUPYATTN_CACHE_DIR ?= $(CURDIR)/.cupyattn-cache

# CuPy comes for CUDA 13, or 12 where the driver is that old. Without a GPU it is still what compiles.
DRIVER_CUDA := $(shell timeout 30 nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1)
CUDA ?= $(if $(filter 12,$(DRIVER_CUDA)),12,13)
# Registers and spills are one compiler's: gates and results are NVRTC 13.0's. Users' extras stay open.
NVRTC = $(if $(filter 13,$(CUDA)),'cuda-toolkit==13.0.*')

ifdef PY
STAMP :=
else
PY := $(VENV)/bin/python
STAMP := $(VENV)/.made-for-cuda$(CUDA)
endif

.PHONY: help
help:
	@echo 'make demo       the main job: prefill and decode, checked and timed (ARGS="--framework torch")'
	@echo 'make serve-demo a toy engine: batches, prefixes, drafts and CUDA graphs, checked and timed (needs torch)'
	@echo 'make test       lint, types, and every test that needs no GPU'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     ruff, rewriting files'
	@echo 'make test-gpu   the GPU suite'
	@echo 'make test-slow  the tests marked slow'
	@echo 'make test-emulator       the kernels on the host, as make test has them; -slow: the long rest'
	@echo 'make coverage-kernels    line coverage of kernels/ on the host'
	@echo 'make sanitize   the GPU suite under compute-sanitizer (ARGS="racecheck:attention --share 0.3")'
	@echo 'make bench      the benchmark CLI (ARGS="--out FOLDER --op ... --case ...")'
	@echo 'make docs       the site: build/site/index.html; written-docs: the pages and pictures made from code'
	@echo 'make notebooks  execute benchmarks/notebooks on this GPU and keep what they measured (ARGS="4 9")'
	@echo 'make wheel      dist/*.whl and dist/*.tar.gz'
	@echo 'make clean      remove what was built; distclean also removes $(VENV)'
	@echo 'variables: CUDA=12|13  PYTHON=python3  VENV=.venv  JOBS=2  ARGS=  PY=<your own interpreter>'

# The default torch build for Linux x86-64 brings gigabytes of CUDA packages. Under the constraints pip
# refuses it and takes the CPU build where an index has one; where none has, the torch tests skip.
# Of tens of thousands of files few are ever imported, and Python compiles those itself.
$(VENV)/.made-for-cuda$(CUDA): pyproject.toml tests/no-cuda-packages.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "cupyattn needs Python 3.10 or newer: make PYTHON=<one>")'
	@if [ -L $(VENV) ]; then echo '$(VENV) is a link, and what it leads to is not cleared from here: make PY=$(VENV)/bin/python'; exit 1; fi
	@echo "Setting up $(VENV) for CUDA $(CUDA) (once, a few minutes)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install -q --no-compile -e '.[cuda$(CUDA)x,test-core,bench,docs,notebooks-run,dev]' $(NVRTC)
	$(PY) -m pip install -q --no-compile -c tests/no-cuda-packages.txt 'cupyattn[test]' || \
		echo 'NOTICE: no CPU build of torch was found; the tests that need torch will be skipped.'
	@touch $@

# An interpreter of your own may lack what a target uses: $(call has,module,extra)
has = $(PY) -c 'import $(1)' 2>/dev/null || { echo "$(PY) has no $(1): $(PY) -m pip install -e '.$(2)', or leave out PY="; exit 1; }

.PHONY: demo serve-demo test lint format test-gpu test-slow sanitize bench notebooks wheel clean distclean
.PHONY: test-emulator test-emulator-slow coverage-kernels
demo: $(STAMP)
	@$(call has,ml_dtypes)
	@$(PY) -m cupyattn demo $(ARGS)

serve-demo: $(STAMP)
	@$(PY) -m examples.serve $(ARGS)

# JOBS processes share the cores: with BLAS threads on top they wait for each other, three times slower.
test: export OMP_NUM_THREADS = 1
test: lint
	$(PY) -m pytest -m "not gpu and not slow" -n $(JOBS) --dist worksteal --timeout 600 $(ARGS)

lint: $(STAMP)
	@$(call has,ruff,[dev])
	@$(call has,mypy,[dev])
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test-gpu: $(STAMP)
	@$(call has,pytest,[test])
	$(PY) -m pytest -m gpu $(ARGS)

test-slow: $(STAMP)
	$(PY) -m pytest -m slow $(ARGS)

test-emulator test-emulator-slow coverage-kernels: export OMP_NUM_THREADS = 1
test-emulator: $(STAMP)
	$(PY) -m pytest tests/emulator -m "not slow" -n $(JOBS) --dist worksteal $(ARGS)

test-emulator-slow: $(STAMP)
	$(PY) -m pytest tests/emulator -m slow -n $(JOBS) --dist worksteal $(ARGS)

coverage-kernels: export PYTHONPATH = .:tests
coverage-kernels: $(STAMP)
	$(PY) -m emulator.coverage

sanitize: $(STAMP)
	$(PY) tests/helpers/sanitize.py --jobs $(JOBS) $(ARGS)

bench: $(STAMP)
	$(PY) -m benchmarks $(ARGS)

.PHONY: docs written-docs
docs: $(STAMP)
	@$(call has,furo,[docs])
	$(PY) -m sphinx -c docs -W --keep-going -q -j $(JOBS) -d build/doctrees -b html . build/site
	@echo 'build/site/index.html'

written-docs: $(STAMP)
	$(PY) -m docs.tools

notebooks: export CUPYATTN_NOTEBOOKS_SAVE = $(CURDIR)/cupyattn/bench/lab/measured
notebooks: $(STAMP)
	$(PY) -m benchmarks.notebooks --execute $(ARGS)

wheel: $(STAMP)
	$(PY) -m hatchling build

clean:
	rm -rf build dist .cupyattn-cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find cupyattn tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
