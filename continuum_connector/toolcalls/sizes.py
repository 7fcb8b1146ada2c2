"""Octaves: sizes and times as powers of two, so that near ones fall into one class."""

from __future__ import annotations

import math
import re

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})(ms|s|m|h|d)?")
_SECONDS = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_OCTAVE = 40


def octave(value: float) -> str:
    """The power of two above a value: 5 -> "<8". Below 1 it is "<1"."""
    if not value >= 1:  # NaN and what is negative, too
        return "<1"
    exponent = min(MAX_OCTAVE, math.floor(math.log2(min(value, 2.0**MAX_OCTAVE))) + 1)
    return f"<{2**exponent}"


def seconds(text: str) -> float | None:
    """Seconds in "90", "1.5", "2m", "1h"; None if it is no duration."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _SECONDS[match[2]] if match else None
