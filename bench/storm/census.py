"""Census: how many items lie in every container that an object of ours can reach."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "continuum_connector"
CONTAINERS = (dict, list, set, frozenset, tuple)


def count(root: object) -> dict[str, int]:
    """Items by `Class.attribute`, those of all its instances together, of what `root` reaches
    over objects of our package. Nested containers count with the one they lie in."""
    found: Counter[str] = Counter()
    known, left = {id(root)}, [root]
    while left:
        one = left.pop()
        for name, value in _attributes(one):
            for each in _ours(value, f"{type(one).__name__}.{name}", found):
                if id(each) not in known:
                    known.add(id(each))
                    left.append(each)
    return dict(found)


def num_objects() -> int:
    """Objects that Python's garbage collector knows, once it has collected."""
    gc.collect()
    return len(gc.get_objects())


def resident_bytes() -> int:
    """Of this process, in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from vars(one).items() if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                yield name, getattr(one, name)


def _ours(value: Any, path: str, found: Counter[str]) -> Iterator[object]:
    """Yield the objects of ours in a value, and count the items of containers on the way."""
    if isinstance(value, CONTAINERS) or hasattr(value, "popleft"):
        found[path] += len(value)
        for each in (*value, *value.values()) if isinstance(value, Mapping) else tuple(value):
            yield from _ours(each, path, found)
    elif type(value).__module__.startswith(PACKAGE) and not isinstance(value, type):
        yield value
