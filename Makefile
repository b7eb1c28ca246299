# `make demo` and `make test` are all a newcomer needs: each makes .venv and installs what it uses.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= 2
SECONDS_EACH ?= 0.1
# Pages with tables that are made from the records and the code.
PAGES := README.md $(addprefix docs/,advise.md advice-how.md fp8-details.md many-gpus.md results.md performance.md attention.md gate-statistics.md convergence.md convergence-records.md gpus.md leaderboard.md plan-scaling.md)

.PHONY: demo test test-slow docs bench simulations lint check-tables check-longest check-others check-docs compile-other-gpus compile-oldest tables reports clean

demo: .venv/demo.done
	$(BIN)/te-bench demo

# The tests start hundreds of processes, each of which would compile te_bench anew where Python is told to write no bytecode.
test test-slow: export PYTHONDONTWRITEBYTECODE =
test: .venv/test.done
	$(MAKE) --no-print-directory -j $(JOBS) lint check-tables .venv/compiled.done
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "not gpu and not alone and not slow"

# Whole runs, trainings and clusters, and what compiles: each takes more than ten seconds.
test-slow: .venv/test.done
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "slow and not gpu and not alone"

# Every Triton kernel for sm_80, sm_86, sm_89, sm_100 and sm_120; the most demanding tiles are in `make test-slow`.
compile-other-gpus: .venv/test.done
	$(BIN)/python -m pytest -n $(JOBS) -m other_gpus tests/kernels/test_other_gpus.py

# What compiles, by the oldest torch and Triton that pyproject.toml allows, which refuse what newer ones take: ten minutes of a core.
OLDEST := $(shell sed -nE 's/^ *"(torch|triton)>=([0-9.]*).*/\1==\2/p' pyproject.toml)
BY_THE_OLDEST := PYTHONPATH=$(CURDIR)/build/oldest $(BIN)/python
compile-oldest: build/oldest.done
	$(BY_THE_OLDEST) -c 'from packaging.requirements import Requirement as R; wrong = [one for one in "$(OLDEST)".split() if __import__(R(one).name).__version__ not in R(one).specifier]; assert not wrong, f"to run, and not what is imported: {wrong}"'
	$(BY_THE_OLDEST) -m pytest -n $(JOBS) -o cache_dir=build/oldest/cache -k "compil or operator" -m "not gpu and not alone" tests/kernels tests/models tests/experiments/workloads/test_piece_timed.py
	$(BY_THE_OLDEST) -m pytest -n $(JOBS) -o cache_dir=build/oldest/cache -m other_gpus tests/kernels/test_other_gpus.py

# Error rates of the verdicts' tests, of more designs and by more simulated studies than in `make test`: minutes.
simulations: .venv/test.done
	$(BIN)/python -m pytest -n $(JOBS) -m simulations tests/reports/convergence

# The kernels under pytest-benchmark, on a GPU where there is one; saved under .benchmarks/ with every round. Then for instance:
# .venv/bin/pytest-benchmark compare 0001 0002 --group-by fullname
bench: .venv/test.done
	$(BIN)/python -m pytest benchmarks --benchmark-only --benchmark-autosave --benchmark-save-data \
	  --benchmark-max-time=$(SECONDS_EACH) --benchmark-warmup=on --benchmark-warmup-iterations=3 -q

lint: .venv/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The bytecode of all tests and of te_bench, once: each worker would make it for itself. What cannot be collected the tests tell.
.venv/compiled.done: .venv/test.done
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true
	@touch $@

# Side by side: the longest page, which simulates gates, takes as long as all others.
LONGEST := docs/gate-statistics.md
check-tables: check-longest check-others
check-longest: .venv/test.done
	$(BIN)/te-bench embed --check $(LONGEST)
check-others: .venv/test.done
	$(BIN)/te-bench embed --check $(filter-out $(LONGEST),$(PAGES))

# The tables of these pages, from the records under results/ and the backends' own words.
tables: .venv/demo.done
	$(BIN)/te-bench embed $(PAGES)

# The reports under results/, drawn again from their journals, in two minutes. On another machine an index.html may differ in last digits.
reports: .venv/demo.done
	for report in results/*/*/report; do $(BIN)/te-bench report $${report%/report} > /dev/null || exit 1; done

# docs/ with a reference and a gallery of results/, as a site in site/: open site/index.html, no server is needed.
docs: .venv/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The site in a headless Chromium: its links, its search, the gallery's filters, and how every kind of page looks.
check-docs: .venv/test.done .venv/docs.done
	$(BIN)/python -m pytest -m site tests/test_site.py

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "te-bench needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "could not make .venv; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

.venv/demo.done: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	touch $@

# All that .venv/demo.done has, by one call; and no bytecode of packages, half a minute of a core: the tests make what they use.
.venv/test.done: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) install --no-compile -c constraints.txt -e '.[test]'
	touch .venv/demo.done $@

build/oldest.done: pyproject.toml | .venv/test.done
	$(PIP) install -q --upgrade --target build/oldest $(OLDEST)
	touch $@

.venv/docs.done: .venv/demo.done
	$(PIP) install -c constraints.txt -e '.[docs]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
