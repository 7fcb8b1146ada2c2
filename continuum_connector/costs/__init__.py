"""WHAT IT COSTS, in seconds: tool calls, prefill, loads, queueing. Measured while serving."""
