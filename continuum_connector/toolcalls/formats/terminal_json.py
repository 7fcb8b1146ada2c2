"""Terminal-Bench's Terminus: {"commands": [{"keystrokes": "ls\\n", "duration": 0.1}]}."""

from __future__ import annotations

from continuum_connector.toolcalls.arguments import RawCall
from continuum_connector.toolcalls.asked import MAX_CALLS

MAX_WAIT_S = 3600.0


def is_terminal(value: object) -> bool:
    """Whether a message is for a terminal."""
    return isinstance(value, dict) and isinstance(value.get("commands"), list)


def calls_of(value: dict[str, object], finished: bool) -> list[RawCall]:
    """The calls of such a message; none if it says that the task is done.

    `duration` is how long the agent leaves the terminal alone after the keys, in seconds: a
    sleep, whatever runs in there.
    """
    commands = value["commands"]
    assert isinstance(commands, list)
    items = [item for item in commands[:MAX_CALLS] if isinstance(item, dict)]
    keys = [item.get("keystrokes") for item in items]
    calls = [RawCall("", {"command": key}, finished) for key in keys if isinstance(key, str)]
    if not calls:
        done = value.get("task_complete") is True or not finished
        return [] if done else [_sleep(0.0, finished)]
    waits = [item.get("duration") for item in items]
    wait_s = sum(min(wait, MAX_WAIT_S) for wait in waits if isinstance(wait, int | float))
    return [*calls[: MAX_CALLS - 1], _sleep(wait_s, finished)] if wait_s >= 1 else calls


def _sleep(duration_s: float, finished: bool) -> RawCall:
    return RawCall("", {"command": f"sleep {duration_s:.3f}"}, finished)
