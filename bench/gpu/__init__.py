"""The first half hour on a GPU: a plan that runs itself, `python -m bench.gpu`."""
