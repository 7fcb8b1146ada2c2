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

from bench.cli import any_number, positive, start, teaching_parser
from bench.common.tables import markdown

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
  python -m bench.storm --seed 7                               other agents
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Storm, print, return the exit status."""
    from bench.storm.judge import Verdict, judge  # vLLM, which takes seconds
    from bench.storm.run import fire

    options = parse(argv)
    try:
        run = fire(options.requests, options.seed, lambda text: print(text, file=sys.stderr))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    statuses = run.tally.by_status
    findings = [(each.what, each.verdict.value, each.text) for each in judge(run)]
    print(markdown(("requests", "ended with"), [(n, how) for how, n in sorted(statuses.items())]))
    print("\n".join(["", *run.tally.unexpected, markdown(("finding", "", ""), findings)]))
    if options.json:
        found = {"statuses": statuses, "findings": findings, "virtual_s": run.virtual_s}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
    return int(any(verdict == Verdict.WRONG.value for _, verdict, _ in findings))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = teaching_parser("python -m bench.storm", __doc__, TEACH)
    add = parser.add_argument
    add("--requests", type=positive, default=1500, help="in all (1500)")
    add("--seed", type=any_number, default=1, help="of agents, words, garbage and times (1)")
    add("--json", type=Path, metavar="FILE", help="write that there, too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    start(main, "python -m bench.storm")
