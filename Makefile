# make serve · make test · make check · make bench      from a clean clone; nothing else is needed.
#
#   make serve ARGS="--http-port 9000"    more flags for the server
#   make test  ARGS="tests/config -x"     arguments for pytest
#   make quick                            the tests of the rooms that start no server, in under a minute
#   make nightly                          all of the tests, those marked slow too
#   make packages                         the tests of the wheel and of the parts in C, which compile for minutes, and of Ray
#   make kernels                          the tests of kernels for GPUs, without a GPU (a gigabyte more on disk)
#   make wheel                            an sdist and a wheel in dist/, for Python 3.11 and newer
#   make docs                             the documentation as a site, in site/; make docs-serve shows it
#   make serve PYTHON=python3.12          the Python that the virtual environment is made from
#   make serve TORCH_INDEX=<url>          where to get the CPU build of torch, to spare a laptop the CUDA packages

MODELS ?= model_repository
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
# The first of these that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TORCH := torch==2.13.0
# That of this torch's builds for GPUs.
TRITON := triton==3.7.1
EXTRAS := onnx,pytorch,images,llm

# What an installation is made from; of the rest it refers to the files as they are.
RECIPE := pyproject.toml setup.py modelserver/core/_accelerator.c modelserver/core/_decimal.h modelserver/wire/sockets/_calls.c $(wildcard backends/llm/_*.[ch])

# Half as many processes again as there are processors, as tests wait too; up to eight.
PROCESSES := $(shell $(PYTHON) -c 'import os; print(min(8, max(1, os.cpu_count() * 3 // 2)))' 2>/dev/null || echo 2)
# Bytecode is kept, whatever the environment says, or each process that a test starts would compile the server anew.
TESTS := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: serve test quick nightly packages kernels check format bench wheel docs docs-serve clean

serve: $(VENV)/.serve
	$(BIN)/modelserver serve --model-repository=$(MODELS) $(ARGS)

# A file's tests run in order in one of several processes; tests/conftest.py says which files are first.
test: $(VENV)/.dev
	$(TESTS) -m "not slow" $(ARGS)

# What a change is likely to break first: settings, configs, scheduling, decoders, the direction of imports.
QUICK := $(addprefix tests/,auth backend cache client config core options planes scheduling test_layers.py)
quick: $(VENV)/.dev
	$(TESTS) -m "not slow" $(QUICK) $(ARGS)

# The long ones too: soaks, wide differentials, foreign toolchains. And foreign clients, the differentials and the APIs of
# language models with a router in front of each server.
ROUTED := $(addprefix tests/,anthropic clients differential ollama openai tgi)
nightly: $(VENV)/.dev
	$(TESTS) $(ARGS)
	$(TESTS) --layout routed $(ROUTED) $(ARGS)

# The wheel and the parts in C, built as a user's machine builds them, for other processors, and with sanitizers: minutes
# of compiling. And servers on a Ray cluster of three nodes.
packages: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests/packaging tests/cluster/test_ray.py tests/cluster/test_ray_nodes.py tests/core/test_accelerator.py tests/backends/llm/test_vectors.py $(ARGS)

# The language models' kernels in Triton's interpreter. Its wheel for Linux is large, and nothing else needs it: it lies
# in a directory of its own, where torch does not find it when a server starts.
kernels: $(VENV)/.kernels
	PYTHONPATH=$(abspath $(VENV)/kernels) $(BIN)/python -m pytest -n logical --maxprocesses=8 tests/backends/llm/attention/test_triton_kernels.py tests/backends/llm/models/test_triton_linear.py tests/test_gpu_steps.py::test_steps_run_to_their_end_in_a_rehearsal $(ARGS)

# What is checked without running the server: manner, types, the direction of imports.
check: $(VENV)/.dev
	.ci/check

format: $(VENV)/.dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks $(ARGS)

# The wheel is built of the sdist. It is of the stable ABI, so that one serves every Python; where there is no compiler it
# lacks the parts in C.
wheel: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build --no-isolation

# The site, without a warning, and with links and anchors that lead somewhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python docs/check_site.py site

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "modelserver needs Python 3.11 or newer: install it, or say make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch comes before whatever depends on it, so that nothing pulls another build later. Where the package index
# holds builds for GPUs only, TORCH_INDEX names one with the CPU build (PyTorch's own publishes it).
$(VENV)/.torch: | $(BIN)/python
	$(PIP) install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch $@

$(VENV)/.serve: $(RECIPE) $(VENV)/.torch
	$(PIP) install --editable '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.dev: $(RECIPE) $(VENV)/.torch
	$(PIP) install --editable '.[$(EXTRAS),dev]'
	$(PIP) install --no-deps "text-generation==0.7.0"  # it asks for a huggingface_hub that transformers is too new for
	@touch $@ $(VENV)/.serve

# The libraries of the extra alone: the package itself is installed and need not be built again.
$(VENV)/.docs: pyproject.toml $(VENV)/.dev
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		| xargs $(PIP) install
	@touch $@

$(VENV)/.kernels: $(VENV)/.dev
	rm -rf $(VENV)/kernels
	$(PIP) install --target $(VENV)/kernels "$(TRITON)"
	@touch $@
