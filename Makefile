# make install | demo | drill | test | test-fast | test-nightly | budgets | same-bits | lint | generate | requirements | bench-...
# Needs Python 3.11, 3.12 or 3.13 and the package registry that pip is configured for; everything goes into .venv.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash

# Some machines turn Python's cache of compiled modules off. Every process would then compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE

ifndef PYTHON
PYTHON := $(shell for v in 3.11 3.12 3.13; do python$$v -c "import ensurepip" 2>/dev/null && echo python$$v && break; done)
endif
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.9
STAMP := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
PYTEST_ARGS ?=
# Tests run in so many processes. Two of them mostly wait for clusters, and the others keep two cores busy.
TEST_WORKERS ?= 4
# All workers must list the tests alike, those of a set too.
PYTEST = PYTHONHASHSEED=$${PYTHONHASHSEED:-$$RANDOM} OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	$(BIN)/python -m pytest -n $(TEST_WORKERS)
DRILL_ARGS ?=

.PHONY: help docs install tools demo drill test test-fast test-nightly budgets same-bits lint format generate families requirements check-locks check-vllm bench-weights bench-e2e bench-race bench-table3 bench-families bench-scale bench-pipeline bench-interstage bench-async bench-spot bench-scoring bench-coordinator bench-fleet report-performance bench-batches bench-operator bench-migration bench-papers bench-predict bench-gpu bench-gpu-wheels bench-memory-gpu test-gpu clean
.PHONY: cluster cluster-install cluster-kubeconfig cluster-bin cluster-down cluster-packages test-packages cluster-binaries images images-push release

help: ## Show the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

install: $(STAMP) $(KERNELS) ## Install into .venv, compiled; does nothing when that is current

