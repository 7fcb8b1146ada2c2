"""CopyModel: seconds to load or to store blocks, fitted over the engine's own transfers."""

from __future__ import annotations

from collections.abc import Sequence

from continuum_connector.costs.prefill import RobustFit

MIN_TRANSFERS = 4  # two costs need two unlike transfers; twice that


class CopyModel:
    """Latency + seconds per block, from queued to settled: that is what a turn waits for."""

    def __init__(self) -> None:
        self._fit = RobustFit(2)
        self._guess = (0.0, 0.0)
        self.num_transfers = 0

    @property
    def is_known(self) -> bool:
        """Whether `seconds` answers from a seed or from enough transfers."""
        return self._fit.is_seeded or self.num_transfers >= MIN_TRANSFERS

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds: latency, per block."""
        return self._fit.coefficients

    def seed(self, coefficients: Sequence[float]) -> None:
        """Start from coefficients measured before, on this machine."""
        self._fit.seed(coefficients)

    def guess(self, latency: float, per_block: float) -> None:
        """What to answer until something is known."""
        self._guess = (latency, per_block)

    def add(self, num_blocks: int, seconds: float) -> None:
        """A transfer of `num_blocks` settled `seconds` after it was queued; 0 is no time."""
        if seconds <= 0.0:
            return
        self._fit.add((1.0, num_blocks), seconds)
        self.num_transfers += 1

    def seconds(self, num_blocks: int) -> float:
        """Seconds that `num_blocks` take; 0.0 for none."""
        if num_blocks <= 0:
            return 0.0
        latency, per_block = self._fit.coefficients if self.is_known else self._guess
        return latency + per_block * num_blocks
