# Everything runs in .venv/, which `make env` builds from pyproject.toml and .ci/constraints.txt.
# GNU make and Python 3.11 or later are all a fresh machine needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CONSTRAINTS := .ci/constraints.txt
PIP = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS)

# TORCH=2.15.0 takes another PyTorch than the tested one. Targets after `make env TORCH=…` keep
# it without being told; `make env` alone, or TORCH=tested, goes back.
ifeq ($(origin TORCH),undefined)
ifeq ($(filter env,$(MAKECMDGOALS)),)
TORCH := $(shell cat $(VENV)/.torch 2>/dev/null)
endif
endif
TORCH := $(or $(strip $(TORCH)),tested)

# Where PyTorch's wheels come from, see utils/doctor/wheels.py: "cpu", builds for CPUs; TORCH_INDEX=pypi (or
# empty), the package index, on Linux with CUDA; TORCH_INDEX=https://…, another index. All targets
# keep what was asked for last; TORCH_INDEX=cpu goes back.
ifeq ($(origin TORCH_INDEX),undefined)
WHEELS := $(or $(strip $(shell cat $(VENV)/.wheels 2>/dev/null)),cpu)
else
WHEELS := $(or $(strip $(TORCH_INDEX)),pypi)
endif

ifeq ($(OS),Windows_NT)
$(error Windows needs no make: py -m venv .venv, then .venv\Scripts\python -m pip install -e ., \
then .venv\Scripts\python -m utils lab. See docs/install-windows.md)
endif

# `!mpiexec` in a notebook means the one of this environment.
ACTIVATE = PATH="$(CURDIR)/$(BIN):$$PATH"
# `%%px` prints in rank order, without progress bars: notebooks compare equal between runs.
# Not for `make lab`: streaming shows a student one rank's error while the others wait.
run smoke solutions check: export IPP_NONINTERACTIVE = 1

SMOKE := utils/mpi/tests/test_mpi_backend.py tests/cluster/test_names_in_the_way.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env lab test test-all test-room types check test-env smoke run solutions release release-check dist student-repo lock backend site film image notes lint format figures slides pack grade clean FORCE

# The students' bundle has no solutions/, and no use for the authors' targets.
help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' Makefile \
	  | grep -E '$(if $(wildcard solutions),.,^  make (help|env|lab|clean) )'
	@echo
	@echo "  PYTHON=python3.12 builds .venv with that Python (make clean first);"
	@echo "  TORCH=2.15.0 takes that PyTorch; TORCH_INDEX=pypi takes the package index's build of it, with CUDA;"
	@echo "  PIP_ARGS=… go to pip; PORT=8899 and ARGS=… to JupyterLab;"
	@echo "  ARGS=… go to pytest, run and grade, too; WORKERS=4 runs four tests at a time."

# --- environment -------------------------------------------------------------------------------

# A venv holds its own path: one that was moved or copied here can't be used.
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(shell cat $(VENV)/.home 2>/dev/null || echo "$(CURDIR)"),$(CURDIR))
$(BIN)/python: FORCE
endif
endif

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "make: Python 3.11 or later is needed; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo 'not there')." \
	    "Name another one: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: '$(PYTHON)' cannot make virtual environments." \
	    "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }
	@echo "$(CURDIR)" > $(VENV)/.home

# Holds the PyTorch that was asked for; newer than the stamps only when that changed.
$(VENV)/.torch: FORCE | $(BIN)/python
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

# Which wheels are asked for; pip would keep those of another choice, as their version is the same.
$(VENV)/.wheels: FORCE | $(BIN)/python
	@echo "$(WHEELS)" | cmp -s - $@ || { \
	  [ ! -e $@ ] || $(BIN)/python -m pip uninstall -q -y torch torchvision; echo "$(WHEELS)" > $@; }

# The tested versions; without PyTorch's where another one was asked for.
$(VENV)/.constraints.txt: $(CONSTRAINTS) $(VENV)/.torch
	@if [ "$(TORCH)" = tested ]; then cat $(CONSTRAINTS); \
	else grep -vE '^(torch|torchvision)==' $(CONSTRAINTS); echo "torch==$(TORCH)"; fi > $@

