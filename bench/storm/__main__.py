"""A storm: agents of every kind at a real server at once, and what it holds, grows by and leaves.

Fires chats, completions, responses and messages of many turns at `vllm serve` with the connector
and all that it may have (both tiers, middleware, trace, state, switch): forks, compactions, two
answers at once, streams, stop strings, hang-ups after 20 to 500 ms, tenants' salts, hints of any
JSON type and size, prefix cache resets, the switch off and on. Then the same at stock vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.cli import any_number, positive, start, teaching_parser, whole
from bench.serve.server import ServerError
from bench.serve.tiny_model import make_model
from bench.storm.agents import Force
from bench.storm.arm import OURS, STOCK, ArmRun, Say, run_arm
from bench.storm.judge import Finding, Verdict, judge
from bench.storm.plan import MODEL
from bench.storm.report import as_json, print_all
from continuum_connector.config import POLICIES

SMOKE = 150  # requests

TEACH = """\
what must be true (exit status 1 otherwise)
  statuses    every request ends with 200 or 400, unless we hung up
  log         no traceback in the server's log but vLLM's of refused requests, and stock's
  answers     a few questions are asked again and again, on both servers: always one answer
  connector   there were pins, stores and loads: one that does nothing would pass the rest
  ledger      idle for max_ttl_s, the server holds no pin, block or transfer; its books close
  memory      over the second half of the storm no process grows faster than stock's: over the
              whole storm by less than 5 % of stock's level. `noise` is what the line may tilt
              by without a cause; above 5 %, or below 1,000 requests: not seen
  hits        tokens found of tokens looked up, in the last quarter of the requests, are at
              most 5 % of all fewer than in the first half

with --virtual there is no server: vLLM's own scheduler, all of our scheduler half, our middleware
and vLLM's schemas, in virtual time; steps, copies and answers are made up. Then, besides:
  ledger      every block of VRAM is free once it is idle
  containers  no container of ours has more items in the last quarter than around the middle
  memory      this process, in which the agents are too, grows over the storm by less than 5 %

examples
  python -m bench.storm                             both servers
  python -m bench.storm --smoke                     a small one, ours alone
  python -m bench.storm --requests 20000 --json storm.json
  python -m bench.storm --virtual --requests 100000 --json storm.json
                                                    seven minutes of a quiet core
  python -m bench.storm --seed 7 --concurrency 64   other agents, and more of them at once
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Storm, print, return the exit status."""
    options = parse(argv)
    force = Force(options.requests, options.seed, options.concurrency, options.policy)
    progress = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a `kill` stops the servers too
    try:
        runs, findings = _run(
            options, force, lambda text: progress.print(text, markup=False, soft_wrap=True)
        )
    except KeyboardInterrupt:
        progress.print("stopped; no server is left running")
        return 130
    except ServerError as error:
        progress.print(str(error), style="red", markup=False)
        return 1
    print_all(Console(width=None if sys.stdout.isatty() else 140), runs, findings)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(force, runs, findings), indent=1))
    return int(any(finding.verdict is Verdict.WRONG for finding in findings))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; --smoke only changes defaults."""
    parser = teaching_parser("python -m bench.storm", __doc__, TEACH)
    add = parser.add_argument
    add("--requests", type=positive, help=f"at each server (1500; smoke: {SMOKE})")
    add("--seed", type=any_number, default=1, help="of agents, words, garbage and times (1)")
    add(
        "--concurrency",
        type=whole(1, 10_000),
        default=24,
        help="agents at once, forks not counted (24)",
    )
    add("--policy", choices=POLICIES, default=Force.policy, help=f"what decides ({Force.policy})")
    add("--no-stock", action="store_true", help="ours alone: nothing to compare memory with")
    add("--virtual", action="store_true", help="no server: vLLM's scheduler in virtual time")
    add("--smoke", action="store_true", help="small: ours alone; about a minute")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(argv)
    options.requests = options.requests or (SMOKE if options.smoke else 1500)
    options.no_stock |= options.smoke
    return options


def _run(options: argparse.Namespace, force: Force, say: Say) -> tuple[list[ArmRun], list[Finding]]:
    """Everything that was asked for, or what there was before a server did not start."""
    if options.virtual:
        return _run_virtual(force, say)
    model = make_model(MODEL)
    runs: list[ArmRun] = []
    failed: list[Finding] = []
    arms = (OURS,) if options.no_stock else (OURS, STOCK)
    try:
        runs.extend(run_arm(arm, model, force, say) for arm in arms)
    except ServerError as error:
        if not runs:
            raise
        failed.append(Finding("start", Verdict.WRONG, str(error).partition("\n")[0]))
    stock = runs[1] if len(runs) > 1 else None
    return runs, [*judge(runs[0], stock), *failed]


def _run_virtual(force: Force, say: Say) -> tuple[list[ArmRun], list[Finding]]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    from bench.storm.fake_arm import judge_fake, run_fake  # vLLM, which takes seconds

    run = run_fake(force, say)
    return [run], judge_fake(run)


if __name__ == "__main__":
    start(main, "python -m bench.storm")
