# `make demo` and `make test` are all the set-up there is: the first of them fills .venv.

VENV := .venv
PY := $(VENV)/bin/python
# The first of these that is Python 3.11 or newer; name another with PYTHON=...
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
# hyperscan and psycopg have wheels for these only; the product works without them.
COMMA := ,
EXTRAS := $(if $(filter x86_64 aarch64,$(shell uname -m)),[fast$(COMMA)postgres])
INSTALLED := $(VENV)/.installed
# Other monitors, to be measured beside the agent.
PEERS := .cache/peers

# Most tests wait for real processes: there are more at once than cores.
WORKERS ?= $(shell echo $$(($$(nproc) * 2)))

.PHONY: help demo test lint types tests bench soak chaos vm accuracy docs clean

help:
	@echo "make demo       diagnose the embedded recording, then this host if it has GPUs"
	@echo "make test       lint, types and tests"
	@echo "make bench      how fast commands start, logs are read, the store works; the agent beside others"
	@echo "make chaos      break everything around the agent for as long as it takes: 15 minutes"
	@echo "make vm         kill engines for memory on a kernel of their own, in a virtual machine"
	@echo "make soak       replay a day of eight GPUs: does the agent grow?"
	@echo "make accuracy   how near the memory model comes to real starts"
	@echo "make docs       write the generated parts of the docs and the READMEs anew"
	@echo "make clean      remove what make made"

demo: $(INSTALLED)
	$(VENV)/bin/oomwatch demo

test: lint types tests

tests: $(INSTALLED)
	$(PY) -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check

types: $(INSTALLED)
	$(PY) -m mypy

bench: $(INSTALLED)
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/log_scan.py
	$(PY) benchmarks/store.py
	-@test -e $(PEERS)/.installed || $(MAKE) --no-print-directory $(PEERS)/.installed
	$(PY) benchmarks/agent.py --peers-path $(PEERS)/bin
	$(PY) benchmarks/export.py
	$(PY) benchmarks/alerts.py

soak: $(INSTALLED)
	$(PY) benchmarks/soak.py

chaos: $(INSTALLED)
	OOMWATCH_CHAOS=long $(PY) -m pytest tests/agent

# 77: it cannot run here, and the last line has said why.
vm: $(INSTALLED)
	tests/vm/run.sh .cache/vm $(PY) || [ $$? = 77 ]

accuracy: $(INSTALLED)
	$(PY) benchmarks/accuracy.py

docs: $(INSTALLED)
	$(PY) docs/generate.py
	$(PY) deploy/generate.py

clean:
	rm -rf $(VENV) .cache dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The stamp is newer than both files only after a whole installation: a repeat asks no registry.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(PY) || test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt pip hatchling editables
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.$(EXTRAS)' --group dev
	touch $@

# An environment of their own; without a registry the benchmark leaves them out, and says so.
$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet nvitop-exporter==1.7.2 gpustat==1.1.1 vllm-doctor==0.6.0
	touch $@
