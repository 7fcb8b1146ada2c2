"""Rollouts: the arms in every cell of rollouts.toml, and whether the aims hold.

    python -m bench.sim.rollouts --seeds dev --out runs/rollouts.jsonl
    python -m bench.sim.rollouts --cells 'sync/*' --arms stock,simple+order,adaptive

Per cell and arm, as the seeds' means over the best rival's: trajectories per second, above 1 is
better; the longest batch, below 1 is better; the share of prompts that was computed; in seconds by
how much a batch's last trajectory was later than nine of ten. A run that is in `--out` is not
repeated, unless the code has changed since.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported

from bench.cli import start
from bench.sim import matrix
from bench.sim.batches import BATCH_MAX, LATE_BY, RATE
from bench.sim.cells import load_matrix
from bench.sim.job import Result
from bench.sim.result import RunRecord
from bench.sim.verdict import is_rival

PATH = Path(__file__).with_suffix(".toml")
ARMS = "stock,stock+order,simple+order,offloading+order,adaptive"

Runs = Mapping[str, Mapping[str, Sequence[RunRecord]]]  # by cell and arm, a run per seed


def main(arguments: Sequence[str]) -> int:
    """Run what is missing and print the table; returns the exit code."""
    parser = matrix.options("rollouts", __doc__, ARMS)
    these = matrix.ran(parser, parser.parse_args(arguments), load_matrix(PATH))
    print("\n".join(table(by_cell(these.results))))
    print(these.done, file=sys.stderr)
    return these.done.exit_code


def by_cell(results: Iterable[Result]) -> Runs:
    """What ended, by cell and arm."""
    runs: dict[str, dict[str, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for each in results:
        if each.record is not None:
            runs[str(each.job.params["cell"])][each.job.arm].append(each.record)
    return runs


def table(runs: Runs) -> Iterator[str]:
    """Yield the lines of a Markdown table; **bold**: the rival that the others are over."""
    yield "| cell | arm | per second | over best | batch max, s | over best | late, s | computed |"
    yield "|---|---|---|---|---|---|---|---|"
    for cell, arms in runs.items():
        rivals = [arm for arm in arms if is_rival(arm)] or list(arms)
        best = max(rivals, key=lambda arm: _mean(arms[arm], RATE))
        quickest = min(_mean(arms[arm], BATCH_MAX) for arm in rivals)
        for arm, records in arms.items():
            rate, longest = _mean(records, RATE), _mean(records, BATCH_MAX)
            over = f"{rate / _mean(arms[best], RATE):.2f}", f"{longest / quickest:.2f}"
            prompts = sum(each.num_prompt_tokens for each in records)
            computed = sum(each.num_computed_tokens for each in records) / prompts
            yield (
                f"| {cell} | {f'**{arm}**' if arm == best else arm} | {rate:.3f} | {over[0]} | "
                f"{longest:.0f} | {over[1]} | {_mean(records, LATE_BY):.0f} | {computed:.0%} |"
            )


def _mean(records: Sequence[RunRecord], name: str) -> float:
    return fmean(each.extra[name] for each in records)


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.rollouts")
