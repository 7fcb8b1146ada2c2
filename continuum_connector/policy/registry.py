"""Registry: the policies that a config can name, and how to make each from the config's values."""

from __future__ import annotations

from collections.abc import Callable

from continuum_connector.policy.adaptive import Adaptive
from continuum_connector.policy.base import RetentionPolicy
from continuum_connector.policy.baselines import (
    FixedTtl,
    LruOffload,
    ProgramOrder,
    Released,
    Stock,
)
from continuum_connector.policy.continuum import Continuum

# Name -> maker from (ttl_s, max_ttl_s).
MAKERS: dict[str, Callable[[float, float], RetentionPolicy]] = {
    "adaptive": lambda _, max_ttl_s: Adaptive(max_ttl_s),
    "continuum": lambda _, max_ttl_s: Continuum(max_ttl_s),
    "fixed_ttl": FixedTtl,
    "released": lambda _, max_ttl_s: Released(max_ttl_s),
    "lru_offload": lambda *_: LruOffload(),
    "program_order": lambda *_: ProgramOrder(),
    "stock": lambda *_: Stock(),
}


def make_policy(name: str, ttl_s: float, max_ttl_s: float) -> RetentionPolicy:
    """Return the policy of that name. Raises KeyError if there is none; the config checks that."""
    return MAKERS[name](ttl_s, max_ttl_s)
