"""Do answers stay the same with the connector? A real `vllm serve`, twice, greedy, token by token.

Exit status 0: every answer is the same and KV was loaded from DRAM. 1: it was not loaded, or a
load failed, or an answer differs. 2: answers differ, but stock vLLM does not agree with itself
either when it computes them anew, so the comparison says nothing: use --dtype float32. Or
--graphs was asked for and nothing was captured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cli import teaching_parser
from bench.serve.server import VllmServer
from bench.serve.tiny_model import make_model
from tests.server.helpers import Dialog, dialogs, dram_hits, eventually, in_flight, play

CAPTURED = "Graph capturing finished"  # vLLM's own words

Answers = list[list[list[int]]]

TEACH = """\
what happens
  Programs of several turns take turns on a VRAM pool that holds about half of them, so that
  their blocks leave VRAM and come back from DRAM. The first arm is stock vLLM; it answers
  twice, the second time without any cache, to see whether it agrees with itself. The second
  arm is the same server with the connector.

examples
  python -m tests.gpu.serve_equal                            the tiny model, its own weights
  python -m tests.gpu.serve_equal --graphs                   compiled, in CUDA graphs
  python -m tests.gpu.serve_equal --model FOLDER --dtype bfloat16 -- --load-format dummy
  Dummy weights can answer one token over and over; the number of different tokens is printed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run both arms; the exit status says whether they agree."""
    options = parse(argv)
    model = options.model or make_model()
    programs = dialogs(options.programs, rounds=3, first=700, tool=300)
    common = fields(options)
    with VllmServer(model, "equal-stock", **common) as stock:
        expected = play(stock, programs)
        anew = play(stock, programs, cold=True)
    connector = {"dram_bytes": options.dram, "ttl_s": 50}
    with VllmServer(model, "equal-continuum", connector=connector, **common) as ours:
        if options.graphs and CAPTURED not in ours.log.read_text(errors="replace"):
            print("NO VERDICT: --graphs, but the server's log tells of no graph that was captured")
            return 2
        found, num_hit, num_failed = ask_ours(ours, programs)
    return verdict(expected, anew, found, num_hit, num_failed)


def fields(options: argparse.Namespace) -> dict[str, Any]:
    """How both servers are started."""
    return {
        "num_blocks": options.blocks,
        "dtype": options.dtype,
        "eager": not options.graphs,
        "args": tuple(options.serve),
        "start_timeout_s": 900.0,
    }


def ask_ours(server: VllmServer, programs: Sequence[Dialog]) -> tuple[Answers, float, float]:
    """Answers, prompt tokens that came from DRAM, and loads that failed.

    Counters travel with a step's statistics, so one more step brings the last.
    """
    found = play(server, programs)
    eventually(lambda: in_flight(server) == 0)
    play(server, dialogs(1, rounds=1, first=40, tool=1))
    failed = server.metric("continuum:loads_total", outcome="failed")
    return found, dram_hits(server), failed


def verdict(
    expected: Answers, anew: Answers, found: Answers, num_hit: float, num_failed: float
) -> int:
    """Say what was seen; the exit status."""
    num_tokens = len({token for turns in expected for turn in turns for token in turn})
    of = sum(len(turns) for turns in expected)
    print(f"{of} answers, {num_tokens} different tokens, {num_hit:.0f} prompt tokens from DRAM")
    print(f"equal, stock computed anew: {same(expected, anew)} of {of}")
    print(f"equal, with the connector:  {same(expected, found)} of {of}")
    if num_hit <= 0 or num_failed:
        print(f"FAIL: nothing was loaded from DRAM, or {num_failed:.0f} loads failed")
        return 1
    if found == expected:
        print("PASS")
        return 0
    if anew != expected:
        print("NO VERDICT: stock vLLM differs from itself; use --dtype float32")
        return 2
    print("FAIL: answers differ")
    return 1


def same(a: Answers, b: Answers) -> int:
    """How many answers are equal."""
    return sum(
        left == right
        for turns, others in zip(a, b, strict=True)
        for left, right in zip(turns, others, strict=True)
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to `vllm serve`."""
    parser = teaching_parser("python -m tests.gpu.serve_equal", __doc__, TEACH)
    add = parser.add_argument
    add("--model", type=Path, help="folder of a model (the tiny Llama)")
    add("--dtype", default="float32", help="float32: batching hardly changes an answer (float32)")
    add("--programs", type=int, default=4, help="programs of three turns, 1,400 tokens each (4)")
    add("--blocks", type=int, default=129, help="VRAM pool, blocks of 32 tokens (129)")
    add("--dram", default="2GiB", help="the connector's dram_bytes (2GiB)")
    add("--graphs", action="store_true", help="compiled and in CUDA graphs (eager, to start soon)")
    add("serve", nargs="*", help="after `--`: more arguments of `vllm serve`")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
