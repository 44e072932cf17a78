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
.PHONY: help setup serve test check bench release conformance compiled engines fleet gpu hunt mlflow needs ray s3 site wheel clean

help: ## show this help
	@grep -hE '^[a-z]+:.* ## ' $(MAKEFILE_LIST) | awk -F ':.* ## ' '{printf "  make %-11s %s\n", $$1, $$2}'
	@echo 'more:'
	@grep -hE '^[a-z]+:.* #\+ ' $(MAKEFILE_LIST) | awk -F ':.* #[+] ' '{printf "  make %-11s %s\n", $$1, $$2}'

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

test: setup needs ## run the tests, but for the long ones of make conformance
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

hunt: setup needs #+ look for tests that fail now and then, for an hour (ARGS=--help)
	@$(BIN)/python tools/hunt.py $(ARGS)

needs:
	@tools/test_needs.sh

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## the quick form of every benchmark
	@for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script --quick || exit 1; done

# Everything that needs a CUDA device, within ten minutes: the tests that are skipped without one, and the benchmark.
GPU_PYTHON ?= $(BIN)/python
GPU_OUT ?= build/gpu
gpu: #+ the tests that need a CUDA device, and benchmarks/gpu.py (GPU_PYTHON=python3: with what that has installed)
	[ $(GPU_PYTHON) != $(BIN)/python ] || $(MAKE) setup
	$(GPU_PYTHON) -m pytest -q -m gpu $$(grep -rl 'mark\.gpu' tests)
	$(GPU_PYTHON) benchmarks/gpu.py --out $(GPU_OUT) --networks resnet50,vit_b_16 --seconds 2 --clients 512 \
	  --street-clients 384 --sections jpeg,tensor,light,start,promise,pipeline,onnx

conformance: setup #+ Triton's own clients, perf_analyzer and the long tests (ARGS=--help)
	@PYTHONPATH=tests $(BIN)/python -m conformance.run $(ARGS)

# Programs and environments that some tests and benchmarks need. The tests of make conformance install them, too.
MODULE_fleet := fleet_engines
MODULE_mlflow := mlflow_venv
MODULE_ray := ray_venv
MODULE_s3 := s3_servers
fleet mlflow ray s3: setup
	@PYTHONPATH=tests $(BIN)/python -m conformance.$(MODULE_$@)

SITE := build/site-venv
site: #+ the documentation as a site in build/site, with warnings as errors
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
wheel: #+ a wheel for this machine and Python in dist/, its hot modules compiled by mypyc; takes a C compiler and minutes
	@$(PYTHON) tools/compile_modules.py
	@[ -x $(WHEEL)/bin/pyproject-build ] || { $(PYTHON) -m venv $(WHEEL) && $(WHEEL)/bin/python -m pip install --quiet \
	  --disable-pip-version-check build hatchling $$($(PYTHON) -c '$(HOOK_NEEDS)'); }
	@echo "compiling, which takes three minutes on two cores the first time"
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 $(WHEEL)/bin/python -m build --wheel --no-isolation --outdir dist

# The wheel over the packages of .venv. A stand-in that compiled code takes for no part of it marks its test `interpreted`.
COMPILED_TESTS ?= tests
COMPILED := build/compiled
compiled: setup needs wheel #+ an environment with that wheel in build/compiled, and the tests (COMPILED_TESTS=…) there
	rm -rf $(COMPILED) && $(PYTHON) -m venv $(COMPILED)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(COMPILED)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_the_interpreted.pth
	$(COMPILED)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-installed \
	  $$(ls -t dist/carpool-*-cp*.whl | head -1) ./tools/demos
	@$(COMPILED)/bin/carpool --version | grep '(compiled)' || { echo "$(COMPILED) does not run the compiled form"; exit 1; }
	$(COMPILED)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	  -m "not conformance and not interpreted" $(COMPILED_TESTS)

ENGINES := $(VENV)/conformance/engines/bin/python
engines: setup #+ an environment with TensorFlow and transformers, the backends' tests in it; benchmarks/zoo.py runs there
	@PYTHONPATH=tests $(BIN)/python -m conformance.engines_venv
	$(ENGINES) -m pytest -n $(CORES) tests/backends

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