# One rule for all sets of extras; `test` contains what `grade` and `site` need, and those all of `env`.
$(VENV)/.env: EXTRAS =
$(VENV)/.grade: EXTRAS = [course]
$(VENV)/.test: EXTRAS = [test]
$(VENV)/.site: EXTRAS = [site]
$(VENV)/.slides: EXTRAS = [slides]
$(VENV)/.env $(VENV)/.grade $(VENV)/.site $(VENV)/.slides $(VENV)/.test: pyproject.toml $(VENV)/.constraints.txt $(VENV)/.wheels
	@$(BIN)/python -P utils/doctor/wheels.py --index "$(WHEELS)" --constraints $(VENV)/.constraints.txt -- $(PIP_ARGS)
	$(PIP) -e '.$(EXTRAS)' -c $(VENV)/.constraints.txt
	@touch $(VENV)/.env $(if $(findstring test,$(EXTRAS)),$(VENV)/.grade $(VENV)/.site $(VENV)/.slides) $@

env: $(VENV)/.env  ## build .venv (does nothing when it is up to date)
	@echo "$(VENV) is ready; PyTorch: $(TORCH), wheels: $(WHEELS)"

# --- students ----------------------------------------------------------------------------------

lab: $(VENV)/.env  ## open the labs in JupyterLab
	@exec $(BIN)/python -m utils lab $(if $(PORT),--port=$(PORT)) $(ARGS)

# --- authors -----------------------------------------------------------------------------------

# Three at a time: much of a test is waiting, for a deadline or for a rank. A group stays together
# (tests/scheduling.py): a file, or a lab. Some tests of `test-all` fill both cores; so there, two.
# SHARE=2/3 leaves out two thirds of the tests that differ only in the answer, the attack, the lab or a
# page's look.
test: BESIDE = -n $(or $(WORKERS),3) $(GROUPS)
test: $(VENV)/.test  ## test the course: ten minutes on two cores
	$(ACTIVATE) $(BIN)/python -m pytest --durations=10 $(or $(ARGS),$(BESIDE) --budget test -m '$(COURSE)')

test-all: $(VENV)/.test  ## test also what needs a cluster, a browser or other libraries: half an hour
	$(ACTIVATE) $(BIN)/python -m pytest --durations=10 $(or $(ARGS),$(BESIDE) \
	  $(if $(SHARE),--share $(SHARE) --budget ci,--budget test-all))

# Which tests a room has follows from imports: tests/room_tests.py.
test-room: $(VENV)/.test  ## test what a change in one room can break (ROOM=lab06): three minutes for a lab
	@[ -n "$(ROOM)" ] || { echo "make: which room? For example: make test-room ROOM=lab06" >&2; exit 1; }
	$(ACTIVATE) $(BIN)/python -m pytest --durations=10 $(BESIDE) --room '$(ROOM)' -m '$(COMMON)' $(ARGS)

BESIDE = -n $(or $(WORKERS),2) $(GROUPS)
# Without tests that run on demand, or that only test-all runs; and without most answers after the first.
COMMON = not matrix and not large and not often and not extended
COURSE = $(COMMON) and not rest

GROUPS = --dist loadgroup --no-loadscope-reorder

types: $(VENV)/.test  ## check the contracts between the rooms (mypy)
	$(BIN)/mypy

check: lint types release-check  ## lint, types, and the tests that take no ranks: two minutes
	$(ACTIVATE) $(BIN)/python -m pytest -q -m 'quick and not often and not extended' $(BESIDE) $(ARGS)

test-env: $(VENV)/.test  ## build .venv with all that the tests need

# Of every part of the backend a little, and a lab: what another PyTorch may break.
smoke: $(VENV)/.test  ## try a PyTorch for two minutes (TORCH=2.15.0)
	@$(BIN)/python -c 'import torch; print("PyTorch", torch.__version__)'
	$(ACTIVATE) $(BIN)/python -m pytest -q -m smoke $(SMOKE) $(ARGS)
	$(ACTIVATE) $(BIN)/python -m pytest -q --nbval solutions/01_c10d.ipynb

run: $(VENV)/.test  ## execute every solution, one line each
	$(ACTIVATE) $(BIN)/ddl-labs run $(ARGS)

solutions: $(VENV)/.test  ## execute every solution and keep the outputs
	@# Of all labs: in a folder as after a clone, where no lab has left files or a table.
	$(if $(ARGS),,git clean -qfdX solutions)
	$(ACTIVATE) $(BIN)/ddl-labs run --store $(ARGS)

