# make env     the environment in .venv        make test    its tests
# make demo    Split MNIST, all methods        make check   tests, lint and types
# make docs    the documentation in site/

PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo test check lint docs clean

env: .venv/.made

.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# mnist-small has a sixth of the digits: batches of 10 in place of 64 keep the paper's number of steps an epoch.
demo: env
	rm -rf demo
	$(BIN)/engram run split-mnist --dataset mnist-small --trials 3 --epochs 5 --set batch_size=10 --out demo
	$(BIN)/engram figures demo
	$(BIN)/engram report demo

test: export OMP_NUM_THREADS = 1
test: env
	$(BIN)/python -m pytest -n 2 -rs

check: test lint

lint: env
	$(BIN)/ruff check src tests tools examples
	$(BIN)/ruff format --check src tests tools examples
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING = 1
docs: env
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
