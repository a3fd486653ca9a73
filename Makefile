# `make` prepares the environment and runs every notebook, quickly; `make SPECNB_BUDGET=full` with sizes worth quoting.
# `make test` runs the tests of every day.

.DEFAULT_GOAL := run
.PHONY: run test slow

.venv/ready: requirements.txt
	python3 -m venv --upgrade-deps .venv
	.venv/bin/pip install -r requirements.txt
	touch .venv/ready

run: .venv/ready
	.venv/bin/specnb run

test: .venv/ready
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

slow: .venv/ready  # hours: trainings, grids on real models, converters, killed workers, browser, every notebook
	.venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow
