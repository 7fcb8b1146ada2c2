"""Gpu: the A/B on a machine with a GPU. How to run it: README.md."""
