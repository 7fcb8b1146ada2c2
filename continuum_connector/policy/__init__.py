"""WHAT to do with a finished turn. Pure functions of a snapshot: no vLLM, torch or clock."""
