"""A real `vllm serve` on CPU with a tiny random model, and agents that talk to it."""
