# `make` by itself lists what there is. Each target makes the virtual environment that it needs.
.DEFAULT_GOAL := help
PYTHON ?= python3
ARGS ?=
TEST := .venv
DEMO := .venv-demo
DOCS := .venv-docs
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt
# harness.py is what the others share; gpu.py needs a card, serving.py other servers.
BENCHMARKS := $(filter-out $(addprefix benchmarks/,harness.py gpu.py serving.py),$(sort $(wildcard benchmarks/*.py)))

.PHONY: help demo test test-slow test-cuda test-wheel coverage lint format bench bench-serving docs clean

help:  ## list the targets; ARGS="…" is handed on to what they run
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(DEMO)/.ready  ## serve the bundled intents, ask in sentences, print what is saved (no torch)
	$(DEMO)/bin/offramp demo $(ARGS)

test: $(TEST)/.ready  ## the whole suite, on all cores
	$(TEST)/bin/python -m pytest -n auto --dist loadfile $(ARGS)

test-slow: $(TEST)/.ready  ## the tests that take minutes
	$(TEST)/bin/python -m pytest -m slow $(ARGS)

# On a machine with a CUDA GPU and torch's CUDA build: kernels are compiled instead of interpreted.
test-cuda: $(TEST)/.ready  ## the tests that need a CUDA GPU
	TRITON_INTERPRET=0 $(TEST)/bin/python -m pytest -m cuda $(ARGS)

test-wheel: $(TEST)/.ready  ## the suite against the built wheel instead of the working tree
	rm -rf build/wheel && $(TEST)/bin/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	rm -rf build/site && $(TEST)/bin/python $(PIP) --no-deps --target build/site build/wheel/*.whl
	PYTHONPATH=build/site OFFRAMP_EXPECT_FROM=build/site $(TEST)/bin/python -m pytest $(ARGS)

coverage: $(TEST)/.ready  ## the suite with its coverage: a table here, pages in htmlcov/
	$(TEST)/bin/python -m pytest -n auto --dist loadfile --cov --cov-report=term:skip-covered --cov-report=html $(ARGS)

lint: $(TEST)/.ready .types/offramp  ## style and types, as CI checks them
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	MYPYPATH=.types $(TEST)/bin/mypy --explicit-package-bases -p offramp

format: $(TEST)/.ready  ## put style right where that can be done by itself
	$(TEST)/bin/ruff check --fix .
	$(TEST)/bin/ruff format .

bench: $(TEST)/.ready  ## the benchmarks that this machine can run; results go to benchmarks/results/
	for script in $(BENCHMARKS); do $(TEST)/bin/python $$script $(ARGS) || exit 1; done
	@if $(TEST)/bin/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(TEST)/bin/python benchmarks/gpu.py; \
	else echo "benchmarks/gpu.py: passed by, there is no CUDA GPU here."; fi

# Each of the other servers gets an environment of its own, in benchmarks/serving/.venvs/.
bench-serving: $(TEST)/.ready  ## offramp against other servers of the whole model; twenty minutes
	$(TEST)/bin/python benchmarks/serving.py $(ARGS)

# The sources are read, not imported: this environment needs neither torch nor ONNX Runtime.
docs: $(DOCS)/.ready .types/offramp  ## the documentation, in site/; any warning is an error
	$(DOCS)/bin/zensical build --clean --strict $(ARGS)
	@echo "site/index.html"

clean:  ## remove what the other targets made
	rm -rf .venv .venv-demo .venv-docs benchmarks/serving/.venvs .node .types build dist site .cache htmlcov .coverage *.egg-info

# For the tests of the example for Node, which are skipped without it. Its install script would fetch CUDA libraries.
.node/.ready:
	npm install --silent --no-save --ignore-scripts --prefix .node onnxruntime-node@1.30.0
	touch $@

# torch comes first and pinned: anything else that wants it would bring a CUDA build.
$(TEST)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TEST)
	$(TEST)/bin/python $(PIP) torch==2.13.0
	$(TEST)/bin/python $(PIP) -e ".[dev]"
	touch $@

$(DEMO)/.ready: pyproject.toml constraints.txt $(wildcard runtime/*.py server/*.py server/static/* runtime/*/*)
	$(PYTHON) -m venv $(DEMO)
	$(DEMO)/bin/python $(PIP) --upgrade ".[cpu,server]"
	touch $@

$(DOCS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(PIP) ".[docs]"
	touch $@

# mypy and the documentation want one folder per package; the source folders are its packages under other names.
.types/offramp: pyproject.toml
	rm -rf $@ && mkdir -p $@
	for package in export kernels runtime server; do ln -s ../../$$package $@/$$package; done
	touch $@
