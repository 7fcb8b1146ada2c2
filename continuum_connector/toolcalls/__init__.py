"""WHAT a finished turn asks for: its tool calls, read from the end of its output."""
