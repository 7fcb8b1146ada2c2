"""How much KV a load keeps alive at a time: what DRAM is measured by.

A program counts with its longest context. Which programs live at the same time follows from how
they arrive:

turn by turn    all of them
closed loop     as many as work at once; the largest ones, wherever they come
open loop       those whose arrivals and planned pauses overlap. What the server takes comes on
                top, so a slow one has more alive than that
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path

from bench.serve.load import Load
from bench.serve.results import ResultError
from bench.serve.server import DTYPE_BYTES


def live(load: Load) -> int | None:
    """The most tokens that are alive at a time; None where nothing says how many programs there
    are."""
    most = load.most_programs()
    if most is None:
        return None
    if load.arrivals.open_loop:
        return _overlap(load, most)
    sizes = sorted((load.plan(number).num_tokens for number in range(most)), reverse=True)
    return sum(sizes[: load.arrivals.at_once or most])


def longest_context(load: Load) -> int:
    """Tokens of the longest context of any program, its last answer included."""
    return max(load.plan(number).num_tokens for number in range(load.most_programs() or 0))


def _overlap(load: Load, most: int) -> int:
    """The largest sum over programs at work at one moment, were the server to take no time."""
    changes: list[tuple[float, int, int]] = []  # when; 0 comes, 1 goes: who goes is still there
    for number, arrival_s in enumerate(load.arrivals.times_s[:most]):
        plan = load.plan(number)
        end_s = arrival_s + sum(turn.gap_s for turn in plan.turns)
        changes += [(arrival_s, 0, plan.num_tokens), (end_s, 1, plan.num_tokens)]
    deltas = (-tokens if goes else tokens for _, goes, tokens in sorted(changes))
    return max(accumulate(deltas))


_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
_BROKEN += (RecursionError,)  # config.json may hold anything


def kv_bytes_per_token(model: Path, dtype: str) -> int:
    """Of a model with full attention in every layer, from its config.json."""
    try:
        config = json.loads((model / "config.json").read_text())
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(2 * config["num_hidden_layers"] * heads * head_dim * DTYPE_BYTES[dtype])
    except _BROKEN as error:
        raise ResultError(
            f"{model / 'config.json'} does not say how much KV a token needs ({error!r}); "
            "give --model a local folder"
        ) from None
