# make demo   the founding case on a real SGLang server, on the CPU
# make gallery  every planted fault, on real servers: what was planted against what was named
# make bench   how fast it is, against what it is to reach: benchmarks/README.md
# make test   everything: lint, types, tests, real servers included
# make test-sglang SGLANG=0.5.9   the tests of real servers, with another version of SGLang, in an environment of its own
#
# Third-party packages (11 GB, SGLang's own install) are built once for each user and dependency list, under
# $XDG_CACHE_HOME/hsprobe; .venv is this checkout's own and holds only hsprobe.

PYTHON ?= python3
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/hsprobe
KEY := $(shell $(PYTHON) .ci/dependencies.py --key $(SGLANG))
PACKAGES := $(CACHE)/$(KEY)
VENV := .venv$(addprefix -,$(SGLANG))
RUN := $(VENV)/bin/python

# Bytecode is kept, outside the checkout, whatever the environment says: each of a server's processes imports
# thousands of modules, which takes 6 s of CPU with it and 16 s without.
export PYTHONDONTWRITEBYTECODE :=
export PYTHONPYCACHEPREFIX := $(CACHE)/bytecode

.PHONY: demo gallery bench picture support test test-sglang browser lint types unit env clean
.DEFAULT_GOAL := demo

demo: env
	@$(RUN) -m hsprobe.fixtures.demo demo-out

gallery: env
	@$(RUN) -m hsprobe.fixtures.faults

bench: env
	@$(RUN) -m benchmarks.bench

# docs/support.md: every family of models on a real server, held against transformers.
support: env
	@$(RUN) -m hsprobe.fixtures.support

# The README's picture and output, from a demo that has run.
picture: env
	$(RUN) -m hsprobe.fixtures.picture demo-out README.md docs/diff.svg
	$(RUN) -m hsprobe.fixtures.screenshots docs/images

test: browser lint types unit

# The HTML report is tested in Chromium.
browser:
	@.ci/browser

lint: env
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# mypy cannot follow an editable install whose packages lie in several folders: lay them out as installed.
types: env
	@rm -rf build/typing && mkdir -p build/typing/hsprobe
	@ln -s $(CURDIR)/hsprobe/* $(CURDIR)/probes $(CURDIR)/fixtures build/typing/hsprobe
	MYPYPATH=build/typing $(RUN) -m mypy -p hsprobe

# Files of tests go to whichever of the processes is free. One thread each for the kernels: two processes' threads
# on two cores wait for one another.
unit: env
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=40

# What a version does not have is skipped, with the reason.
test-sglang: env
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=20 \
	    tests/sglang tests/formats/test_sglang_ids_installed.py tests/fixtures/test_cpu_standins.py tests/probes

env: $(VENV)/ready

$(VENV)/ready: pyproject.toml $(PACKAGES)/ready
	@echo "Setting up this checkout's $(VENV)"
	@rm -rf $(VENV) && $(PACKAGES)/bin/python -m venv --without-pip $(VENV)
	@$(RUN) -c "import site; print(site.getsitepackages()[0])" > $(VENV)/where
	@$(PACKAGES)/bin/python -c "import site; print(site.getsitepackages()[0])" > "$$(cat $(VENV)/where)/packages.pth"
	@$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(PACKAGES)/ready:
	@mkdir -p $(CACHE)
	@flock $(CACHE)/$(KEY).lock .ci/packages "$(PYTHON)" "$(PACKAGES)" $(SGLANG)

clean:
	rm -rf .venv .venv-* build demo-out
