"""Measurements: each folder holds one question, one script and the table it printed.

`python -m bench...` ends as `continuum` does (continuum_connector/tools/cli/ending.py).
"""
