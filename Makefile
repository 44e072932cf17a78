# Everything a clone needs: `make serve` to run it, `make test` to prove it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SERVING := $(VENV)/.serving
CORES  := $(shell nproc 2>/dev/null || echo 2)
# Of the processes that run tests, two wait for a server or a browser at any time. A file's tests run in one of them, so
# that what they share is started once; in the order of their names the last files are short, and nobody waits for them.
JOBS   ?= $(shell expr $(CORES) + 2)

.DEFAULT_GOAL := help
.PHONY: help setup serve test hunt browser redis check sizes format bench gpu conformance mlflow fleet s3 ray engines wheel compiled site tutorials release docs proto clean

help: ## show this help
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv with everything the project needs

# Serving needs less than testing, so a newcomer's first command waits for less.
$(SERVING): pyproject.toml constraints.txt
	$(call install,.,380 MB)
	@touch $(SERVING)

$(STAMP): pyproject.toml constraints.txt
	$(call install,.[dev],3 GB)
	@touch $(SERVING) $(STAMP)

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "carpool needs Python 3.11 or newer: try  make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@echo "once: a virtual environment in $(VENV) of $(2), which takes a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '$(1)'
endef

serve: $(SERVING) ## serve the demo models
	$(BIN)/carpool serve

test: setup browser redis ## run the tests, but for the long ones of make conformance
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

hunt: setup browser redis ## look for tests that fail now and then, for an hour (ARGS=--help)
	@$(BIN)/python tools/hunt.py $(ARGS)

# The console is tested in a real Chromium. Without one its tests fail, unless CARPOOL_NO_BROWSER=1 says to go without.
browser:
	@[ "$$CARPOOL_NO_BROWSER" = 1 ] || [ -n "$$CARPOOL_CHROMIUM" ] \
	  || command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && echo "no Chromium: installing the system's package chromium with apt-get, for the console's tests" \
	       && echo "(CARPOOL_NO_BROWSER=1 goes without; CARPOOL_CHROMIUM=PATH names another browser)" \
	       && { apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 \
	            || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; }; }; } \
	  || echo "no Chromium: install one, or set CARPOOL_NO_BROWSER=1 to leave the console's page untested"

# What front ends share is tested with a real Redis server. Without one those tests fail, unless CARPOOL_NO_REDIS=1 says to
# go without. The package would start a server of its own: RUNLEVEL=1 keeps it from that.
redis:
	@[ "$$CARPOOL_NO_REDIS" = 1 ] || command -v redis-server >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	       && echo "no Redis: installing the system's package redis-server with apt-get, for the shared cache's tests" \
	       && echo "(CARPOOL_NO_REDIS=1 goes without)" && export RUNLEVEL=1 \
	       && { apt-get install -qq -y --no-install-recommends redis-server >/dev/null 2>&1 \
	            || { apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server >/dev/null; }; }; } \
	  || echo "no Redis: install redis-server, or set CARPOOL_NO_REDIS=1 to leave the shared cache untested"

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

sizes: setup ## list the files and functions that are long
	@$(BIN)/python tools/report_sizes.py

format: setup ## rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup ## the quick form of every benchmark
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

# Everything that needs a CUDA device, within ten minutes: the tests that are skipped without one, and the benchmark.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= build/gpu
gpu: ## the tests that need a CUDA device, and benchmarks/gpu.py (GPU_PYTHON=python3: with what that has installed)
	[ $(GPU_PYTHON) != $(BIN)/python ] || $(MAKE) setup
	$(GPU_PYTHON) -m pytest -q -m gpu $$(grep -rl 'mark\.gpu' tests)
	$(GPU_PYTHON) benchmarks/gpu.py --out $(GPU_OUT) --networks resnet50,vit_b_16 --seconds 2 --clients 512 \
	  --street-clients 384 --sections jpeg,tensor,light,start,promise,pipeline,onnx

conformance: setup ## Triton's own clients, perf_analyzer and the long tests (ARGS=--help)
	@PYTHONPATH=tests $(BIN)/python -m conformance.run $(ARGS)

