# make demo | test | lint | docs | benchmark | test-cluster: each first makes the environment when it is missing or the lock has changed.
#
#   PYTHON=python3.12   the interpreter to use (3.11 or newer; else the first that is found)
#   CPU_TORCH=1         leave out the GPU libraries, for indexes that offer PyTorch's CPU build (see docs/faq.md)
#
# pip's own settings (PIP_INDEX_URL, pip.conf, ...) are honoured; nothing here names an index.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help environment demo test test-drills lint links docs benchmark images cluster-up cluster-down test-cluster test-cluster-full clean

CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS := $(shell expr $(CORES) + 1) # some tests wait; with two more, judges that find the machine busy measure again
BIN := .venv/bin
# A distribution's Python first: it is built with optimizations, and pyenv's is not, which makes the tests a third slower.
PYTHON ?= $(shell for p in /usr/bin/python3.12 /usr/bin/python3.11 python3.12 python3.11 python3.13 python3; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
GPU_LINES := ^(nvidia-|cuda-|triton)
WANTED := $(if $(CPU_TORCH),grep -Ev '$(GPU_LINES)' requirements.lock,cat requirements.lock)
CURRENT := $(WANTED) | cmp -s - .venv/installed.lock && cmp -s pyproject.toml .venv/installed.toml

help:
	@echo "make demo       train a small model through every stage on this machine, and write a report"
	@echo "make test       run the tests"
	@echo "make test-drills  run the drills: whole runs, stages on Ray, a storm of requests, faults of the sandbox"
	@echo "make lint       ruff, mypy and import-linter, and a search for dead links between the pages"
	@echo "make docs       build the documentation site with Sphinx: build/docs/index.html"
	@echo "make benchmark  measure engine and trainer"
	@echo "make images     build the container images with buildah (REGISTRY=..., PUSH=1; see images/build.sh)"
	@echo "make cluster-up, cluster-down  a real one-node Kubernetes with Argo Workflows on this machine (docs/cluster-development.md)"
	@echo "make test-cluster  run the tests that need it; test-cluster-full: the long drills and a browser too"

environment:
	@if $(CURRENT); then exit 0; fi; \
	test -n "$(PYTHON)" || { echo "Needs Python 3.11 or newer: install it, or name it with PYTHON=..." >&2; exit 1; }; \
	echo "Making .venv with $$($(PYTHON) --version): $$($(WANTED) | grep -c ==) packages, about \
	$(if $(CPU_TORCH),0.5 GB to download and 2 GB,3 GB to download and 6 GB) on disk." ; \
	echo "That takes 2 to 10 minutes on a fast line.$(if $(CPU_TORCH),, Without a GPU, see CPU_TORCH in docs/faq.md.)"; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
		{ echo "Could not make .venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; \
	$(WANTED) > .venv/wanted.lock; \
	$(BIN)/python -m pip install --quiet --no-deps --disable-pip-version-check -r .venv/wanted.lock; \
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e .; \
	cp pyproject.toml .venv/installed.toml; mv .venv/wanted.lock .venv/installed.lock

demo:
	@if $(CURRENT); then echo "The environment is there; nothing to download."; fi
	@echo "The demo runs for about 12 minutes on 2 cores, with at most 8 GiB of memory, and without the network."
	@command -v g++ >/dev/null || { echo "Needs a C++ compiler; on Debian and Ubuntu: apt-get install g++" >&2; exit 1; }
	@$(MAKE) --no-print-directory environment
	@$(BIN)/python -c 'import os, sys, sysconfig; \
		sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
		echo "Needs Python's headers (torch.compile does); on Debian and Ubuntu: apt-get install python3-dev" >&2; exit 1; }
	@$(BIN)/cuda-agent run experiment=demo

test: environment
	@$(BIN)/python -m compileall -q cuda_agent # for hundreds of short processes, most of which may not write it
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder # see tests/conftest.py

DRILLS := tests/exploits/test_exploits.py tests/pipeline/test_smoke.py tests/pipeline/test_trace.py tests/rl/ray/test_ray.py tests/sandbox/test_faults.py \
	tests/sandbox/service/test_load.py tests/sandbox/test_remote.py tests/sandbox/judge/test_verdicts.py \
	tests/sandbox/formats/test_first_pass.py tests/sandbox/formats/test_stand_ins.py tests/stages/test_agentic.py \
	tests/optimize/test_benchmark.py tests/optimize/test_evaluate_set.py tests/optimize/test_quirks.py tests/optimize/whole/test_run.py tests/cluster/test_pod.py \
	tests/test_packaging.py \
	tests/test_examples.py tests/test_benchmarks.py tests/test_python_api.py tests/optimize/test_export.py tests/stages/test_stages.py \
	tests/sandbox/service/test_service.py \
	tests/exploits/test_honest.py tests/exploits/test_walls.py tests/exploits/test_selftest.py tests/sandbox/test_hostile.py \
	tests/sandbox/jail/test_warm_parent.py tests/sandbox/judge/test_legality.py tests/optimize/test_injection.py \
	tests/pipeline/test_closure.py tests/pipeline/test_executor.py tests/cluster/test_results.py \
	tests/sandbox/judge/timing/test_roofline.py tests/deploy/test_chart.py tests/deploy/test_argo.py \
	tests/synthesis/teacher/test_cuda_kernels.py tests/training/test_trainer.py tests/training/test_ranks.py \
	tests/training/test_memory.py::test_adapters_take_what_was_worked_out \
	tests/exploits/test_cuda_sources.py::test_a_plan_compiles_and_its_arguments_fit \
	tests/sandbox/test_drill.py::test_a_faulty_work_folder_builds \
	tests/sandbox/test_drill.py::test_a_small_drill_loses_nothing_and_leaves_nothing \
	tests/diagnostics/test_sandbox_bench.py::test_every_format_is_measured_on_solutions_that_are_right

test-drills: environment
	$(BIN)/python -m pytest -m "nightly and not gpu" -n $(WORKERS) --dist loadfile $(DRILLS)

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory links

links: # between pages, to headings, pictures and other files; a new environment, because Sphinx warns of a page once
	$(BIN)/sphinx-build --quiet --fail-on-warning --fresh-env --builder dummy --conf-dir docs . build/links

docs: environment
	$(BIN)/sphinx-build --quiet --fail-on-warning --conf-dir docs . build/docs
	@cp build/docs/README.html build/docs/index.html
	@echo "build/docs/index.html"

benchmark: environment
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python $$script; done

images: environment
	@images/build.sh

cluster-up:
	@tests/real_cluster/up.sh

cluster-down:
	@tests/real_cluster/down.sh

test-cluster: environment # first what needs an API server alone
	$(BIN)/python -m pytest -m "cluster and not nightly" -n $(WORKERS) --dist loadfile tests/cluster tests/pipeline tests/deploy
	$(BIN)/python -m pytest -m "cluster and not nightly" -s --durations=8 tests/real_cluster

test-cluster-full: environment
	$(BIN)/python -m pytest -m cluster -n $(WORKERS) --dist loadfile tests/cluster tests/pipeline tests/deploy
	$(BIN)/python -m pytest -m cluster --durations=0 -s tests/real_cluster

clean:
	rm -rf .venv
