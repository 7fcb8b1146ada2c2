"""Measurements: each folder holds one question, one script and the table it printed."""
