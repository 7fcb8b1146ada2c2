"""Stream: which CUDA stream copies are ordered behind."""

from __future__ import annotations


def current_stream() -> int:
    """The CUDA stream vLLM computes on in this thread, or 0 on CPU."""
    import torch

    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.current_stream().cuda_stream)