release: $(VENV)/.test  ## write labs/ and the map of the course from solutions/
	$(BIN)/ddl-labs release
	$(BIN)/ddl-labs map

release-check: $(VENV)/.test  ## do labs/ and the map follow from solutions/?
	$(BIN)/ddl-labs release --check
	$(BIN)/ddl-labs map --check

dist: $(VENV)/.test  ## write the students' zip to dist/ (ARGS=afternoon, assignment or debugging: a part)
	$(BIN)/ddl-labs dist $(ARGS)

student-repo: $(VENV)/.test  ## write a repository for students, without solutions in its history (DIR=…)
	@[ -n "$(DIR)" ] || { echo "make: which folder? For example: make student-repo DIR=../labs-2027" >&2; exit 1; }
	$(BIN)/ddl-labs student-repo "$(DIR)" $(ARGS)

# uv goes on from what uv.lock has: nothing is newer than it must be.
lock: $(VENV)/.test  ## write uv.lock: what .ci/constraints.txt pins, and all the rest, for every platform
	$(BIN)/uv lock $(shell grep -oE '^[a-z0-9-]+==[^ ]+' $(CONSTRAINTS) | sed 's/^/-P /')

backend: $(VENV)/.test  ## build the backend as a package of its own, wheel and sdist, in dist/
	cd utils/mpi && $(CURDIR)/$(BIN)/python -m hatchling build -d $(CURDIR)/dist

site: $(VENV)/.site  ## build the site in build/site, from the stored outputs
	$(BIN)/python docs/site/course_site/build.py $(ARGS)

film: $(VENV)/.test  ## record README's moving picture: a minute in JupyterLab, with Chromium
	$(ACTIVATE) $(BIN)/python docs/film/record.py $(ARGS)

image:  ## build the container image with JupyterLab and the labs (IMAGE=ddl-labs)
	docker build --tag "$(or $(IMAGE),ddl-labs)" .

notes:  ## print the release notes of this version
	@.ci/notes

lint: $(VENV)/.test  ## check style and notebooks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ddl-labs lint

format: $(VENV)/.test  ## format the code, notebooks too
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --- instructors --------------------------------------------------------------------------------

figures: $(VENV)/.grade  ## write every picture as SVG and PNG with its words to build/figures (15 minutes)
	$(ACTIVATE) $(BIN)/ddl-labs figures $(ARGS)

slides: $(VENV)/.slides  ## write a lecture for each lab, as HTML and PowerPoint, to build/slides
	$(BIN)/ddl-labs slides $(ARGS)

pack: $(VENV)/.test  ## write the instructor's pages of every lab to build/pack (15 minutes)
	$(ACTIVATE) $(BIN)/ddl-labs pack $(ARGS)

# Bubblewrap is a program of the system: said before minutes go into .venv.
grade: grade-asked $(VENV)/.grade  ## grade a class (SUBMISSIONS=… RESULTS=…)
	$(ACTIVATE) $(BIN)/ddl-labs grade "$(SUBMISSIONS)" -o "$(RESULTS)" $(ARGS)

.PHONY: grade-asked
grade-asked:
	@[ -n "$(SUBMISSIONS)" ] && [ -n "$(RESULTS)" ] || { \
	  echo "make: which submissions, and where to? For example:" \
	    "make grade SUBMISSIONS=submissions.zip RESULTS=results ARGS='--only 01 -j 2'" >&2; exit 1; }
	@[ -e "$(SUBMISSIONS)" ] || { \
	  echo "make: '$(SUBMISSIONS)' is not there: SUBMISSIONS is a folder, or a zip of Moodle or Canvas." >&2; \
	  exit 1; }
	@command -v bwrap >/dev/null || case " $(ARGS) " in *" --no-sandbox "*) ;; *) \
	  echo "make: bubblewrap is not installed; only an administrator can do that." >&2; \
	  echo "  Debian, Ubuntu: sudo apt-get install bubblewrap" >&2; \
	  echo "  Fedora, RHEL:   sudo dnf install bubblewrap" >&2; \
	  echo "  Without it submissions could read and change all that you can. If you trust every one:" \
	    "ARGS=--no-sandbox" >&2; exit 1;; esac

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
