"""WHO is talking: which program a request belongs to, and what its client said about it."""
