"""WHAT IS TOLD of it: metrics, and a trace of every decision and its outcome."""
