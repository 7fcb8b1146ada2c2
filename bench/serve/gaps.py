"""How evenly tokens come: a histogram of the gaps between them, an arm beside the next.

A step that takes longer shows as a gap in every stream that it serves, so the tail of this is what
users see of a connector's hooks and copies, which a mean per token hides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from bench.cli import start, teaching_parser
from bench.common.tables import markdown
from bench.serve.compare import columns
from bench.serve.results import Loaded, load
from bench.serve.summary import gaps

WHAT = "How evenly do tokens come? A histogram of the gaps between them, an arm beside the next."
TEACH = """A step that takes longer shows as a gap in every stream that it serves. Compare arms
where everything fits into VRAM: there nothing but hooks and copies can differ."""
EDGES_MS = (5, 8, 12, 16, 20, 25, 30, 40, 60, 100, 200, 500)  # the last bin has no end


def histogram(values: Sequence[float]) -> list[int]:
    """How many lie in each bin: up to the first edge, then above each edge."""
    numbers = [0] * (len(EDGES_MS) + 1)
    for value in values:
        numbers[bisect_left(EDGES_MS, value)] += 1
    return numbers


def table(arms: Mapping[str, Iterable[Loaded]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, a row per bin that has a gap of anybody's: the share of each arm's gaps there.
    No rows where no run has any."""
    found = {
        arm: histogram([gap for run in runs for gap in gaps(run)]) for arm, runs in arms.items()
    }
    found = {arm: numbers for arm, numbers in found.items() if sum(numbers)}
    names = [f"<= {EDGES_MS[0]} ms"]
    names += [f"{low} to {high} ms" for low, high in pairwise(EDGES_MS)]
    names.append(f"> {EDGES_MS[-1]} ms")
    rows = [
        [name, *(_share(numbers[at], sum(numbers)) for numbers in found.values())]
        for at, name in enumerate(names)
        if any(numbers[at] for numbers in found.values())
    ]
    return ["token gaps", *found], rows


def _share(number: int, of: int) -> str:
    """Three digits of a per cent: one slow step in a thousand is what is looked for."""
    return f"{100 * number / of:.3f} %" if number else "-"


def main() -> None:
    """Print the histogram of a result folder, an arm a column."""
    parser = teaching_parser("python -m bench.serve.gaps", WHAT, TEACH)
    parser.add_argument("folder", type=Path, help="of `continuum bench ab` or `agents`")
    arms = columns(load(parser.parse_args().folder))
    head, rows = table({column.title: column.runs.values() for column in arms})
    print(
        markdown(head, rows) if rows else "No run has any: aiperf's have none, nor have old ones."
    )


if __name__ == "__main__":
    start(main, "python -m bench.serve.gaps")
