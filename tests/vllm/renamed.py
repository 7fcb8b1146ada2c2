"""Renamed: what this package sees where vLLM has renamed something; all others see it as ever.

A name is hidden from frames of our package alone. vLLM and the tests' own engine go on with it as
if they had been renamed along, so whatever fails afterwards fails because of us. There is no way
back: do it in a process that ends.
"""

from __future__ import annotations

import dis
import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from continuum_connector.vllm.touched import Touch

OURS = "continuum_connector"
Note = Callable[[type, str, str], None]


def is_ours(depth: int = 2) -> bool:
    return bool(sys._getframe(depth).f_globals.get("__name__", "").startswith(OURS))


def owner_of(touch: Touch) -> Any:
    module, _, kind = touch.owner.partition(":")
    found = importlib.import_module(module)
    return getattr(found, kind) if kind else found


class _Hidden:
    """An attribute of a class, for everybody but us."""

    def __init__(self, name: str, own: Any) -> None:
        self._name, self._own = name, own

    def __get__(self, holder: Any, kind: Any = None) -> Any:
        if is_ours():
            raise AttributeError(f"{kind} has no attribute {self._name!r}")
        get = getattr(type(self._own), "__get__", None)
        return self._own if get is None else get(self._own, holder, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)

    @property
    def __isabstractmethod__(self) -> bool:
        return getattr(self._own, "__isabstractmethod__", False)


class _HiddenSlot(_Hidden):
    """One that can be set, such as a slot or a property."""

    def __set__(self, holder: Any, value: Any) -> None:
        if is_ours():
            raise AttributeError(f"{type(holder)} has no attribute {self._name!r}")
        self._own.__set__(holder, value)


class _Fields:
    """`__dataclass_fields__` without one of them, for us alone."""

    def __init__(self, name: str, own: dict[str, Any]) -> None:
        self._own, self._less = own, {k: v for k, v in own.items() if k != name}

    def __get__(self, holder: Any, kind: Any = None) -> dict[str, Any]:
        return self._less if is_ours() else self._own


