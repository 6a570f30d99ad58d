# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv first.
VENV   := .venv
BIN    := $(VENV)/bin
PYTHON ?= python3
# uv does not read pip's own setting for a folder of wheels: hand it over.
LINKS  := $(foreach link,$(PIP_FIND_LINKS),--find-links $(link))
# Some machines forbid Python to keep what it compiles: each test process would compile diffusers and torch anew.
export PYTHONDONTWRITEBYTECODE :=
# One torch thread per test process: two processes on two cores do not fight over them.
PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n auto

.PHONY: install demo test test-all lint figures clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt $(LINKS) --editable '.[dev]'
	touch $@

demo: install
	$(BIN)/scalelong compare --out runs/demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m ''

figures: install
	$(BIN)/python docs/make_figures.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
