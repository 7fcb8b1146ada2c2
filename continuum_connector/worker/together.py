"""What one rank of an engine finds, all of them hear: for what all do or none does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def anyone(groups: Iterable[Any], is_so: bool) -> bool:
    """Whether it is so on any rank. `groups`: torch's process groups on CPUs that this rank is in,
    which span the engine one after the other. BLOCKS until every rank has asked."""
    import torch

    said = torch.tensor([int(is_so)])
    for group in groups:
        torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group)
    return bool(said.item())
