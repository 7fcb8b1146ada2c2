"""Timed: how long each of vLLM's hooks takes us, for `continuum:hook_seconds`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

Hook = TypeVar("Hook", bound=Callable[..., Any])


def timed(label: str) -> Callable[[Hook], Hook]:
    """Count the seconds spent in a hook, for `continuum:hook_seconds`."""

    def wrap(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return hook(self, *args, **kwargs)
            finally:
                self.account.observe("hook_seconds", time.perf_counter() - began, label)

        return cast(Hook, measured)

    return wrap
