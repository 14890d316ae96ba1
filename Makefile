# Two commands matter: `make check-model` and `make test`. Each sets up .venv on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: check-model check-model-large fence-table docs pages test nightly mutants mutant-sample foreign soak lint format clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml constraints.txt
	@echo "setting up $(VENV), once: torch, a Java runtime and TLC among what is downloaded, so that it takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[model,test,docs]'
	touch $@

check-model: $(STAMP)
	$(BIN)/quiesce check

check-model-large: $(STAMP)
	$(BIN)/quiesce check --large

# The tables of docs/memory_order.md: minutes from cold, nothing when nothing changed.
fence-table: $(STAMP)
	$(BIN)/python -m quiesce.model.fences docs/memory_order.md

# The site, in site/; and what pages quote of specifications and code, brought up to date.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f docs/site/mkdocs.yml

pages: $(STAMP)
	$(BIN)/python -m quiesce.model.pages docs

test: $(STAMP)
	QUIESCE_PROFILE=$${QUIESCE_PROFILE:-ci} $(BIN)/python -m pytest

nightly: $(STAMP)
	QUIESCE_PROFILE=nightly $(BIN)/python -m pytest

# Every mutant of the specifications and their faulty variants against every checker; then the mutants that cosmic-ray makes
# of the implementation, against the tests, for MUTANT_SECONDS altogether.
MUTANT_SECONDS ?= 28800
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	$(BIN)/quiesce matrix --write
	mkdir -p .quiesce
	$(BIN)/python -m model_tests.mutation.generated --seconds $(MUTANT_SECONDS) --json .quiesce/mutants.jsonl

# A few of these, the same each time, as CI tries them: a survivor without a reason is an error.
mutant-sample: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	$(BIN)/python -m model_tests.mutation.generated payload_reuse payload_receiver lifecycle transport --quick --seed 7 --sample 8

# Each protocol at full load, then crash points, for SECONDS altogether; figures to stdout and .quiesce/soak.json.
SECONDS ?= 1800
soak: $(STAMP)
	mkdir -p .quiesce
	$(BIN)/python -m model_tests.faults.soak --seconds $(SECONDS) --json .quiesce/soak.json

# Other people's code held to the specifications: fetches two versions of vLLM (600 MB) into FOREIGN, and installs nothing.
FOREIGN ?= $(shell $(BIN)/python -c 'import tempfile; print(tempfile.gettempdir())')/quiesce-foreign
foreign: $(STAMP)
	$(BIN)/python -m model_tests.foreign.fetch $(FOREIGN)
	QUIESCE_FOREIGN_VLLM=$(FOREIGN) $(BIN)/python -m pytest model_tests/foreign

lint: $(STAMP)
	$(BIN)/ruff check impl model_tests docs/examples
	$(BIN)/ruff format --check impl model_tests docs/examples
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix impl model_tests docs/examples
	$(BIN)/ruff format impl model_tests docs/examples

clean:
	rm -rf $(VENV) .quiesce site