class _Reworded:
    """A method whose code stores the attribute under another name, for whoever reads the code."""

    def __init__(self, name: str, own: Any) -> None:
        self._own = own
        names = tuple(f"{each}_renamed" if each == name else each for each in own.__code__.co_names)
        self.__code__ = own.__code__.replace(co_names=names)

    def __get__(self, holder: Any, kind: Any = None) -> Any:
        return self._own.__get__(holder, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own(*args, **kwargs)


def rename(touch: Touch) -> None:
    """Hide the name, or each of its names, from us."""
    owner = owner_of(touch)
    for name in touch.any_of:
        if not isinstance(owner, type):
            _from_module(owner, name)
        elif issubclass(owner, enum.Enum):
            _member(owner, name)
        else:
            _attribute(owner, name)


def _from_module(module: Any, name: str, instead: Any = None) -> None:
    """Hide it, or let us find `instead`; the module itself looks into its own dictionary."""
    kind: Any = type("Renamed", (type(module),), {})

    def __getattribute__(self: Any, asked: str) -> Any:  # noqa: N807
        if asked == name and is_ours():
            if instead is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return instead
        return type(module).__base__.__getattribute__(self, asked)

    kind.__getattribute__ = __getattribute__
    module.__class__ = kind


class _Members:
    """An enumeration without one of its members."""

    def __init__(self, own: Any, name: str) -> None:
        self._own, self._name = own, name

    def __getattr__(self, asked: str) -> Any:
        if asked == self._name:
            raise AttributeError(asked)
        return getattr(self._own, asked)


def _member(owner: Any, name: str) -> None:
    less = _Members(owner, name)
    _from_module(sys.modules[owner.__module__], owner.__name__, less)
    for module in [m for n, m in sys.modules.items() if n.startswith(OURS)]:
        for key in [key for key, value in vars(module).items() if value is owner]:
            setattr(module, key, less)


def _attribute(owner: type, name: str) -> None:
    for kind in {*_family(owner)}:
        if name in vars(kind):
            own = vars(kind)[name]
            is_set = hasattr(type(own), "__set__")
            setattr(kind, name, (_HiddenSlot if is_set else _Hidden)(name, own))
        for key, value in list(vars(kind).items()):
            if isinstance(value, FunctionType) and name in _stored(value):
                setattr(kind, key, _Reworded(name, value))
        if name in vars(kind).get("__dataclass_fields__", ()):
            type.__setattr__(kind, "__dataclass_fields__", _Fields(name, kind.__dataclass_fields__))
    _hide_in_instances(owner, name)


def _family(owner: type) -> Iterator[type]:
    """The class, its bases and what derives from it, of vLLM's."""
    kinds = [*owner.__mro__]
    todo = [owner]
    while todo:
        below = type.__subclasses__(todo.pop())
        kinds += below
        todo += below
    return (kind for kind in kinds if kind.__module__.startswith("vllm"))


def _stored(function: Any) -> set[str]:
    found = dis.get_instructions(function)
    return {each.argval for each in found if each.opname == "STORE_ATTR"}


def _hide_in_instances(owner: type, name: str) -> None:
    get, put, drop = owner.__getattribute__, owner.__setattr__, owner.__delattr__
    shadow = f"_ours_{name}"

    def __getattribute__(self: Any, asked: str) -> Any:  # noqa: N807
        if asked != name:
            return get(self, asked)
        if is_ours():
            return get(self, shadow)
        mine = next((k for k in type(self).__mro__ if _is_of_vllm(k) and name in vars(k)), None)
        if mine is not None and any(name in vars(k) for k in _ours_of(self)):
            return vars(mine)[name].__get__(self, type(self))  # not what our subclass has
        return get(self, asked)

    def __setattr__(self: Any, asked: str, value: Any) -> None:  # noqa: N807
        put(self, shadow if asked == name and is_ours() else asked, value)

    def __delattr__(self: Any, asked: str) -> None:  # noqa: N807
        drop(self, shadow if asked == name and is_ours() else asked)

    owner.__getattribute__ = __getattribute__  # type: ignore[method-assign, assignment]
    if not hasattr(owner, "__struct_fields__") and "__slots__" not in vars(owner):
        owner.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
        owner.__delattr__ = __delattr__  # type: ignore[method-assign, assignment]


def _is_of_vllm(kind: type) -> bool:
    return kind.__module__.startswith("vllm")


def _ours_of(holder: Any) -> list[type]:
    return [kind for kind in type(holder).__mro__ if kind.__module__.startswith(OURS)]


_UNWATCHED = (enum.Enum, BaseException)


# --- who touches what ---------------------------------------------------------------------
def record(kinds: list[type], note: Note) -> None:
    """From now on `note(kind, name, file)` is told of each attribute of these classes that a frame
    of our package reads, sets or deletes."""
    for kind in sorted(kinds, key=lambda kind: len(kind.__mro__)):
        if not hasattr(kind.__getattribute__, "_tells"):  # as a class has it from its base, mostly
            _record(kind, note)


def _record(kind: type, note: Note) -> None:
    get, put, drop = kind.__getattribute__, kind.__setattr__, kind.__delattr__

    def tell(self: Any, name: str) -> None:
        module = sys._getframe(2).f_globals.get("__name__", "")
        if module.startswith(OURS) and not name.startswith("__"):
            note(type(self), name, module[len(OURS) + 1 :])

    def __getattribute__(self: Any, name: str) -> Any:  # noqa: N807
        tell(self, name)
        return get(self, name)

    __getattribute__._tells = True  # type: ignore[attr-defined]

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        tell(self, name)
        put(self, name, value)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807
        tell(self, name)
        drop(self, name)

    kind.__getattribute__ = __getattribute__  # type: ignore[method-assign, assignment]
    if not hasattr(kind, "__struct_fields__"):
        kind.__setattr__ = __setattr__  # type: ignore[method-assign, assignment]
        kind.__delattr__ = __delattr__  # type: ignore[method-assign, assignment]


def classes_of(modules: list[str]) -> list[type]:
    """The classes of these modules whose attributes can be watched."""
    named = [kind for name in modules for kind in vars(importlib.import_module(name)).values()]
    kinds = [kind for kind in named if isinstance(kind, type) and kind.__module__ in modules]
    return [kind for kind in dict.fromkeys(kinds) if not issubclass(kind, _UNWATCHED)]
