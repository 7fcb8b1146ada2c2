"""WHAT IT COSTS, in seconds: prefill, copies, queueing, a held block. Measured while serving."""
