# 'make help' lists the targets. The first call of any of them makes .venv with the locked dependencies.
#
# Lower-case variables are overrides and reach the program exactly as the shell handed them to make:
#     make train algo=sac env=Hopper seed=1,2,3 'algo.hidden_sizes=[256,256]'
# Three UPPER-case variables are make's own; any other belongs into the environment, as in NAME=value make TARGET:
#     ARGS="..."    raw flags for the program behind the target, split at spaces; quotes keep a flag in one piece
#     PYTHON=...    the interpreter that .venv is made with (default: the first of several that fits)
#     TORCH=cpu     torch without CUDA, or with another one, as in TORCH=cu126 (default: the build of PyPI)
#
# No value typed as key=value is expanded or executed: it is read by 'value' only, and never exported.
# Make evaluates some arguments before it reads this file, which cannot prevent that: a key with a $, key:=value,
# key!=command, MAKEFILES=... and --eval=...

# The command line only: a variable of the environment that happens to be called env or seed is no override.
# '-%' is make's own bookkeeping. A loop variable called v would hide an override of that name.
TYPED := $(sort $(filter-out -%,\
    $(foreach .key,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(.key)))),$(.key)))))
# Whatever is exported, make expands for the environment of each command. And a make below (in a test, in a
# launched job) would take over this call's overrides and flags.
unexport $(TYPED) MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL

define NEWLINE


endef
$(foreach .key,$(TYPED),$(if $(findstring $(NEWLINE),$(value $(.key))),$(error The value of '$(.key)' has a line break)))
$(foreach .key,$(TYPED),$(if $(filter simple,$(flavor $(.key))),$(error Write $(.key)=... instead of $(.key):=...)))
# Variables of make and of this file could be changed by any other name.
LETTERS := A B C D E F G H I J K L M N O P Q R S T U V W X Y Z
FOREIGN := $(filter-out ARGS PYTHON TORCH,$(filter .% $(LETTERS:=%),$(TYPED)))
$(if $(FOREIGN),$(error Not known here: $(FOREIGN). Keys are in lower case, as in algo=sac; an environment variable goes in front: NAME=value make ...))
KEYS := $(filter-out ARGS PYTHON TORCH,$(TYPED))
# Make hands over no order, and the order of wrappers counts.
$(foreach .group,env.wrappers env.training_wrappers,\
    $(if $(word 2,$(sort $(foreach .key,$(filter $(.group).%,$(KEYS)),$(firstword $(subst ., ,$(.key:$(.group).%=%)))))),\
    $(error Of several wrappers the order counts: write '$(.group)={FIRST:{...},SECOND:{...}}')))

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory --no-builtin-rules --no-builtin-variables
.DEFAULT_GOAL := help

ARGS =
PYTHON ?=
TORCH ?=
VENV_PYTHON := .venv/bin/python
STAMP := .venv/.installed

# This checkout's code comes first, also in child processes and with the .venv of another worktree.
export PYTHONPATH := $(CURDIR)$(if $(value PYTHONPATH),:$(value PYTHONPATH))

ifeq ($(wildcard pyproject.toml),)
$(error Run make in the folder of the Makefile, or with 'make -C FOLDER ...')
endif

# The single quotes keep the shell from touching what 'value' has kept from make.
QUOTE = '$(subst ','\'',$1)'
OVERRIDES = $(foreach .key,$(KEYS),$(call QUOTE,$(.key)=$(value $(.key))))
# The word true if that key was given as true, and nothing if it was given as false or not at all.
IS_TRUE = $(strip $(if $(filter $1,$(KEYS)),$(if $(filter-out 1,$(words $(value $1))),$(call NO_SWITCH,$1),\
    $(if $(filter 1 true,$(value $1)),true,$(if $(filter-out 0 false,$(value $1)),$(call NO_SWITCH,$1))))))
NO_SWITCH = $(error $1=$(value $1): expected true or false)
# xargs knows quotes and nothing else; its lines become arguments, and the shell expands no pattern or variable.
SPLIT_ARGS = $(if $(value ARGS),args=$$(printf '%s\n' $(call QUOTE,$(value ARGS)) | xargs printf '%s\n') || exit 2; \
    set -f; IFS=$$(printf '\n.'); IFS=$${IFS%.};)
