.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs docs-serve release-check clean

help:
	@echo "make demo    complete a prompt with the embedded pair and print its own speed-up"
	@echo "make test    run the tests of units and of exactness (no GPU, no network)"
	@echo "make check   format, lint, types, import layers and all tests: what CI runs"
	@echo "make bench   run the benchmarks and write their results"
	@echo "make docs    build the documentation's site; make docs-serve shows it"
	@echo "make release-check   build the files of a release and install each in a clean place"
	@echo "make clean   remove the environment, caches and builds"

demo:
	@scripts/demo
test:
	@echo "under six minutes on two cores, with what is installed; scripts/test --fast takes one"
	@scripts/test
check:
	@scripts/check
bench:
	@scripts/bench
docs:
	@scripts/docs
docs-serve:
	@scripts/docs serve
release-check:
	@scripts/release_check
clean:
	@rm -rf .venv .docs-venv build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache .cache
	@find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
