"""The demo: agents on a real `vllm serve`, without and with ContinuumConnector, one table."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.chat.agents import pool_blocks, run_agents, touch
from bench.chat.plan import Agents
from bench.chat.table import as_json, make_table, same_outputs
from bench.cli import any_number, names_of, positive, real, start, teaching_parser
from bench.common.plans import ProgramPlan
from bench.serve.metrics import delta
from bench.serve.progress import Progress
from bench.serve.results import Loaded
from bench.serve.server import ServerError, VllmServer
from bench.serve.tiny_model import LLAMA, make_model
from continuum_connector.config import POLICIES

BLOCK_SIZE = 32
POOL_SHARE = 0.5  # of what all programs hold when each is half way: live contexts are twice it
ARMS = {"stock": "vLLM", "continuum": "+ ContinuumConnector"}

TEACH = """\
what happens
  Each agent sends a growing context, reads the answer, and runs a tool for about a second
  before its next turn. Together they need about twice the KV cache the server has. Stock vLLM
  frees a finished turn's blocks, so a busy server has given them away when the tool returns,
  and the whole context is computed again. The connector pins them for a while in VRAM, keeps
  the rest in DRAM, and serves programs in their order of arrival.

reading the table
  JCT is a program's time from arrival to its last answer, tools included; TTFT is a turn's
  time to its first token. Prompt tokens are split by where their KV came from. A pin ends
  `returned` when the next turn uses it, `expired` by its TTL, `pressure` when another request
  needed the room, `program_done` after the last turn. Both arms get the same requests.
  (VRAM is the pool vLLM allocates, DRAM the connector's; on a CPU both are ordinary memory.)

examples
  make demo ARGS="--quick"
  make demo ARGS="--programs 20 --turns 4 --seed 3 --json runs/demo.json"
  make demo ARGS="--policy fixed_ttl"
  make demo ARGS="--arms continuum --dram 0"         pins only, no DRAM tier
  make demo ARGS="--arms stock,stock"                how much two equal runs differ
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms, print the table, return the exit status."""
    options = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    # A `kill` stops the servers as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return _run(options, console)
    except KeyboardInterrupt:
        console.print("stopped; no server is left running")
        return 130
    except ServerError as error:
        console.print(str(error), style="red", markup=False)
        return 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; --quick only changes defaults."""
    parser = teaching_parser("make demo ARGS=...", __doc__, TEACH)
    add = parser.add_argument
    add("--programs", type=positive, help="agents (12; quick: 5)")
    add("--turns", type=positive, help="turns of each agent (6; quick: 3)")
    add("--rate", type=real(0.001, 1e6), default=1.0, help="Poisson arrivals per second (1.0)")
    add("--seed", type=any_number, default=1, help="of contexts, arrivals and pauses (1)")
    add(
        "--arms",
        type=names_of(ARMS, "an arm"),
        default="stock,continuum",
        help="any of: " + ", ".join(ARMS),
    )
    add("--blocks", type=positive, help=f"VRAM pool, blocks of {BLOCK_SIZE} tokens (half of need)")
    add("--dram", default="512MiB", help="the connector's dram_bytes (512MiB)")
    add("--policy", choices=POLICIES, default="adaptive", help="what decides (adaptive)")
    add("--json", type=Path, metavar="FILE", help="write every turn and counter there")
    add("--quick", action="store_true", help="a small run; the server starts take most of it")
    options = parser.parse_args(argv)
    options.programs = options.programs or (5 if options.quick else 12)
    options.turns = options.turns or (3 if options.quick else 6)
    return options


def _run(options: argparse.Namespace, console: Console) -> int:
    work = Agents(options.programs, options.turns, options.seed, options.rate, vocab=LLAMA.vocab)
    plans = work.plan()
    live = POOL_SHARE * sum(plan.num_tokens for plan in plans) / 2
    blocks = options.blocks or pool_blocks(live, plans, BLOCK_SIZE)
    model = make_model()
    title = (
        f"{work.programs} programs x {work.turns} turns, pool of {blocks} blocks "
        f"({blocks * BLOCK_SIZE:,} tokens), seed {work.seed}"
    )
    console.print(title)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        console.print(f"this machine is busy (load {load:.1f} on {cores} cores): times will vary")
    arms: list[Loaded] = []
    for name in options.arms:
        connector = None
        if name == "continuum":
            connector = {"dram_bytes": options.dram, "policy": options.policy}
        server = VllmServer(
            model, f"demo-{len(arms)}-{name}", num_blocks=blocks, connector=connector
        )
        arms.append(run_arm(server, _label(name, arms), plans, console))
    console.print(make_table(title, arms))
    if options.json:
        _write_json(options.json, work, blocks, arms)
    return _verdict(arms, console)


def run_arm(
    server: VllmServer, label: str, plans: Sequence[ProgramPlan], console: Console
) -> Loaded:
    """Start the server, run the agents, read what the server counted, stop it."""
    num_turns = sum(len(plan.turns) for plan in plans)
    console.print(f"{label}: server log in {os.path.relpath(server.log)}")
    with Progress(console, label, num_turns) as progress:
        progress.say("starting the server (half a minute)")
        with server:
            touch(server)  # the first request of a server pays for lazy imports
            before = server.metrics()
            progress.say("agents at work")
            arm = asyncio.run(
                run_agents(server.url, plans, lambda turn: progress.turn(bool(turn.error)))
            )
            after = server.metrics()
            # Connector counters travel with a step's statistics: one more step brings the last.
            touch(server)
            last = server.metrics()
        arm.added = delta(after, before) | {
            key: value
            for key, value in delta(last, before).items()
            if key[0].startswith("continuum:")
        }
        progress.say(f"done in {arm.run.wall_s:.0f} s")
    arm.run.title, arm.run.server_start_s = label, server.start_s
    arm.run.settings = {"connector": server.options.connector is not None}
    return arm


def _label(name: str, so_far: Sequence[Loaded]) -> str:
    again = sum(arm.run.title.startswith(ARMS[name]) for arm in so_far)
    return f"{ARMS[name]} ({again + 1})" if again else ARMS[name]


def _verdict(arms: Sequence[Loaded], console: Console) -> int:
    """Say what went wrong, if anything did; the exit status is 1 then."""
    status = 0
    for arm in arms:
        for turn in [turn for turn in arm.turns if turn.error][:5]:
            line = f"{arm.run.title}: {turn.program} turn {turn.turn}: {turn.error}"
            console.print(line, style="red", markup=False)
            status = 1
        same, of = same_outputs(arm, arms[0])
        if same != of:
            console.print(f"{arm.run.title}: {of - same} of {of} answers differ", style="red")
            status = 1
    return status


def _write_json(path: Path, work: Agents, blocks: int, arms: Sequence[Loaded]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "workload": asdict(work),
        "pool_blocks": blocks,
        "block_size": BLOCK_SIZE,
        "model": asdict(LLAMA),
        "versions": {name: version(name) for name in ("vllm", "torch", "continuum-connector")},
        "machine": {"cpus": os.cpu_count(), "system": platform.platform()},
        "arms": [as_json(arm) for arm in arms],
    }
    path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    start(main, "python -m bench.chat.demo")