SPLIT = $(if $(value ARGS),$$args)
# 'exec' lets a signal that make passes on reach the program instead of a shell around it.
RUN = $(ALWAYS)@$(SPLIT_ARGS) exec $(VENV_PYTHON) $1 $2 $(SPLIT)
COMMAND = $(call RUN,-m runlab $@,$(OVERRIDES))
NO_OVERRIDES = $(if $(KEYS),$(error '$@' takes no overrides, but got: $(KEYS). Flags go into ARGS="..."))

TARGETS := help install train resume search evaluate film runs diff stats compare prove prove-resume reproduce report rename new-experiment \
    test test-all test-slow lint format docs lock clean $(if $(wildcard bench),bench)

# 'make train algo= sac' would start a run with other values than meant before it stumbles over 'sac'.
UNKNOWN := $(filter-out $(TARGETS) $(STAMP),$(MAKECMDGOALS))
$(if $(UNKNOWN),$(error No such target: $(UNKNOWN). 'make help' lists them. Overrides are written key=value, flags ARGS="..."))

# Status 1 of these programs is an answer (different, broken), below which make shall not write "Error 1". Under -q
# make takes it over without a word, and runs what begins with +. A dry run would run that too.
ANSWERS := compare prove reproduce
ifeq ($(filter-out $(ANSWERS),$(or $(MAKECMDGOALS),help))$(findstring n,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),)
MAKEFLAGS += -q
ALWAYS := +
endif

.PHONY: $(TARGETS) FORCE

help:
	@echo "usage: make TARGET [key=value ...] [ARGS=\"--flag ...\"]"
	@sed -n -e 's/^##@ /\n/p' -e 's/^\([a-z-]*\):.*## \(.*\)/\1	\2/p' $(MAKEFILE_LIST) | while IFS='	' read -r name text; do \
	    if [ -n "$$text" ]; then printf '  %-16s%s\n' "$$name" "$$text"; else printf '%s\n' "$$name"; fi; done

# Cheap to ask each time, and an interpreter that the system has removed or replaced leaves a dead link.
$(STAMP): requirements.lock pyproject.toml $(if $(value TORCH),FORCE,$(shell test -x $(VENV_PYTHON) || echo FORCE))
	$(ALWAYS)@TORCH=$(call QUOTE,$(value TORCH)) sh scripts/setup.sh $(if $(value PYTHON),$(call QUOTE,$(value PYTHON)))

FORCE:

install: $(STAMP)
	@$(NO_OVERRIDES):

##@ Train
train: $(STAMP) ## train: make train algo=sac env=Hopper seed=1,2,3
	$(call RUN,-m runlab train,$(OVERRIDES))

resume: $(STAMP) ## resume a run that ended early: make resume run=RUN [total_env_steps=N]
	$(COMMAND)

search: $(STAMP) ## search for hyperparameters: make search sweep=ppo-rates algo=ppo env=Hopper trials=40
	$(COMMAND)

evaluate: $(STAMP) ## evaluate the policy of a run: make evaluate run=RUN [episodes=N] [checkpoint=best]
	$(COMMAND)

film: $(STAMP) ## film the policy of a run: make film run=RUN [episodes=4 grid=2x2] [checkpoint=all] [gif=true]
	$(COMMAND)

##@ Look
runs: $(STAMP) ## table of all runs: make runs [env='Half*'] [return='>3000'] [sort=-return] [show=algo.gamma]
	$(COMMAND)

diff: $(STAMP) ## differences between two runs, counted: make diff a=RUN b=RUN [code=full]
	$(COMMAND)

stats: $(STAMP) ## statistics over seeds: make stats runs='runs/*/*' [by=KEY] [statistic=iqm]
	$(COMMAND)

##@ Compare
compare: $(STAMP) ## first divergence of two traced runs: make compare a=RUN b=RUN [zoom=true]
	$(COMMAND)

prove: $(STAMP) ## test a determinism level: make prove algo=ppo env=Hopper determinism=repeat [times=5]
	$(COMMAND)

reproduce: $(STAMP) ## make a recorded run again from its own code, and compare: make reproduce run=RUN
	$(COMMAND)

