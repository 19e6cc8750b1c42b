# make demo: the main job on the link rig, in a virtual environment of its own.    make test: everything that CI runs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

# The versions in constraints.txt are those tested. To keep a torch of your own: make CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[bench,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