tutorials: setup ## follow the quickstart and every tutorial to its end, as make conformance does
	$(BIN)/python -m pytest -q -m conformance -k tutorial -n $(CORES) tests/test_examples.py

mlflow: setup ## an environment with MLflow, for its tests in make conformance, which installs it too
	@PYTHONPATH=tests $(BIN)/python -m conformance.mlflow_venv

fleet: setup ## balancers, kubectl and promtool, for the tests of deploy/ and benchmarks/fleet.py
	@PYTHONPATH=tests $(BIN)/python -m conformance.fleet_engines

s3: setup ## two S3 servers, for the tests of s3:// in make conformance, which installs them too
	@PYTHONPATH=tests $(BIN)/python -m conformance.s3_servers

SITE := build/site-venv
site: ## the documentation as a site in build/site, with warnings as errors
	@[ -x $(SITE)/bin/mkdocs ] || { $(PYTHON) -m venv $(SITE) && $(SITE)/bin/python -m pip install --quiet \
	  --disable-pip-version-check --requirement docs/site/requirements.txt; }
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --quiet --config-file docs/site/mkdocs.yml
	$(PYTHON) docs/site/check_links.py build/site

RELEASE := build/release-venv
release: ## sdist and both wheels in dist/, built twice, checked, each installed into an empty environment and tried
	@[ -x $(RELEASE)/bin/twine ] || { $(PYTHON) -m venv $(RELEASE) && $(RELEASE)/bin/python -m pip install --quiet \
	  --disable-pip-version-check build twine cyclonedx-bom hatchling $$($(PYTHON) -c '$(HOOK_NEEDS)'); }
	$(RELEASE)/bin/python tools/make_release.py

# What is compiled lies in build/objects and in the wheel, never beside the sources, where it would run in their place.
WHEEL := build/wheel-venv
HOOK_NEEDS = import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["dependencies"])
wheel: ## a wheel for this machine and Python in dist/, its hot modules compiled by mypyc; takes a C compiler and minutes
	@$(PYTHON) tools/compile_modules.py
	@[ -x $(WHEEL)/bin/pyproject-build ] || { $(PYTHON) -m venv $(WHEEL) && $(WHEEL)/bin/python -m pip install --quiet \
	  --disable-pip-version-check build hatchling $$($(PYTHON) -c '$(HOOK_NEEDS)'); }
	@echo "compiling, which takes three minutes on two cores the first time"
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(WHEEL)/bin/python -m build --wheel --no-isolation --outdir dist

# The wheel over the packages of .venv. A stand-in that compiled code takes for no part of it marks its test `interpreted`.
COMPILED_TESTS ?= tests
COMPILED := build/compiled
compiled: setup browser redis wheel ## an environment with that wheel in build/compiled, and the tests (COMPILED_TESTS=…) there
	rm -rf $(COMPILED) && $(PYTHON) -m venv $(COMPILED)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(COMPILED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_interpreted.pth
	$(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed \
	  $$(ls -t dist/carpool-*-cp*.whl | head -1) ./tools/demos
	@$(COMPILED)/bin/carpool --version | grep '(compiled)' || { echo "$(COMPILED) does not run the compiled form"; exit 1; }
	$(COMPILED)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  -m "not conformance and not interpreted" $(COMPILED_TESTS)

ray: setup ## an environment with Ray, for its tests in make conformance, which installs it too, and benchmarks/ray_fleet.py
	@PYTHONPATH=tests $(BIN)/python -m conformance.ray_venv

ENGINES := $(VENV)/conformance/engines/bin/python
engines: setup ## an environment with TensorFlow and transformers, the backends' tests in it; benchmarks/zoo.py runs there
	@PYTHONPATH=tests $(BIN)/python -m conformance.engines_venv
	$(ENGINES) -m pytest -n $(CORES) tests/backends

docs: setup ## redraw the pictures in docs/
	$(BIN)/python docs/draw.py

PROTO := src/carpool/wire/proto
proto: setup ## write the message descriptors again after a change of a .proto file
	$(BIN)/python -m grpc_tools.protoc -I $(PROTO) --descriptor_set_out=$(PROTO)/descriptors.binpb \
	  model_config.proto grpc_service.proto health.proto

clean: ## remove what the other targets made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
