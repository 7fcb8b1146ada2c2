"""What was there of a turn's prompt: told of it in metrics, in the trace and to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class AgainstStock:
    """A turn's prompt tokens: those that only we kept, those that stock vLLM would have kept too,
    and those that stock would have kept and we did not."""

    only_ours: int
    stock_too: int
    only_stock: int

    @classmethod
    def of(cls, num_found: int, num_in_stock: int) -> AgainstStock:
        too = min(num_found, num_in_stock)
        return cls(num_found - too, too, num_in_stock - too)

    def as_dict(self) -> dict[str, int]:
        return dict(vars(self))


class Told(Protocol):
    """What a memory below had for a turn, for the trace and the answer: of `num_tokens` that were
    neither in VRAM nor in DRAM. It may change until the turn is admitted."""

    num_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """By the name of the memory."""
