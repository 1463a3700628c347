# The two commands of the README, and what they share. Everything that is needed is installed from pinned versions.

PYTHON ?= python3.11
UV_VERSION := 0.13.9
VENV := .venv
STAMP := $(VENV)/.installed
# Tests run beside each other, a file in one process; those of the whole loop have the machine to themselves.
WORKERS ?= 2
FOLDERS := schemas kernels producers streams trainer consumers compose
# Tests and roles are many processes: without bytecode, which containers often forbid, each compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-fast lint lock clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv==$(UV_VERSION)
	$(VENV)/bin/uv pip sync --compile-bytecode --python $(VENV)/bin/python requirements.lock
	$(VENV)/bin/uv pip install --python $(VENV)/bin/python --no-deps --no-build-isolation --editable .
	mkdir -p $(VENV)/typed/tidemill
	for folder in $(FOLDERS); do ln -sfn $(CURDIR)/$$folder $(VENV)/typed/tidemill/$$folder; done
	touch $@

demo: setup
	$(VENV)/bin/tidemill demo

# Both parts run, and either one's failure is the status.
test: setup
	$(VENV)/bin/python -m pytest --ignore tests/system --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder; \
	  first=$$?; $(VENV)/bin/python -m pytest tests/system; exit $$((first | $$?))

# Without a broker and without vLLM: which tests these are follows from their fixtures (tests/fast_lane.py).
test-fast: setup
	$(VENV)/bin/python -m pytest -p tests.fast_lane --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: setup
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy -p tidemill

lock:
	$(VENV)/bin/uv pip compile pyproject.toml --all-extras --python-version 3.11 \
	  --python-platform x86_64-manylinux_2_28 --no-annotate --no-header --generate-hashes --output-file requirements.lock

clean:
	rm -rf $(VENV) data build *.egg-info