# KILLS=20 make prove-resume
prove-resume: $(STAMP)
	@$(NO_OVERRIDES)$(SPLIT_ARGS) exec $(VENV_PYTHON) -m pytest -n 2 -m slow --timeout=14400 tests/launch/test_kills.py $(SPLIT)

##@ Share
report: $(STAMP) ## one page of HTML about all runs: make report [runs='runs/*/*'] [out=FILE] [figures=FOLDER] [watch=true]
	$(COMMAND)

rename: $(STAMP) ## turn a fork into your project: make rename name=my_project
	$(call RUN,scripts/rename.py,$(OVERRIDES))

new-experiment: $(STAMP) ## a commented file for an experiment: make new-experiment name=wide-nets algo=sac env=Hopper
	$(call RUN,scripts/new_experiment.py,$(OVERRIDES))

##@ Develop
# Each process takes half of the list, so that what a file prepares is prepared once, and then a part of what the
# other one has left.
PROCESSES := -n 2 --dist worksteal

test: $(STAMP) ## the tests: make test [ARGS="-k record"]
	@$(NO_OVERRIDES)$(SPLIT_ARGS) exec $(VENV_PYTHON) -m pytest $(PROCESSES) $(SPLIT)

test-all: $(STAMP) ## all tests that have to pass before a merge
	@$(NO_OVERRIDES)$(SPLIT_ARGS) exec $(VENV_PYTHON) -m pytest $(PROCESSES) -m "not slow" $(SPLIT)

test-slow: $(STAMP)
	@$(NO_OVERRIDES)$(SPLIT_ARGS) exec $(VENV_PYTHON) -m pytest $(PROCESSES) -m slow --timeout=3600 $(SPLIT)

lint: $(STAMP) ## style, format, types, imports, spelling; changes nothing
	@$(NO_OVERRIDES)failed=; \
	$(VENV_PYTHON) -m ruff check --quiet . || failed=1; \
	$(VENV_PYTHON) -m ruff format --check --quiet . || { failed=1; echo "not formatted: run 'make format'"; }; \
	$(VENV_PYTHON) -m mypy --no-error-summary || failed=1; \
	$(VENV_PYTHON) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo \
	    >.venv/imports.log || { failed=1; cat .venv/imports.log; }; \
	$(VENV_PYTHON) -m codespell_lib || failed=1; \
	test -z "$$failed"

format: $(STAMP)
	@$(NO_OVERRIDES)$(VENV_PYTHON) -m ruff check --fix-only --quiet . && $(VENV_PYTHON) -m ruff format .

docs: $(STAMP) ## the pages of docs/ as a site in site/, or served: make docs [serve=true]
	$(if $(filter-out serve,$(KEYS)),$(error 'docs' takes serve=true only, but got: $(filter-out serve,$(KEYS))))
	@$(SPLIT_ARGS) exec env NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs \
	    $(if $(call IS_TRUE,serve),serve --dev-addr 127.0.0.1:8000,build) --strict $(SPLIT)

-include bench/bench.mk

# pip-compile keeps what is pinned already; ARGS=--upgrade lets everything move. The index and the +cpu of
# this machine's torch stay out of the lock, so that it installs anywhere, with or without CUDA.
EXTRAS := atari dev search video wandb
lock: $(STAMP)
	@$(NO_OVERRIDES)cp requirements.lock .venv/lock.txt
	@$(SPLIT_ARGS) $(VENV_PYTHON) -m piptools compile --quiet $(EXTRAS:%=--extra %) --strip-extras --no-header --no-annotate \
	    --no-emit-index-url --no-emit-find-links --no-emit-options --output-file .venv/lock.txt \
	    $(SPLIT) pyproject.toml >/dev/null
	@{ sed -n '1{/^#/p;}' requirements.lock; sed 's/+cpu$$//' .venv/lock.txt; } >.venv/lock.new
	@mv .venv/lock.new requirements.lock

# Removes caches and build outputs; never runs/ or .venv.
clean:
	@$(NO_OVERRIDES)rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .coverage htmlcov MUJOCO_LOG.TXT
	@find . \( -path ./.venv -o -path ./runs -o -path ./.git \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
