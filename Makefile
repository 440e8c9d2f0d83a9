# Two commands (`make quick` before a commit, `make slow` for what takes long): `make plan` runs the diagnostic plan on CPU (phases 1 to 5; all of them: PHASES=all), `make test` the CPU suite. Both install what they need.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
EXTRAS ?= test
FAULT  ?=
FAULT_RANK ?=
PHASES ?= 1-5
ARGS   ?=
WORKERS ?= 3

BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed-$(subst /,_,$(subst $() ,_,$(TORCH)))

# Modules are compiled once, not by each process that tests start: 80 s of CPU time of `make test`.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: plan quick test slow lint install clean docs matrix compare

install: $(STAMP)

# torch first, so that the pin decides and nothing else pulls another build.
$(STAMP): pyproject.toml
	@echo "== installing $(TORCH) and pytest-nsa into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q '$(TORCH)' numpy
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[$(EXTRAS)]' '$(TORCH)'
	@rm -f $(VENV)/installed-* && touch $@

plan: $(STAMP)
	$(BIN)/python -m pytest tests_cpu/plan/test_plan.py --phases $(PHASES) -m 'slow or not slow' -v $(if $(FAULT),--fault $(FAULT)) $(if $(FAULT_RANK),--fault-rank $(FAULT_RANK)) $(if $(FOLLOW),--plan-follow) $(ARGS)

# The plan under two versions of torch, and what differs; it fails where the second is worse. Below 2.6 (2.4, 2.5) torch is not supported.
TORCH_A ?= torch==2.6.0
TORCH_B ?= $(TORCH)
# What the plan needs, and no more: torch's CUDA builds pin a Triton, and the tests of the kernels want another.
PLAN_NEEDS := model,data
compare:
	-$(MAKE) plan VENV=$(VENV)-a EXTRAS=$(PLAN_NEEDS) TORCH='$(TORCH_A)' ARGS='--ranks-artifacts=artifacts/torch_a $(ARGS)'
	-$(MAKE) plan VENV=$(VENV)-b EXTRAS=$(PLAN_NEEDS) TORCH='$(TORCH_B)' ARGS='--ranks-artifacts=artifacts/torch_b $(ARGS)'
	$(VENV)-b/bin/pytest-nsa compare artifacts/torch_a/latest artifacts/torch_b/latest > artifacts/compare.md

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Before each commit: what needs no ranks, and the rules on recorded evidence.
QUICK := tests_cpu/diagnosis tests_cpu/plan/test_decision.py tests_cpu/nsa/test_config.py tests_cpu/nsa/test_data.py tests_cpu/test_docs.py tests_cpu/test_words.py
quick: lint
	$(BIN)/python -m pytest $(QUICK) -n 2 -q $(ARGS)

# Files in their order: by the number of their tests, one test that takes half a minute would be the last.
test: lint
	$(BIN)/python -m pytest tests_cpu -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=25 $(ARGS)

slow: $(STAMP)
	$(BIN)/python -m pytest tests_cpu -m slow -n $(WORKERS) --dist loadgroup $(ARGS)

# The pages as a site, in build/site; a link that leads nowhere fails it.
docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[docs]' '$(TORCH)'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

# Each Python that is here, torch and pytest, oldest and newest; then the packages. An hour.
matrix: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q -e '.[release]' '$(TORCH)'
	$(BIN)/nox

clean:
	rm -rf $(VENV) build dist
