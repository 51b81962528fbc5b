# make demo       forgetting, and what holds it, on real digits: a table, figures and a page in demo/
# make test       the tests, without those of make test-slow
# make test-slow  the tests that start clusters, browsers or several processes, kill some, or try many cases
# make test-kernels  the tests of the Triton kernels in Triton's interpreter, which needs no GPU
# make check      all tests, lint and types
# make docs       the documentation in site/
# make notebooks  run the notebooks of the documentation again, and keep what they show
# make env        the development environment in .venv
# make test-avalanche   the tests that need avalanche-lib, in their own environment
# make test-frameworks  the tests that need Lightning, transformers, MLflow or wandb, in their own environment

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: env demo test test-slow test-kernels test-avalanche test-frameworks check lint docs notebooks clean

env: .venv/.made

# What a run needs.
.venv/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt -e .
	touch $@

# What development needs besides: tests, linters, documentation tools, Ray and the other extras.
.venv/.made: .venv/.run
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@

# Five tasks, each with the pixels in another order: what finetuning forgets, what holds it, and replay and joint for scale.
demo: .venv/.run
	rm -rf demo
	$(BIN)/engram run permuted-mnist --dataset mnist-small --tasks 5 --epochs 10 --trials 2 \
	    --methods finetune,si,dhp+si,scaled+si,replay,joint --strength 1 \
	    --set max_samples=2000 --set batch_size=20 --set learning_rate=0.1 --set baseline_head=linear --out demo
	$(BIN)/engram figures demo
	$(BIN)/engram report demo

test: export OMP_NUM_THREADS = 1
test: env
	$(BIN)/python -m pytest -n 2 -rs -m "not slow"

test-slow: export OMP_NUM_THREADS = 1
test-slow: env
	$(BIN)/python -m pytest -n 2 -rs -m slow

# Where PyTorch has come with Triton, it stays. The interpreter of 3.9 refuses masks that are combined with a number.
.venv/.kernels: .venv/.made
	$(PIP) 'triton<3.9'
	touch $@

test-kernels: export OMP_NUM_THREADS = 1
test-kernels: export TRITON_INTERPRET = 1
test-kernels: .venv/.kernels
	$(BIN)/python -m pytest -n 2 -rs tests/engine/test_kernels.py

# avalanche-lib has many requirements, so it gets its own environment. torchvision would bring another PyTorch.
.venv-avalanche/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-avalanche
	.venv-avalanche/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0
	.venv-avalanche/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[avalanche]' pytest hypothesis
	touch $@

test-avalanche: export OMP_NUM_THREADS = 1
test-avalanche: .venv-avalanche/.made
	.venv-avalanche/bin/python -m pytest -rs tests/integrations/test_avalanche.py

# So do Lightning, transformers, MLflow and wandb.
.venv-frameworks/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[lightning,huggingface,mlflow,wandb]' pytest hypothesis
	touch $@

test-frameworks: export OMP_NUM_THREADS = 1
test-frameworks: .venv-frameworks/.made
	.venv-frameworks/bin/python -m pytest -rs tests/integrations/test_lightning.py tests/integrations/test_huggingface.py tests/runs/test_servers.py

check: test test-slow test-kernels lint

lint: env
	$(BIN)/ruff check src tests tools examples benchmarks
	$(BIN)/ruff format --check src tests tools examples benchmarks
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING = 1
docs: env
	$(BIN)/mkdocs build --strict

notebooks: env
	$(BIN)/python tools/notebooks.py docs/notebooks/*.ipynb

clean:
	rm -rf .venv .venv-avalanche .venv-frameworks demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
