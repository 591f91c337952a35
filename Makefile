# Everything a user or a CI needs. `make` prints what there is; ARGS="..." is handed on to the command of a target.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-verl check bench example-verl clean

ARGS ?=
QUESTION ?= pull

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything; does nothing when it is up to date
	@scripts/setup

demo: setup ## move real weights from a trainer into rollouts and compare every bit; ARGS="--replicas 2 --json"
	@.venv/bin/tensorhub demo $(ARGS)

test: setup ## run the tests; ARGS="tests/unit -k digest"
	@scripts/test $(ARGS)

test-verl: ## run the tests against verl on CPU, in .venv-verl; ARGS="-k replica"
	@[ -n "$$TENSORHUB_VERL_PYTHON" ] || scripts/setup-verl
	@scripts/test-verl $(ARGS)

check: setup ## format, lint, types, layers
	@scripts/check

bench: setup ## measure against raw peers; QUESTION=publish ARGS="--json F"
	@.venv/bin/python -m bench $(QUESTION) $(ARGS)

example-verl: ## train with verl on CPU, weights moved by TensorHub (makes .venv-verl); ARGS="--steps 10 --json F"
	@scripts/setup-verl
	@.venv-verl/bin/python examples/verl_cpu/run.py $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf .venv .venv-verl .venv-gpu .gpu-packages build *.egg-info .mypy_cache .ruff_cache .import_linter_cache .hypothesis .pytest_cache
	rm -f tensorhub/native/*.so
	find bench examples tensorhub tests -name __pycache__ -type d -prune -exec rm -rf {} +
