# `make demo` and `make test` do all their own set-up: a virtual environment in .venv, re-used when it is there.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.14.1 torchvision==0.29.1
# One thread per process: two OpenMP threads on a tiny model spin more than they compute.
export OMP_NUM_THREADS ?= 1
export GOMP_SPINCOUNT ?= 0
export TOKENIZERS_PARALLELISM ?= false

READY := $(VENV)/.ready

.PHONY: demo test check clean

demo: $(READY)
	$(VENV)/bin/python examples/minimax_h3/demo.py

test: check
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadgroup

check: $(READY)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

$(READY): pyproject.toml setup.py $(wildcard probe/*/*.c)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q $(TORCH)
	$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -q -e '.[dev]'
	touch $@

clean:
	rm -rf captures/demo examples/minimax_h3/data
