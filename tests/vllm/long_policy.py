"""The policy machine of policy_machine.py for a number of traces, seed by seed.

    nice python -m tests.vllm.long_policy --traces 100000 --version 0.32.0
    nice python -m tests.vllm.long_policy --traces 100000 --first-seed 812 --go-on
    nice python -m tests.vllm.long_policy --traces 10000 --vary

A line per hundred traces says how far it is. A trace that breaks a rule is told with a small one
that does, as a snippet to run again, and ends the run, unless `--go-on`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.vllm.long_machine import enter


def main(arguments: list[str]) -> int:
    """Return how many traces broke a rule, at most 1 without `--go-on`."""
    options = _options(arguments)
    enter(options.version, __spec__.name)
    from tests.vllm.policy_draws import draw, draw_interrupted, vary
    from tests.vllm.policy_machine import broken
    from tests.vllm.policy_shrink import MAX_TRIES, report
    from tests.vllm.test_policy_controls import TRACES

    logging.disable(logging.WARNING)
    began, failed, rules = time.monotonic(), [], Counter[str]()
    for number in range(options.traces):
        seed = options.first_seed + number
        drawn = draw_interrupted if options.interrupt else draw
        trace = vary(seed, TRACES) if options.vary else drawn(seed)
        if found := broken(trace):
            failed.append(seed)
            rules.update(found.keys())
            max_tries = 0 if options.no_shrink else MAX_TRIES
            print(
                f"seed {seed} {sorted(trace.kinds)}: {report(trace, found, max_tries)}",
                flush=True,
            )
            if not options.go_on:
                break
        if number % 100 == 99:
            seconds = time.monotonic() - began
            print(f"seed {seed}: {number + 1:,} traces, {seconds:.0f} s, {dict(rules)}", flush=True)
    print(
        f"{number + 1:,} traces; rules broken: {dict(rules) or 'none'}; seeds: {failed or 'none'}"
    )
    return len(failed)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.long_policy")
    parser.add_argument("--traces", type=int, default=100_000)
    parser.add_argument("--version", help="of vLLM, from .cache/vllm; else the one installed")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--vary", action="store_true", help="traces near those that find faults")
    parser.add_argument("--interrupt", action="store_true", help="clients interrupt answers")
    parser.add_argument("--go-on", action="store_true", help="after a trace that broke a rule")
    parser.add_argument("--no-shrink", action="store_true", help="tell the trace as it was drawn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
