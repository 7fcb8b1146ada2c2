"""MOVING BYTES: block ids in, copies on the engine's own threads, outcomes out."""
