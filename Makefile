# `make demo` and `make test` are all the set-up there is.
VENV := .venv
PY := $(VENV)/bin/python
