"""Every command with every option, and values that nobody should type: `python -m tests.fuzz`."""
