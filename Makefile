# `make` prepares the environment and runs every notebook, quickly; `make help` lists the rest.

.DEFAULT_GOAL := run
.PHONY: look run test check style types house format hooks slow wheel help
BIN := .venv/bin
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

.venv/ready: requirements.txt
	python3 -m venv --upgrade-deps .venv
	$(BIN)/pip install -r requirements.txt
	touch .venv/ready

.venv/dev: requirements-dev.txt .venv/ready
	$(BIN)/pip install -r requirements-dev.txt
	touch .venv/dev

look:  ## open the explorer on a shipped trace in a browser, before anything is installed
	python3 -m webbrowser -t "file://$(CURDIR)/figures/explorer.html"

run: .venv/ready  ## run every notebook, quickly (SPECNB_BUDGET=full: with sizes worth quoting)
	$(BIN)/specnb run

test: .venv/dev  ## run the tests of every day, ten minutes
	$(PYTEST)

check: .venv/dev  ## check style, types, import contracts and the house rules, half a minute
	@$(MAKE) --no-print-directory -j 2 types style house

style:
	$(BIN)/ruff check -q
	$(BIN)/ruff format --check -q
	$(BIN)/lint-imports

types:
	$(BIN)/python .ci/check_types.py

house:
	$(BIN)/pytest -q --no-header tests/top/test_house.py

format: .venv/dev  ## order imports, fix what ruff can, format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

hooks: .venv/dev  ## let git run style, file sizes and the notebook cleaner before every commit
	$(BIN)/pre-commit install

slow: .venv/dev  ## hours: trainings, grids on real models, converters, killed workers, browser, every notebook
	$(PYTEST) -m slow

wheel: .venv/ready  ## build a wheel with the data inside, into dist/
	$(BIN)/pip wheel --no-deps -w dist .

help:  ## list these lines
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 14
