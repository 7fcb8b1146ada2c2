"""Expected: which device this is, and what a step computes on it, for the prior in costs/.

vLLM estimates a step's operations and bytes itself (v1/metrics/perf.py), per rank: with experts,
quantization and parallelism counted.
"""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from continuum_connector.costs.prior import (
    TYPICAL,
    UNKNOWN,
    Device,
    Shape,
    cpu,
    device_named,
    prefill_prior,
)

# Tokens of the steps that we ask about. With contexts above any window, the difference of two is
# full attention alone; a step that reads weights has enough tokens to reach most experts.
NUM_NEW, SHORT, LONG, NUM_READING = 1024, 32_768, 65_536, 64

logger = logging.getLogger(f"vllm.{__name__}")


def prefill(vllm_config: Any) -> tuple[float, float, float]:
    """What a prefill takes on this server, as `prefill_prior` says it. It is only a guess, so
    nothing that vLLM does not know about its model or device stops the server."""
    try:
        prior = prefill_prior(shape(vllm_config), device())
    except Exception:
        logger.debug("ContinuumConnector: no estimate of this model or device", exc_info=True)
        return prefill_prior(TYPICAL, UNKNOWN)
    return prior if all(map(math.isfinite, prior)) else prefill_prior(TYPICAL, UNKNOWN)


def device() -> Device:
    """The device that vLLM serves on. Asks no driver for more than vLLM itself has asked."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return cpu(len(os.sched_getaffinity(0)))
    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return device_named(current_platform.get_device_name(), capability and capability.major)


def shape(vllm_config: Any) -> Shape:
    """One rank's share of the model; TYPICAL where vLLM's estimate does not know the model."""
    from vllm.v1.metrics import perf

    def part(kind: Any) -> Any:
        """None: not a part of this model, or not as vLLM's estimate expects one."""
        try:
            return kind.from_vllm_config(vllm_config)
        except (perf.InvalidComponent, AttributeError, LookupError, TypeError, ValueError):
            return None

    parts = [each for each in map(part, perf.ComponentMetrics.registered_metrics()) if each]
    # Of a quantization that the estimate does not know, only the head is left.
    if not any(isinstance(each, perf.FfnMetrics) for each in parts):
        return TYPICAL

    def flops(context: int) -> float:
        step = perf.ExecutionContext.from_single_request(NUM_NEW, context, True)
        return float(sum(part.get_num_flops(step) for part in parts))

    reading = perf.ExecutionContext.from_single_request(NUM_READING, NUM_READING, True)
    pair_flops = (flops(LONG) - flops(SHORT)) / (NUM_NEW * (LONG - SHORT))
    token_flops = flops(SHORT) / NUM_NEW - pair_flops * SHORT
    if token_flops <= 0.0:
        return TYPICAL
    return Shape(token_flops, pair_flops, sum(part.get_read_bytes(reading) for part in parts))
