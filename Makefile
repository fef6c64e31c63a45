# `make demo` and `make test` do all their own set-up (Python 3.11, a C compiler and a package index needed).
# PY=/path/to/python uses an environment that you made yourself, without any set-up.

VENV ?= .venv

ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
SETUP := setup
endif

.DEFAULT_GOAL := help
ARGS ?=
# One more than there are cores, because tests wait; at most 4, because an engine needs 2 GiB.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
PYTEST = '$(PY)' -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Of targets that need no environment of their own.
HERE = not shared_fs and not sglang and not pd and not lmcache
DIR ?= .cache
OUT ?= .cache/gpu

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' $(MAKEFILE_LIST))

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv: a vLLM engine for CPUs, fskv, test tools (the others call it)
	@VENV='$(VENV)' bash .ci/setup

demo: $(SETUP) ## A served model answers from files after a restart; two engines survive damaged files (4 minutes)
	@'$(PY)' -m demo.run $(ARGS)

demo-all: $(SETUP) ## The same with six models (9 minutes)
	@'$(PY)' -m demo.run --all $(ARGS)

bench: $(SETUP) ## Store and load speed on the storage of DIR, and the options that suit it (default: .cache)
	@mkdir -p .cache
	@'$(PY)' -m fskv_tools bench $(ARGS) '$(DIR)'

bench-replay: $(SETUP) ## Hits of a trace on a real root beside the simulated ones: ARGS='TRACE --speed 5' (minutes)
	@mkdir -p .cache
	@'$(PY)' -m benchmarks.replay $(ARGS) --dir '$(DIR)'

bench-interpreter: $(SETUP) ## What a Python loop keeps of its rate beside 1,000 chunks a second
	@'$(PY)' -m benchmarks.interpreter $(ARGS)

bench-flood: $(SETUP) ## Memory, files and threads while 20,000 jobs flood a worker
	@'$(PY)' -m benchmarks.flood $(ARGS)

bench-scale: $(SETUP) ## Start, count and prune with up to a million files on the storage of DIR (many minutes)
	@mkdir -p .cache
	@'$(PY)' -m benchmarks.scale $(ARGS) --dir '$(DIR)'

bench-side-by-side: $(SETUP) ## vLLM's file tier, FskvConnector and FskvTier on real weights: ARGS='--model DIR' (30 minutes)
	@mkdir -p .cache
	@'$(PY)' -m benchmarks.side_by_side --direct-io auto $(ARGS) --dir '$(DIR)'

bench-harness: ## LMCache's own benchmark asks engines of each way, fskv's too (3 GB once; 10 minutes a round)
	@bash .ci/lmcache --only tests/lmcache_engines/harness.py $(ARGS)

bench-shared-root: $(SETUP) ## Two real vLLM engines, one root, a bound of a tenth of what they write (12 minutes)
	@'$(PY)' -m trials.soak --calm --minutes 10 $(ARGS)

# No set-up: its environment would have vLLM and torch for CPUs.
gpu: ## Copies, order, rates and GDS on a machine with a GPU (PY=python3 with torch for CUDA; PART=a, b or c ends in 560 s; OUT=)
	@'$(if $(SETUP),python3,$(PY))' -m benchmarks.gpu $(PART) --dir '$(DIR)' --out '$(OUT)' $(ARGS)

corruptions: $(SETUP) ## Does `fskv verify` find each of 10,000 random corruptions? (minutes)
	@'$(PY)' -m trials.corruptions $(ARGS)

storm: $(SETUP) ## Kill writers and damage files while others read: is anything wrong ever served? (minutes)
	@'$(PY)' -m trials.storm $(ARGS)

soak: $(SETUP) ## Two engines on CephFS and a fault each minute, for an hour: right tokens, no leak? (root; ARGS='--minutes 30')
	@'$(PY)' -m trials.soak $(ARGS)

fuzz: $(SETUP) ## Anything in any file under running maintenance processes: do stores go on? (minutes)
	@'$(PY)' -m trials.fuzz $(ARGS)

mutants: $(SETUP) ## Take each safety check away: does a test notice? ARGS may name faults (half an hour)
	@'$(PY)' -m trials.mutants $(ARGS)

test: $(SETUP) ## Each promise, on real engines where one matters (7 minutes on 2 quiet cores)
	$(PYTEST) -m 'not slow and $(HERE)' --durations=10 $(ARGS)

test-unit: $(SETUP) ## What of test starts no engine
	$(PYTEST) -m 'not slow and $(HERE)' --ignore tests/engines --durations=10 $(ARGS)

test-engines: $(SETUP) ## What of test starts real engines: the other part
	$(PYTEST) -m 'not slow and $(HERE)' --durations=10 $(ARGS) tests/engines

test-near: $(SETUP) ## The tests that name the module FILE=fskv/data_path/runner.py, in a minute or a few
	$(PYTEST) -m 'not slow and $(HERE)' $(ARGS) \
	    $$(git grep -lw '$(basename $(notdir $(FILE)))' -- tests/unit/test_* tests/adapter/test_* tests/tools/test_*)

test-slow: $(SETUP) ## More models, ranks, settings, longer walks and storms (an hour); ARGS may name files
	$(PYTEST) -m 'slow and $(HERE)' --durations=10 $(ARGS)

test-all: test test-slow test-shared-fs ## make test, test-slow and test-shared-fs

test-shared-fs: $(SETUP) ## Real NFS, GlusterFS, CephFS and MooseFS, nodes that die (root, Debian; 35 minutes)
	@bash tests/shared_fs/install
	'$(PY)' -m pytest -m shared_fs tests/shared_fs $(ARGS)

test-newest: $(SETUP) ## The contracts of the newest vLLM, SGLang and LMCache that the index offers (2 GB once; 4 minutes)
	@PY='$(PY)' bash .ci/versions --newest $(ARGS) || [ $$? = 77 ]

test-versions: $(SETUP) ## Other vLLM versions: contract, refusal, engines beside the installed one (3 GB, long)
	@PY='$(PY)' bash .ci/versions $(ARGS)

test-sglang: $(SETUP) ## Real SGLang engines, in an environment of their own (2 GB once; 10 to 20 minutes)
	@bash .ci/sglang $(ARGS)

test-pd: $(SETUP) ## Prefill and decode in two real engines with NIXL between them (240 MB once; 5 minutes)
	@PY='$(PY)' bash .ci/pd $(ARGS)

test-lmcache: $(SETUP) ## A real LMCache server and vLLM, in an environment of their own (3 GB once; 15 minutes)
	@bash .ci/lmcache $(ARGS)

test-router: $(SETUP) ## Two real engines whose KV events go to ai-dynamo's indexer (75 MB once; 3 minutes)
	@PY='$(PY)' bash .ci/router $(ARGS)

reference: $(SETUP) ## Write docs/options.md, docs/metrics.md and docs/cli.md out of the code
	'$(PY)' docs/reference.py

lint: $(SETUP) ## ruff and mypy
	'$(PY)' -m ruff check .
	'$(PY)' -m ruff format --check .
	'$(PY)' -m mypy

wheel: ## sdist and manylinux wheel of the last commit in dist/, each tried in clean environments (needs no .venv)
	@"$${PYTHON:-python3.11}" .ci/wheel

clean: ## Remove caches, checkpoints and results; keeps the environment
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## Remove the environment as well
	rm -rf '$(VENV)'
