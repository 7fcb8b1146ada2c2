"""AgainstStock: what we found beside what stock vLLM would have found, as far as anybody knows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WRONG = (
    "ContinuumConnector: the shadow of stock vLLM's cache did not add up and begins anew; only "
    "what is told against stock is affected. Please report it"
)
logger = logging.getLogger(f"vllm.{__name__}")


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


class UnknownStock:
    """Of a server for which nobody can say what stock would have kept."""

    def admitted(self, request: Any, num_vram_tokens: int) -> int | None:
        return None

    def look(self) -> None:
        pass

    def preempted(self, request_id: str) -> None:
        pass

    def finished(self, request: Any) -> None:
        pass

    def clear(self) -> None:
        pass


class CautiousStock(UnknownStock):
    """`stock`, whose mistakes cost no more than its books: it only tells, and is asked inside the
    engine's step, where an exception would end the server."""

    def __init__(self, stock: UnknownStock) -> None:
        self._stock = stock
        self._has_warned = False

    def admitted(self, request: Any, num_vram_tokens: int) -> int | None:
        num: int | None = self._ask(self._stock.admitted, request, num_vram_tokens)
        return num

    def look(self) -> None:
        self._ask(self._stock.look)

    def preempted(self, request_id: str) -> None:
        self._ask(self._stock.preempted, request_id)

    def finished(self, request: Any) -> None:
        self._ask(self._stock.finished, request)

    def clear(self) -> None:
        self._stock.clear()

    def _ask(self, method: Callable[..., Any], *what: Any) -> Any:
        try:
            return method(*what)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(WRONG, exc_info=True)
            self._stock.clear()
            return None
