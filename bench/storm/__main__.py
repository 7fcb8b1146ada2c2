"""A storm: agents of every kind at vLLM's scheduler at once; what it holds, grows by and leaves.

Fires chats, completions, responses and messages of many turns, in virtual time, at vLLM's own
scheduler and schemas, all of our scheduler half and our middleware: forks, compactions, two
answers at once, streams, stop strings, hang-ups after 20 to 500 ms, tenants' salts, hints of any
JSON type and size, prefix cache resets, the switch off and on. Steps, copies and answers are made
up.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

from rich.console import Console

from bench.cli import any_number, positive, start, teaching_parser, whole
from bench.storm.agents import Force
from bench.storm.judge import Verdict, judge
from bench.storm.report import as_json, print_all
from continuum_connector.config import POLICIES

TEACH = """\
what must be true (exit status 1 otherwise)
  statuses    every request ends with 200 or 400, unless we hung up
  connector   there were pins, stores and loads: one that does nothing would pass the rest
  ledger      idle for max_ttl_s, the server holds no pin, block or transfer, every block of VRAM
              is free, and its books close
  hits        tokens found of tokens looked up, in the last quarter of the requests, are at
              most 5 % of all fewer than in the first half
  containers  no container of ours has more items in the last quarter than around the middle
  memory      this process, in which the agents are too, grows over the storm by less than 5 %
  Of a small storm the last ones are not seen.

examples
  python -m bench.storm --requests 100000 --json storm.json    seven minutes of a quiet core
  python -m bench.storm --seed 7 --concurrency 64   other agents, and more of them at once
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Storm, print, return the exit status."""
    from bench.storm.fake_arm import run_fake  # vLLM, which takes seconds

    options = parse(argv)
    force = Force(options.requests, options.seed, options.concurrency, options.policy)
    progress = Console(stderr=True, highlight=False)
    try:
        run = run_fake(force, lambda text: progress.print(text, markup=False, soft_wrap=True))
    except KeyboardInterrupt:
        progress.print("stopped")
        return 130
    findings = judge(run)
    print_all(Console(width=None if sys.stdout.isatty() else 140), run, findings)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(as_json(force, run, findings), indent=1))
    return int(any(finding.verdict is Verdict.WRONG for finding in findings))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = teaching_parser("python -m bench.storm", __doc__, TEACH)
    add = parser.add_argument
    add("--requests", type=positive, default=1500, help="in all (1500)")
    add("--seed", type=any_number, default=1, help="of agents, words, garbage and times (1)")
    add(
        "--concurrency",
        type=whole(1, 10_000),
        default=24,
        help="agents at once, forks not counted (24)",
    )
    add("--policy", choices=POLICIES, default=Force.policy, help=f"what decides ({Force.policy})")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    start(main, "python -m bench.storm")
