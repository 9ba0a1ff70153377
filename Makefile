# `make demo` runs the whole recipe at tiny size, `make test` the whole test suite. Both first make
# .venv and install into it, when that is not done yet or when setup.py has changed. The tests also
# need the compilers of accelerator kernels.

WORKDIR ?= runs/tiny
ARGS ?=

.PHONY: demo test venv

demo: venv
	@.venv/bin/composer-jax run --config=experiments/tiny/composer2.py --workdir=$(WORKDIR) $(ARGS)
	@echo "$(WORKDIR)/report.html"

test:
	@.ci/venv aot
	@.venv/bin/ruff check --quiet .
	@.venv/bin/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadfile $(ARGS)

venv:
	@.ci/venv
