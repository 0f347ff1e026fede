# Everything works from a fresh clone: each target makes the environment that it needs.
VENV ?= .venv
PYTHON := $(shell for p in python3.12 python3.13 python3.14 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && command -v $$p && break; done)
PY := $(VENV)/bin/python
JAX_VERSION = $(shell $(PY) -c 'import jaxlib; print(jaxlib.__version__)')

.PHONY: demo test test-all lint types aot bench clean

demo: $(VENV)/.installed
	$(PY) -m dsa_cp_jax validate

test: $(VENV)/.installed
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not aot" --durations=15

test-all: $(VENV)/.installed
	$(PY) -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/pyrefly check

# Compiles every kernel to sm_90a machine code; no GPU needed.
aot: $(VENV)/.aot
	$(PY) -m pytest -n 2 -m aot

# All benchmarks that the machine allows, and the plots; see `python -m benchmarks --help`.
bench: $(VENV)/.installed
	test ! -e /dev/nvidiactl || $(PY) -m pip install -q -e ".[cuda]"
	$(PY) -m benchmarks

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.12 found; install one (for example: uv python install 3.12)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -e ".[dev]"
	touch $@

# The CUDA plugin of the installed jaxlib, without the CUDA libraries, and ptxas.
$(VENV)/.aot: $(VENV)/.installed
	$(PY) -m pip install -q --no-deps jax-cuda13-plugin==$(JAX_VERSION) jax-cuda13-pjrt==$(JAX_VERSION)
	command -v ptxas >/dev/null || $(PY) -m pip install -q nvidia-cuda-nvcc
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
