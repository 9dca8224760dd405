# Lockstep: `make help` lists what there is.
# Without an NVIDIA GPU, torch is the CPU build: of TORCH_INDEX, or of pip's own index where that has one.

PYTHON ?= python3
BIN := .venv/bin
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
CONSTRAINTS ?= $(if $(filter 0,$(GPUS)),constraints.txt,constraints-cuda.txt)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?= -n $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 1 )))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)
TORCH := $(PIP) --no-deps --retries 1 --timeout 10 --extra-index-url $(TORCH_INDEX) torch
RANKS ?= $(if $(filter 0,$(GPUS)),2,$(GPUS))

.DEFAULT_GOAL := help
.PHONY: help install train test lint check docs drill gpu format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/.installed  ## sets up .venv with the command `lockstep`

.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lockstep needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@grep -q '^torch==.*+cpu$$' $(CONSTRAINTS) || exit 0; echo '$(TORCH)'; $(TORCH) || { \
		echo 'make: neither $(TORCH_INDEX) nor the index of pip has the CPU build of PyTorch for this Python,' \
		'and the default build comes with 5 GB of CUDA libraries: set TORCH_INDEX or PIP_FIND_LINKS to a place' \
		'that has it, or CONSTRAINTS=constraints-cuda.txt to take CUDA' >&2; exit 2; }
	$(PIP) --editable '.[digits]'
	@$(BIN)/python -m compileall -q src
	@touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) --editable '.[digits,hf,metrics,optimizers,peft,quantization,deepspeed,lm-eval,dev,docs]'
	@touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) --editable '.[docs]'
	@touch $@

train: .venv/.installed  ## trains the recipe stdlib-lm: on every GPU, or on 2 CPU ranks
	$(BIN)/lockstep train stdlib-lm --ranks $(RANKS)

test: .venv/.installed-dev  ## passes the whole suite
	@$(BIN)/python -m compileall -q src tests  # hundreds of processes would, where Python may not write bytecode
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: .venv/.installed-dev  ## format, lint, types, layers, prose
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/prose.py

check: lint test  ## what must pass: lint and test

docs: .venv/.installed-docs  ## builds the documentation site into build/site; a warning fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html"

drill: .venv/.installed-dev  ## kills runs and saves by the hundred, for an hour; nothing may be lost
	$(PIP) --editable '.[ray,wandb,trackio]' comet_ml 'aim<3.28'
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m drill -rs --timeout 1800
	$(BIN)/python -m pytest -n 0 tests/launchers/test_ray.py
	$(BIN)/python drills/cells_drill.py
	$(BIN)/python drills/finetune_drill.py
	$(BIN)/python drills/kill_drill.py runs --kills 20 --whole --steps 480
	$(BIN)/python drills/kill_drill.py saves --kills 300
	$(BIN)/python drills/attack_drill.py
	$(BIN)/python drills/chaos_drill.py --rounds 4
	$(BIN)/python drills/signal_drill.py --times 25
	$(BIN)/python drills/elastic_drill.py
	$(BIN)/python drills/hosts_drill.py
	$(BIN)/python drills/s3_drill.py --attempts 40
	$(BIN)/python drills/versions_drill.py
	$(BIN)/python drills/doctor_drill.py
	$(BIN)/python drills/aws_drill.py
	$(BIN)/python drills/peers_drill.py --contestants Lockstep --kills 300

gpu: .venv/.installed-dev  ## on a machine with NVIDIA GPUs: their tests, predicted beside measured memory, steps beside peers
	@[ $(GPUS) -gt 0 ] || { echo "make gpu: this machine shows no NVIDIA GPU (nvidia-smi -L)"; exit 2; }
	$(PIP) --editable '.[benchmark]'
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m gpu tests/gpu
	$(BIN)/python benchmarks/plan_memory.py --device cuda
	$(BIN)/python benchmarks/gpu_steps.py
	$(BIN)/python benchmarks/tables.py
	@echo "benchmarks/results and benchmarks/README.md have this machine's figures: commit them"

format: .venv/.installed-dev  ## formats and fixes what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## removes .venv and caches, not runs
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build src/*.egg-info
