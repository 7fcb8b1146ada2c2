"""Mode: what the connector is to vLLM's scheduler."""

from __future__ import annotations

import enum


class Mode(enum.Enum):
    """What the connector is to vLLM's scheduler; every hook of the scheduler half asks it first."""

    ASIDE = "aside"  # a worker, or this server cannot use us: there is no scheduler half
    OFF = "off"  # an operator said so (`switch_path`): only what was promised is kept
    ATTACHED = "attached"  # vLLM's scheduler is our subclass of it
