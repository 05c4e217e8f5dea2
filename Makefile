# Two commands on a fresh machine: `make demo` and `make test`. Each makes its own virtual environment.
PYTHON ?= python3
ARGS ?=
TEST := .venv
DEMO := .venv-demo
PIP := -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-slow test-cuda test-wheel lint bench clean

demo: $(DEMO)/.ready
	$(DEMO)/bin/offramp demo $(ARGS)

test: $(TEST)/.ready
	$(TEST)/bin/python -m pytest -n auto --dist loadfile $(ARGS)

test-slow: $(TEST)/.ready
	$(TEST)/bin/python -m pytest -m slow $(ARGS)

# On a machine with a CUDA GPU and torch's CUDA build: kernels are compiled instead of interpreted.
test-cuda: $(TEST)/.ready
	TRITON_INTERPRET=0 $(TEST)/bin/python -m pytest -m cuda $(ARGS)

# The same suite against the built wheel instead of the working tree.
test-wheel: $(TEST)/.ready
	rm -rf build/wheel && $(TEST)/bin/python -m build --wheel --no-isolation --outdir build/wheel . >/dev/null
	rm -rf build/site && $(TEST)/bin/python $(PIP) --no-deps --target build/site build/wheel/*.whl
	PYTHONPATH=build/site OFFRAMP_EXPECT_FROM=build/site $(TEST)/bin/python -m pytest $(ARGS)

lint: $(TEST)/.ready .types/offramp
	$(TEST)/bin/ruff check .
	$(TEST)/bin/ruff format --check .
	MYPYPATH=.types $(TEST)/bin/mypy --explicit-package-bases -p offramp

bench: $(TEST)/.ready
	for script in benchmarks/*.py; do $(TEST)/bin/python $$script $(ARGS) || exit 1; done

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

# mypy wants one folder per package; the source folders are its packages under other names.
.types/offramp: pyproject.toml
	rm -rf $@ && mkdir -p $@
	for package in export kernels runtime server; do ln -s ../../$$package $@/$$package; done
	touch $@

clean:
	rm -rf .venv .venv-demo .types build dist *.egg-info