$(BIN)/uv:
	@test -n "$(PYTHON)" || { echo "no python3.11, python3.12 or python3.13 here; or give PYTHON=/path/to/one"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/uv.txt

$(STAMP): requirements/cpu.txt pyproject.toml | $(BIN)/uv
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip sync --require-hashes requirements/cpu.txt
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --no-deps --build-constraint requirements/build.txt --editable .
	@echo "Compiling what jobs import to bytecode (about 20 seconds)"
	@OMP_NUM_THREADS=1 $(BIN)/python hack/compile_imports.py
	@touch $@

# The kernels of the schedule search. A user's first search, and several processes of a test run, would each compile
# them.
$(KERNELS): $(STAMP) $(shell grep -lE '^@(light_)?kernel' -r src/dovetail/pipelines --include=*.py)
	@echo "Compiling the kernels of the schedule search (about half a minute)"
	@$(BIN)/python hack/compile_kernels.py
	@touch $@

# What the tests of the Helm chart run. All checkouts share them, in ~/.cache/dovetail.
tools:
	@$(DEVCLUSTER) tools

demo: $(STAMP) ## SFT, reward model and PPO on a small model, in a few minutes
	$(BIN)/dovetail run examples/quickstart.yaml --overwrite

lint: install ## Ruff, mypy and stale generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python hack/generate.py --check

test: lint tools $(KERNELS) ## The whole test suite
	@$(DEVCLUSTER) build --where-supported >/dev/null
	$(PYTEST) -m "not nightly" $(PYTEST_ARGS)

test-fast: install tools $(KERNELS) ## Tests that start no vLLM servers or trainers, each within half a CPU second or so
	$(PYTEST) -m "not slow and not nightly" -o testpaths=tests/unit --hypothesis-profile=fast $(PYTEST_ARGS)

test-nightly: lint tools $(KERNELS) ## The whole test suite, and the long drills in all their variants
	@$(DEVCLUSTER) build --where-supported >/dev/null
	$(PYTEST) --hypothesis-profile=nightly $(PYTEST_ARGS)

BUDGETS = tests/budgets tests/nullgpu tests/unit/coordinator/test_training_schedule.py

budgets: install $(KERNELS) ## What a sample, a step and a job may cost: CPU over an anchor, bytes, launches; part of make test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s --durations=0 --durations-min=1 -m budget $(BUDGETS)

same-bits: $(STAMP) ## In minutes: lint, the nearest tests, and whether tiny jobs have the same bits as at BASE=...
	PYTHONPATH=hack OMP_NUM_THREADS=1 $(BIN)/python -m same_bits $(if $(BASE),--base $(BASE))

format: install ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: install ## Write the CRD, the JSON schema and the pages of the reference anew
	$(BIN)/python hack/generate.py

families: install ## Derive and prove all model types of transformers, or TYPES="...", and write the table
	OMP_NUM_THREADS=1 $(BIN)/python hack/families.py $(TYPES)

docs: install ## Build the documentation site into build/site; a broken link is an error
	$(BIN)/mkdocs build --strict --quiet
	@$(BIN)/python hack/calculator.py build/site

COMPILE = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url

# The version of every package, with hashes and without a registry's address.
requirements: $(BIN)/uv ## Compile the lists in requirements/ anew from pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
		--override requirements/overrides.txt --extra coordinator --extra operator --extra trainer --extra rollout-cpu \
		--extra schedules --extra docs --extra dev pyproject.toml -o requirements/cpu.txt
	for image in operator trainer rollout-cpu docs; do \
		$(COMPILE) --override requirements/overrides.txt --constraint requirements/cpu.txt \
			--extra $$image pyproject.toml -o requirements/$$image.txt || exit 1; done
	$(COMPILE) --override requirements/overrides-gpu.txt --constraint requirements/trainer.txt \
		--extra rollout-gpu pyproject.toml -o requirements/rollout-gpu.txt
	$(COMPILE) requirements/build.in -o requirements/build.txt
	echo uv==$(UV_VERSION) | $(COMPILE) - -o requirements/uv.txt
	$(MAKE) check-locks

LOCKS = cpu operator trainer rollout-cpu rollout-gpu docs

check-locks: $(STAMP) ## Look for files that two wheels of a lock both install (asks the registry)
	$(BIN)/python hack/check_locks.py $(LOCKS:%=requirements/%.txt)

check-vllm: $(STAMP) ## Look at both ends of the range of vLLM that the plug-ins are for (asks the registry)
	$(BIN)/python hack/check_vllm.py

DRILL_SECONDS ?= 600

drill: install ## Freeze and kill a tiny job's processes at random; it must end with the same weights
	PYTHONPATH=tests $(BIN)/python -m helpers.drill --seconds $(DRILL_SECONDS) $(DRILL_ARGS)

bench-weights: install ## Weight transfer against a raw broadcast
	$(BIN)/python benchmarks/bench_weights.py

bench-e2e: install ## Whole GRPO runs beside TRL, in CPU seconds
	$(BIN)/python benchmarks/bench_e2e.py

bench-race: install ## GRPO beside TRL: the same steps, and three small tasks
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/bench_race.py

bench-table3: install ## Fused pipeline schedules against RLHFuse's Table 3
	$(BIN)/python research/bench_table3.py

bench-families: install ## Every family of pipeline schedules
	$(BIN)/python research/bench_families.py

bench-scale: install ## Schedules of 64 ranks and 256 micro-batches: how far from the bound after so many seconds
	$(BIN)/python research/bench_scale.py

bench-pipeline: install ## The executor: schedules on real processes against their predictions
	$(BIN)/python benchmarks/bench_pipeline.py

bench-interstage: install ## Generation and inference fused, by threshold: real protocols, emulated instances
	$(BIN)/python benchmarks/bench_interstage.py

bench-spot: install ## Rollouts that come and go: goodput, tokens made twice, joiners' first token; emulated instances
	$(BIN)/python benchmarks/bench_spot.py

bench-async: install ## Iterations with and without a lag: real coordinator, emulated trainers and rollouts
	$(BIN)/python benchmarks/bench_async.py

bench-scoring: install ## Scoring several samples to a prompt, the prompt computed once
	$(BIN)/python benchmarks/bench_scoring.py

bench-papers: install ## APP, PUZZLE and RLHFuse on their own settings, simulated, beside what they published
	$(BIN)/python research/bench_papers.py

bench-coordinator: install ## The coordinator with 10,000 samples on 256 emulated servers
	$(BIN)/python benchmarks/bench_coordinator.py

bench-fleet: install ## 100,000 samples at once on 2,000 emulated servers in 16 processes, one of which is killed
	PROCESSES=16 INSTANCES=2000 SAMPLES=100000 STEP=0.1 STRIDE=32 LONG=1000 KILL=1 $(BIN)/python benchmarks/bench_coordinator.py

REPORT_ARGS ?=

report-performance: install ## All benchmarks of docs/performance.md, and the page; hours, or REPORT_ARGS="--only batches"
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/report.py $(REPORT_ARGS)

bench-batches: install ## 64 emulated trainer ranks that ask for a batch at once
	$(BIN)/python benchmarks/bench_batches.py

DEVCLUSTER := $(PYTHON) hack/devcluster

cluster: ## Bring up a Kubernetes cluster on this machine (hack/devcluster/README.md; needs root)
	@$(DEVCLUSTER) up

cluster-install: $(STAMP) cluster ## Bring it up, and install the chart on it, with images made from this checkout
	@$(DEVCLUSTER) install

cluster-kubeconfig: ## Print the path of its kubeconfig
	@$(DEVCLUSTER) kubeconfig

cluster-bin: ## Print the folder of its kubectl, helm and so on
	@$(DEVCLUSTER) bin

cluster-down: ## End it and remove all of it
	@$(DEVCLUSTER) down

cluster-packages: ## Install the Debian packages that it needs
	@$(DEVCLUSTER) packages

test-packages: ## The same, and what the tests need beside it: a browser and bubblewrap
	@$(DEVCLUSTER) packages --tests

cluster-binaries: ## Build all its programs into the cache
	@$(DEVCLUSTER) build

# The rollout image's packages: rollout-gpu.txt for GPUs.
REQUIREMENTS ?= rollout-cpu.txt

images: ## Build the three images with buildah, on a base made by debootstrap
	@$(DEVCLUSTER) images --requirements $(REQUIREMENTS)

PUSH_ARGS ?=

images-push: ## Push them to REGISTRY=..., and print chart values that name them by digest
	@test -n "$(REGISTRY)" || { echo "give REGISTRY, such as make images-push REGISTRY=registry.example.com/team"; exit 2; }
	@$(DEVCLUSTER) push $(REGISTRY) $(PUSH_ARGS)

RELEASE_ARGS ?=

release: install ## Push them and the chart, signed with KEY=cosign.key, with a list of the packages in each (SBOM)
	@test -n "$(REGISTRY)" -a -n "$(KEY)" || { echo "give REGISTRY and KEY, such as make release REGISTRY=registry.example.com/team KEY=cosign.key"; exit 2; }
	@$(DEVCLUSTER) release $(REGISTRY) --key $(KEY) --requirements $(REQUIREMENTS) $(RELEASE_ARGS)

bench-predict: install ## Iterations on this machine, predicted and measured
	$(BIN)/python benchmarks/bench_predict.py

BENCH_GPU_ARGS ?=

# Without a .venv, but with .wheels/, it runs with python3 as it is: see hack/gpu_python.sh.
bench-gpu: $(if $(wildcard .wheels),,install) ## Everything on one GPU, each figure beside an anchor; under 20 minutes
	hack/bench_gpu.sh --json bench-gpu.json $(BENCH_GPU_ARGS)

test-gpu: $(if $(wildcard .wheels),,install) ## Tests on a real GPU
	hack/gpu_python.sh -m pytest -p no:cacheprovider tests/gpu

# What bench-gpu needs beside torch, transformers, triton, numpy and safetensors; see docs/gpus.md.
CARRIED := cel-expr-python pydantic pydantic-core annotated-types typing-inspection typing-extensions datasets dill multiprocess
CARRIED_PYTHON ?= 3.12

bench-gpu-wheels: $(STAMP) ## Wheels in .wheels/ for a machine without a package registry that runs bench-gpu
	rm -rf .wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest .wheels \
		--python-version $(CARRIED_PYTHON) --implementation cp --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64 \
		$(foreach name,$(CARRIED),$$(grep -oE '^$(name)==[^ ;]+' requirements/cpu.txt))
	@du -sh .wheels

bench-memory-gpu: install ## Memory of 7B to 70B models on the null GPU, beside the planner's
	$(BIN)/python benchmarks/bench_memory_gpu.py

bench-migration: install ## Moving one sample: its tokens or its keys and values
	$(BIN)/python benchmarks/bench_migration.py

bench-operator: install ## The operator with 1,000 jobs on nodes that kwok plays, beside JobSet alone (root)
	$(BIN)/python benchmarks/bench_operator.py

clean: ## Remove caches and build outputs (not .venv, not runs/)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist $(KERNELS)
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
