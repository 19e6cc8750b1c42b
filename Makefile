# make demo: the main job on the link rig, in a virtual environment of its own.
# make test: linters, type checker, tests. make test-long: those that take minutes. CI runs both.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
OLD_TRITON := build/triton-3.6.0
WORKERS := -n 3 --dist worksteal  # of two cores: the link rig's tests wait more than they compute

.PHONY: demo test test-long bench bench-quick clean

demo: $(READY)
	$(BIN)/python -m benchmarks.demo

# All benchmarks and benchmarks/RESULTS.md: on a quiet machine, in under 40 minutes. Interrupted, it goes on where it was.
bench: $(READY)
	$(BIN)/python -m benchmarks.bench

bench-quick: $(READY)
	$(BIN)/python -m benchmarks.bench --quick

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(WORKERS)

# Soaks, killed ranks, training under Lightning, Accelerate, Trainer and torch.compile; the kernels with an older Triton.
test-long: $(VENV)/frameworks $(OLD_TRITON)/triton
	$(BIN)/python -m pytest $(WORKERS) -m long
	PYTHONPATH=$(OLD_TRITON) $(BIN)/python -m pytest $(WORKERS) tests/kernels

# The versions in constraints.txt are those tested. To keep a torch of your own: make CONSTRAINTS=/dev/null
CONSTRAINTS ?= constraints.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[bench,dev]'
	touch $@

$(VENV)/frameworks: $(READY)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[frameworks]'
	touch $@

# The kernels are tested with the newest Triton, and with the one of PyTorch 2.11; whose interpreter needs a NumPy of its
# time: 2.4 no longer makes a number of an array of one element.
$(OLD_TRITON)/triton: $(READY)
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(OLD_TRITON) triton==3.6.0 numpy==2.3.5
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
