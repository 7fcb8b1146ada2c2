"""Sizes: how operators write bytes, and what they may have left out."""

from __future__ import annotations

import re
from decimal import Decimal

from continuum_connector.errors import ConfigError

MIN_TIER_BYTES = 1024  # of DRAM or a disk: who writes 64 means 64GiB

_UNITS = {"": 1, "b": 1}
for _i, _u in enumerate("kmgt", start=1):
    _UNITS |= {_u: 1024**_i, f"{_u}ib": 1024**_i, f"{_u}b": 1000**_i}


def parse_bytes(text: str) -> int:
    """Read a human size: "64GiB", "1.5 TiB", "500MB", "4096". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(f"{text!r} is not a size")
    if unit == 1 and "." in match[1]:
        raise ValueError(f"{text!r} is less than whole bytes")
    return int(Decimal(match[1]) * unit)


def check_units(**tiers: int) -> None:
    """Refuse a tier's size without its unit, before vLLM loads weights for it."""
    for key, num_bytes in tiers.items():
        if 0 < num_bytes < MIN_TIER_BYTES:
            raise ConfigError(
                f"{key} = {num_bytes} is in bytes and holds no block, so nothing could be kept; "
                f'write the unit, such as "{num_bytes}GiB", or 0 for no tier'
            )


def size(num_bytes: float) -> str:
    """ "12.0 GiB", "8.0 MiB", "64.0 KiB"."""
    value, units = num_bytes / 1024, ["GiB", "MiB", "KiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.1f} {units[-1]}"
