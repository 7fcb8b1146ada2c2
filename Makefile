# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON_IN_VENV := .venv/bin/python
# Passed on: make demo ARGS="--quick", make test ARGS="-k pins"
ARGS ?=

.PHONY: help setup demo test test-all check prometheus dashboard clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/'

setup:  ## .venv with CPU vLLM and this package (done once, checked in no time)
	@scripts/setup

demo: setup  ## agents on a real vLLM, without and with the connector: one table
	@$(PYTHON_IN_VENV) -m bench.chat.demo $(ARGS)

test: setup  ## every test of the installed vLLM, in minutes
	@scripts/test $(ARGS)

test-all: test  ## and other vLLMs, sanitizers, servers with flags of their own
	@scripts/test --full $(ARGS)

check: setup  ## format, lint, types, unit tests: what to run before a commit
	@scripts/check

prometheus:  ## unpack Debian's Prometheus below .cache, for the tests that need one
	@scripts/prometheus

dashboard: setup prometheus  ## agents on a real vLLM, watched: docs/images/dashboard.png
	@$(PYTHON_IN_VENV) -m pip install --quiet matplotlib
	@$(PYTHON_IN_VENV) -m deploy.grafana.watch $(ARGS)

clean:  ## remove the environment, builds and caches
	rm -rf .venv build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
