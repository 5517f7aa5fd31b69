# make demo and make test work on a fresh clone; both first make .venv, with what each of them needs.
PYTHON ?= python3
BIN := .venv/bin
# Two ranks share the machine's cores: threads of their own would only get in each other's way.
export OMP_NUM_THREADS ?= 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# pytest rewrites each file's assertions; where it may keep them, the next run starts sooner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install setup demo test test-oldest test-newest test-gpu test-ray test-lm-eval test-serve quick pytest pytest-whole subjects lint bench promises mutants late \
	faults endurance test-loaded dist release-check gallery docs clean

# What a user needs, and what tests, types and style take besides.
install: .venv/installed
setup: .venv/tested

.venv/installed: pyproject.toml constraints.txt
	$(call install,.[all])
	@touch $@

.venv/tested: pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch .venv/installed $@

# Reading the tests compiles them and what they import, a third of what is installed: once, where each process of a run
# would do it for itself.
.venv/compiled: .venv/tested
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true
	@touch $@

define install
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Penstock needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '$(1)'
endef

demo: install
	$(BIN)/python tools/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/pyright

test: setup
	$(BIN)/ruff check .
	$(MAKE) pytest

# In the order of folders the tests of many processes come first and the short ones fill up the end. Four at a time,
# for two cores: those of many processes spend half of their time waiting for each other.
pytest: .venv/compiled
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
	@$(BIN)/python tools/promises.py --check

# The same with every case of a product, of which the tests otherwise take as many as show each pair once.
pytest-whole: .venv/compiled
	PENSTOCK_EVERY_CASE=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

# With the lowest releases that pyproject.toml allows, or the newest, in an environment of their own (5 GB: torch comes
# with CUDA there). ARGS="tests/unit tests/e2e/test_rehearse.py" chooses.
test-oldest test-newest: test-%: .venv-%/installed
	.venv-$*/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

.venv-oldest/installed .venv-newest/installed: .venv-%/installed: pyproject.toml tools/bounds.py
	$(PYTHON) -m venv --clear .venv-$*
	$(PYTHON) tools/bounds.py $* > .venv-$*/requirements.txt
	.venv-$*/bin/python -m pip install --quiet --no-compile --requirement .venv-$*/requirements.txt --editable .
	@touch $@

# Those of the site, the browser and clusters, which else run only when what they are about has changed; those that pass
# are noted in tests/subjects.json, which belongs into the commit.
subjects: .venv/compiled
	PENSTOCK_EVERY_CASE=1 $(BIN)/python -m pytest -n 3 --dist loadfile -m subject

# All that a GPU can tell in six minutes, with a report to send (gpu-report.md); ARGS="--only equal,train" chooses.
test-gpu: setup
	@$(BIN)/python tools/gpu_first.py build/gpu --report gpu-report.md $(ARGS)

# The example for Ray, on a local Ray, which it installs: 70 MB that nothing else here needs.
test-ray: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt ray
	$(BIN)/python -m pytest tests/e2e/test_ray.py

# The harness's own client scores by a server; it takes a hundred megabytes of libraries.
test-lm-eval: setup
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "lm_eval[api]>=0.4.13,<0.5"
	$(BIN)/python -m pytest tests/e2e/test_serve.py -k lm_eval

# A part of every room's tests, for the minutes between two thoughts.
QUICK := tests/test_imports.py tests/test_structure.py \
	tests/schedule/test_lower.py tests/schedule/test_verify.py tests/schedule/test_simulate.py \
	tests/schedule/test_generation.py tests/unit/io tests/unit/settings tests/unit/data/test_packed.py \
	tests/unit/draw/test_perfetto.py tests/unit/planner/test_model.py tests/unit/parallel tests/unit/model/test_parts.py \
	tests/unit/model/test_decoder.py tests/unit/runtime/test_executor.py tests/unit/engine/test_trainer.py \
	tests/unit/engine/test_checkpoint.py tests/benchmarks tests/unit/cli tests/unit/serve tests/dist/test_transport.py \
	tests/e2e/test_cli_schedule.py tests/e2e/test_schedule_files.py

quick: .venv/compiled
	$(BIN)/python -m pytest -q -n 4 --dist loadfile $(QUICK)

# All that need no slow link, no server and no GPU, with their defaults. python -m benchmarks lists all.
BENCHMARKS := schedules train overhead failures split scale balance generate

bench: install
	set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

# Which of docs/promises.md's statements the last run of the tests has shown.
promises: setup
	$(BIN)/python tools/promises.py

# Plants small faults and prints those that no test notices; ARGS="--rooms runtime --minutes 5 --seed 1" chooses.
mutants: setup
	$(BIN)/python tools/mutants.py $(ARGS)

# Everything that ranks do together, as late as it may be; ARGS="--seeds 20 --first 100" chooses.
late: setup
	$(BIN)/python tools/late.py $(ARGS)

# Two minutes of many clients that come and go at a server; ARGS=600 for ten.
test-serve: setup
	SERVE_LOAD_SECONDS=$(or $(ARGS),120) PENSTOCK_EVERY_CASE=1 $(BIN)/python -m pytest -s tests/e2e/test_serve_load.py

# Kills, cuts, fills and damages small runs at random; ARGS="--minutes 30 --seed 1" chooses.
faults: setup
	$(BIN)/python tools/faults.py $(ARGS)

# Trains and generates for an hour and more, and sees whether anything grew; ARGS="--steps 2000 --minutes 60" chooses.
endurance: setup
	$(BIN)/python tools/endurance.py $(ARGS)

# The tests beside busy loops, with random delays in each thread of ours; ARGS="--loops 4 --seed 1 tests/dist" chooses.
test-loaded: .venv/compiled
	$(BIN)/python tools/loaded.py $(ARGS)

# The documentation site, into build/site. Its playground needs a server: python -m http.server -d build/site
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	$(BIN)/python tools/playground.py build/site

# The page of all schedules with its pictures, and the README's.
gallery: install
	$(BIN)/python tools/gallery.py

# Wheel and sdist, into dist/.
dist: setup
	$(BIN)/python tools/release.py

# Both, installed into empty environments; ARGS="python3.12 python3.13" names the interpreters.
release-check: dist subjects
	$(BIN)/python tools/release_check.py $(ARGS)

clean:
	rm -rf dist runs .pytest_cache .ruff_cache .hypothesis
