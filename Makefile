# make demo and make test work on a fresh clone; both first make .venv through setup.
PYTHON ?= python3
BIN := .venv/bin
# Two ranks share the machine's cores: threads of their own would only get in each other's way.
export OMP_NUM_THREADS ?= 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: setup demo test pytest lint bench promises mutants clean

setup: .venv/stamp

# Packages are compiled here, on all cores: where Python may write no bytecode, each of a run's processes would do it.
# A few modules are written for newer versions of Python, and can not be.
.venv/stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Penstock needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -q -q -j 0 .venv/lib || true
	@touch $@

demo: setup
	$(BIN)/python tools/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/pyright

# Checking types keeps one core busy and waits for no other; beside the tests it fills what they leave idle.
test: setup
	$(MAKE) --jobs 2 lint pytest

# In the order of folders the tests of many processes come first and the short ones fill up the end. Four at a time,
# for two cores: those of many processes spend half of their time waiting for each other.
pytest: setup
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

bench: setup
	$(BIN)/penstock bench all

promises: setup
	$(BIN)/python tools/promises.py

# Plants small faults and prints those that no test notices; ARGS="--rooms runtime --minutes 5 --seed 1" chooses.
mutants: setup
	$(BIN)/python tools/mutants.py $(ARGS)

clean:
	rm -rf runs .pytest_cache .ruff_cache .hypothesis
