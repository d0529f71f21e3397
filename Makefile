# Each target is one plain command; see tools/house.py for what it runs.
PYTHON ?= python3

.PHONY: dev demo test lint types layers proto deploy compat browser wheel gpu docs dist version pins
dev demo test lint types layers proto deploy compat browser wheel dist version pins:
	@$(PYTHON) tools/house.py $@

# make gpu ARGS="--phase speed", make docs ARGS=--serve
gpu docs:
	@$(PYTHON) tools/house.py $@ $(ARGS)
