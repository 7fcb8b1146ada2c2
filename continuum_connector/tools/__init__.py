"""WHAT AN OPERATOR RUNS, outside the server: the `continuum` command."""
