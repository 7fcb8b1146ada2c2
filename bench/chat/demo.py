"""The demo: agents on a real `vllm serve`, without and with ContinuumConnector, one table."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.chat.agents import ONE_TRY, agents
from bench.cli import any_number, positive, real, start, teaching_parser
from bench.serve import cli_ab, compare, results
from bench.serve.ab import Experiment
from bench.serve.server import ServerOptions
from bench.serve.tiny_model import make_model
from continuum_connector.tools.cli import ending

BLOCK_SIZE = 32
POOL_SHARE = 0.5  # of what all programs hold when each is half way: live contexts are twice it

TEACH = """\
what happens
  Each agent sends a growing context, reads the answer, and runs a tool for about a second
  before its next turn. Together they need about twice the KV cache the server has. Stock vLLM
  frees a finished turn's blocks, so a busy server has given them away when the tool returns,
  and the whole context is computed again. The connector pins them for a while in VRAM, keeps
  the rest in DRAM, and serves programs in their order of arrival.

reading the table
  JCT is a program's time from arrival to its last answer, tools included; TTFT is a turn's
  time to its first token, `first turns` that of a program's first. `computed`: prompt tokens that
  no tier had. All arms get the same requests. The folder has every turn, the server's metrics and
  report.html. (VRAM is the pool vLLM allocates, DRAM the connector's; on a CPU both are ordinary
  memory.) Exit status 1: a turn failed, or an answer differs from the first arm's.

examples
  make demo ARGS="--quick"
  make demo ARGS="--programs 20 --turns 4 --seed 3 --out runs/demo"
  make demo ARGS="--arms none,continuum:fixed_ttl"
                                            another policy; `continuum bench ab` has more arms
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms, print the table, return the exit status."""
    options = parse(argv)
    work = agents(options.programs, options.turns, options.rate)
    plans = [work.program(number, options.seed) for number in range(options.programs)]
    live = POOL_SHARE * sum(plan.num_tokens for plan in plans) / 2
    least = 1.2 * max(plan.num_tokens for plan in plans)
    blocks = options.blocks or math.ceil(max(live, least) / BLOCK_SIZE) + 1
    pool = f"pool of {blocks} blocks ({blocks * BLOCK_SIZE:,} tokens)"
    print(f"{work.name}, {pool}, seed {options.seed}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(f"this machine is busy (load {load:.1f} on {cores} cores): times will vary")
    pressures, dram_bytes = cli_ab.read_dram(options.dram)
    asked = Experiment(
        arms=cli_ab.read_arms(options.arms),
        pressures=pressures,
        dram_bytes=dram_bytes,
        model=make_model(),
        server=ServerOptions(num_blocks=blocks, block_size=BLOCK_SIZE),
        workload=work,
        patience=ONE_TRY,
        seed=options.seed,
    )
    state = cli_ab.run({options.out: asked})
    return ending.STOPPED if state == "interrupted" else verdict(options.out)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = teaching_parser("make demo ARGS=...", __doc__, TEACH)
    add = parser.add_argument
    add("--programs", type=positive, help="agents (12; quick: 5)")
    add("--turns", type=positive, help="turns of each agent (6; quick: 3)")
    add("--rate", type=real(0.001, 1e6), default=1.0, help="Poisson arrivals per second (1.0)")
    add("--seed", type=any_number, default=1, help="of contexts, arrivals and pauses (1)")
    add("--arms", default="none,continuum", help="as of `continuum bench ab` (none,continuum)")
    add("--blocks", type=positive, help=f"VRAM pool, blocks of {BLOCK_SIZE} tokens (half of need)")
    add("--dram", default="512MiB", help="what the connector has (512MiB)")
    add("--out", type=Path, help="result folder (below runs/, named by the time)")
    add("--quick", action="store_true", help="a small run; the server starts take most of it")
    options = parser.parse_args(argv)
    options.programs = options.programs or (5 if options.quick else 12)
    options.turns = options.turns or (3 if options.quick else 6)
    options.out = options.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    return options


def verdict(out: Path) -> int:
    """Say which turns failed, and whether answers are those of the first arm; 1 if not."""
    runs = results.load(out)
    wrong = [
        f"{run.run.title}: {turn.program} turn {turn.turn}: {turn.error}"
        for run in runs
        for turn in run.turns
        if turn.error
    ]
    arms = compare.columns(runs)
    for other in arms[1:]:
        alike = compare.sameness(arms[0], other)
        if alike.same < alike.of:
            wrong.append(f"{other.title}: {alike.of - alike.same} of {alike.of} answers differ")
    print("\n".join(wrong[:5]), end="\n" * bool(wrong), file=sys.stderr)
    return int(bool(wrong) or any(run.run.state != "done" for run in runs))


if __name__ == "__main__":
    start(main, "python -m bench.chat.demo")
