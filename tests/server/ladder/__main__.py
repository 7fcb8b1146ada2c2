"""The corruption ladder: is any answer wrong, whatever happens to a conversation's KV?

    python -m tests.server.ladder --model gpt_oss
    python -m tests.server.ladder --model mamba2 --probes pinned,loaded

Probes are played on two servers with the connector, of little VRAM and little DRAM: `main` (with
checksums) and `small` (batches of 128 tokens, no asynchronous scheduling). A control, a server
without the connector whose caches have nothing, then answers every prompt again, and the answers
must be the same. Last comes the negative control: with one byte of a loaded block wrong in DRAM and
no checksum, of each KV group, the answers must differ, or the ladder would see nothing.

Ends with status 0 if all answers are equal and the negative control differs, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.serve.server import VllmServer
from tests.server.helpers import eventually, in_flight, ledger_closes, log_of
from tests.server.ladder.compare import Difference, compare
from tests.server.ladder.families import (
    FAMILIES,
    Family,
    connector_options,
    control_options,
    model_of,
)
from tests.server.ladder.player import OURS, Asked, Player, ask_cold
from tests.server.ladder.probes import PROBES, corrupt

SMALL = (
    *("goes_on", "pinned", "loaded", "long_answer", "long_answer_loaded", "fork_at_once"),
    *("compaction_from_dram", "turn_ends_at_a_boundary", "preemption", "everybody_at_once"),
    *("partly_in_vram", "failed_load", "edit_of_the_last_message_from_dram"),
)
FLIPPED = "one byte flipped, group "


@dataclass
class Row:
    """What became of a probe: why it proved nothing, "" if it did; then its answers."""

    why: str
    seconds: float


def main() -> int:
    options = parsed()
    family = FAMILIES[options.model]
    with tempfile.TemporaryDirectory() as folder:
        asked, rows = climb(family, Path(folder), options.probes, options.match_unit)
        control = answer_again(family, Path(folder), asked)
    return report(family, asked, control, rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.server.ladder", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=FAMILIES, default="llama")
    parser.add_argument("--probes", type=chosen, default=tuple(PROBES), help="all, or some names")
    parser.add_argument("--match-unit", type=int, default=0, help="vLLM's --prefix-match-unit")
    return parser.parse_args()


def chosen(text: str) -> tuple[str, ...]:
    names = tuple(PROBES) if text == "all" else tuple(text.split(","))
    if unknown := [each for each in names if each not in PROBES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(PROBES)}")
    return names


def climb(
    family: Family, folder: Path, names: Sequence[str], match_unit: int = 0
) -> tuple[list[Asked], dict[str, Row]]:
    """Play on both servers, one after the other; every answer, and a row per probe."""
    unit = ("--prefix-match-unit", str(match_unit)) if match_unit else ()
    main = connector_options(family, folder, checksum_every=1)
    main["args"] = ("--async-scheduling", *unit)
    small = connector_options(family, folder, checksum_every=0)
    small |= {"args": ("--no-async-scheduling", *unit), "max_num_batched_tokens": 128}
    flips = {
        f"{FLIPPED}{group}": partial(corrupt, group=group) for group in range(family.num_groups)
    }
    asked: list[Asked] = []
    rows: dict[str, Row] = {}
    for server, options, probes in (
        ("main", main, {name: PROBES[name] for name in names}),
        ("small", small, {name: PROBES[name] for name in names if name in SMALL} | flips),
    ):
        with VllmServer(model_of(family), f"ladder-{server}", **options) as running:
            player = Player(running, family, folder)
            for name, probe in probes.items():
                if not running.alive():  # what was answered until then is compared all the same
                    rows[f"{server}:{name}"] = Row("the server is dead", 0.0)
                    continue
                rows[f"{server}:{name}"] = play(player, f"{server}:{name}", probe)
            asked += player.asked
    return asked, rows


def play(player: Player, name: str, probe: Any) -> Row:
    began = time.monotonic()
    why = ""
    try:
        player.begin(name)
        probe(player)
        eventually(lambda: not in_flight(player.server))
        assert ledger_closes(player.server.metrics()), "a pin or a transfer is unaccounted for"
        assert player.server.healthy(), "the server died"
        assert "Traceback" not in log_of(player.server), "there is a traceback in its log"
    except (AssertionError, OSError) as error:
        why = str(error) or type(error).__name__
    row = Row(why.splitlines()[0] if why else "", time.monotonic() - began)
    print(f"{name:48} {row.seconds:5.1f} s  {row.why}", flush=True)
    return row


def answer_again(family: Family, folder: Path, asked: Sequence[Asked]) -> list[Asked]:
    """What the control says to the same prompts; in float32 many at once, for that is equal."""
    bodies = [{k: v for k, v in each.body.items() if k not in OURS} for each in asked]
    names = [json.dumps(body) for body in bodies]  # most probes of `small` ask what `main` asked
    unlike = dict(zip(names, bodies, strict=True))
    with VllmServer(
        model_of(family), "ladder-control", **control_options(family, folder)
    ) as server:
        answer = partial(ask_cold, server)
        with ThreadPoolExecutor(8 if family.is_exact else 1) as threads:
            found = threads.map(answer, unlike.values(), map(str, range(len(unlike))))
            answers = dict(zip(unlike, found, strict=True))
    return [answers[name] for name in names]


def report(
    family: Family, asked: Sequence[Asked], control: Sequence[Asked], rows: dict[str, Row]
) -> int:
    print(f"\n{'probe':48} turns    vram    dram  equal?")
    wrong = 0
    largest, num_parted = 0.0, 0
    for name, row in rows.items():
        pairs = [(a, c) for a, c in zip(asked, control, strict=True) if a.probe == name]
        found = [compare(a, c, family.is_exact) for a, c in pairs]
        told = verdict(name, row, found)
        wrong += told not in ("yes", "differs, as it must")
        if FLIPPED not in name:
            largest = max([largest, *(each.largest for each in found)])
            num_parted += sum(each.num_parted for each in found)
        vram, dram = sum(a.vram for a, _ in pairs), sum(a.dram for a, _ in pairs)
        print(f"{name:48} {len(pairs):5} {vram:7} {dram:7}  {told}")
    print(f"\n{len(asked)} answers; logprobs differ by {largest:.3g}; {num_parted} part at a tie")
    print(f"{wrong} of {len(rows)} probes are wrong" if wrong else "no probe is wrong")
    return int(wrong > 0)


def verdict(name: str, row: Row, found: Sequence[Difference]) -> str:
    whys = [f"answer {i}: {each.why}" for i, each in enumerate(found) if each.why]
    if FLIPPED in name:
        if row.why:
            return f"NOT PLAYED: {row.why}"
        return "differs, as it must" if whys else "THE FLIP CHANGED NOTHING"
    if whys:
        return f"WRONG: {whys[0]}" + (f" ({len(whys)} of {len(found)} answers)" if whys[1:] else "")
    return f"NOT PROVEN: {row.why}" if row.why else "yes"


if __name__ == "__main__":
    sys.exit(main())
