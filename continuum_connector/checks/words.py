"""How numbers are said in lines: as the native library says them (csrc/available.cpp)."""

from __future__ import annotations

from collections.abc import Sequence


def size(num_bytes: float) -> str:
    """ "12.0 GiB", "8.0 MiB", "64.0 KiB"."""
    value, units = num_bytes / 1024, ["GiB", "MiB", "KiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop()
    return f"{value:.1f} {units[-1]}"


def several(singular: str, number: int) -> str:
    """ "1 GPU", "2 GPUs"."""
    return f"{number:,} {singular}{'' if number == 1 else 's'}"


def listed(numbers: Sequence[int]) -> str:
    """ "0", "0, 1"."""
    return ", ".join(map(str, numbers))


def numbers_of(text: str) -> set[int]:
    """What the kernel means by "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found
