"""What order, DRAM and pins each earn: adaptive without one of them, in every cell of the matrix.

    python -m bench.sim.matrix --arms ARMS --seeds 101 --out runs/parts.jsonl
    python -m bench.sim.parts runs/parts.jsonl      keep what is in that file, write the pages
    python -m bench.sim.parts                       the pages again, of what is kept

ARMS is adaptive,no-order,no-dram,no-pins,order-only. Kept are seconds, in parts.json; the pages are
PARTS.md and README.md's table between <!-- parts --> and <!-- /parts -->. A cell that was not run
with every arm is on neither.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import msgspec

from bench import markers
from bench.cli import start, teaching_parser
from bench.common.arms import OURS
from bench.common.tables import markdown
from bench.results.kept import Kept
from bench.sim import store
from bench.sim.cells import PATH, Cell, load_matrix
from bench.sim.job import Job, RunRecord
from bench.sim.matrix import job
from continuum_connector.errors import ToldError

KEPT, PAGE = PATH.with_name("parts.json"), PATH.with_name("PARTS.md")
README = PATH.parents[2] / "README.md"
MARKER = "parts"
ARMS = (OURS, "no-order", "no-dram", "no-pins", "order-only")
WHO = ("vllm", "continuum-connector", "python")
DIGITS = 5  # of kept seconds
LOSS = 0.99  # a part below this costs more than it earns

ALL = "all"  # regimes
Earned = Mapping[str, Mapping[str, float]]  # by part and cell


@dataclass(frozen=True)
class Part:
    """A part earns the mean JCT of the arm `without` it over that of the arm `beside` it: above 1
    it earns something, below 1 it costs."""

    title: str
    without: str
    beside: str = OURS


PARTS = (
    Part("program order", "no-order"),
    Part("DRAM tier", "no-dram"),
    Part("pins beside DRAM", "no-pins"),
    Part("pins without DRAM", "order-only", beside="no-dram"),
)

# The regimes and which cells are in them: each cell is in the first that it fits.
REGIMES: dict[str, Callable[[Cell], bool]] = {
    "one-shot requests, or hardly any load": lambda cell: cell.aim == "stock",
    "PCIe of 6 to 25 GB/s": lambda cell: "pcie_gb_s" in cell.said,
    "more live KV than DRAM holds, and a disk": lambda cell: cell.has_disk and _is_short(cell),
    "more live KV than DRAM holds": lambda cell: _is_short(cell),
    "a GPU that is half busy": lambda cell: cell.said.get("load") == 0.5,
    "a busy GPU, DRAM holds all live KV": lambda cell: True,
}


def _is_short(cell: Cell) -> bool:
    """The published sweep's cells say how large DRAM is, the others how much is live. There more
    programs arrive than the GPU can serve, so those with 50 GB soon have more live than that; and
    what calls of an API share is more than that, too."""
    said = cell.said
    return said["dram_gb"] != 400.0 if "dram_gb" in said else float(str(said["live_dram"])) > 1.0


def main(arguments: Sequence[str]) -> int:
    """Keep the results that are named, if any; then write the pages."""
    parser = teaching_parser("python -m bench.sim.parts", __doc__)
    parser.add_argument("results", type=Path, nargs="?", help="of bench.sim.matrix")
    said = parser.parse_args(arguments)
    if said.results is not None:
        found = keep(said.results)
        KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    kept = read()
    PAGE.write_text(page(kept))
    markers.rewrite(README, {MARKER: front(kept)})
    return 0


# --- keeping --------------------------------------------------------------------------------
def read() -> Kept:
    """What is kept."""
    return msgspec.json.decode(KEPT.read_bytes(), type=Kept)


def keep(path: Path) -> Kept:
    """The table of a results file: a row per cell of the matrix that was run with every arm.

    An arm's seconds are the mean over the seeds that all arms of the cell were run with. Raises
    ToldError unless all runs are of one code.
    """
    done = [each for each in store.results(path).values() if each.record is not None]
    cells = {cell.name: cell for cell in load_matrix().cells}
    runs = store.by_cell(each for each in done if _is_of_today(each.job, cells))
    rows = [row for name in cells if (row := _row(name, runs.get(name, {})))]
    if not rows:
        raise ToldError(
            f"{path} has no cell of {PATH.name} with runs of every arm, so there is nothing to "
            f"keep; run python -m bench.sim.matrix --arms {','.join(ARMS)}"
        )
    codes = sorted({each.code for each in done})
    if len(codes) > 1:
        raise ToldError(
            f"{path} has runs of code {' and '.join(codes)}, whose ratios would mean nothing; "
            "the command that made it runs what is of other code anew"
        )
    versions = store.starts(path)[-1].versions
    seeds = sorted({seed for row in rows for seed in str(row[1]).split(", ")}, key=int)
    return Kept(
        command=f"python -m bench.sim.matrix --arms {','.join(ARMS)} --seeds {','.join(seeds)} "
        f"--out runs/{path.name}",
        commit=versions.get("commit", "not known"),
        machine="",
        date=datetime.date.fromtimestamp(path.stat().st_mtime).isoformat(),
        versions={name: versions[name] for name in WHO if name in versions},
        columns=["cell", "seeds", *ARMS],
        rows=rows,
        is_simulated=True,
    )


def _is_of_today(one: Job, cells: Mapping[str, Cell]) -> bool:
    """Whether it is a run of one of these arms in a cell as the matrix has it now."""
    cell = cells.get(str(one.params.get("cell")))
    return cell is not None and one.arm in ARMS and one.key == job(cell, one.arm, one.seed).key


def _row(name: str, runs: Mapping[str, Mapping[int, RunRecord]]) -> list[str | float | None]:
    """The cell, its seeds, seconds by arm; empty if it was not run with every arm."""
    seeds = sorted(set.intersection(*map(set, runs.values()))) if len(runs) == len(ARMS) else []
    if not seeds:
        return []
    means = (fmean(fmean(runs[arm][seed].jct_s.values()) for seed in seeds) for arm in ARMS)
    return [name, ", ".join(map(str, seeds)), *(float(f"{mean:.{DIGITS}g}") for mean in means)]


# --- the pages ------------------------------------------------------------------------------
def page(kept: Kept) -> str:
    """PARTS.md."""
    earned = _earned(kept)
    num_missing = len(load_matrix().cells) - len(kept.rows)
    missing = f" **{num_missing} cells were not run with every arm.**" if num_missing else ""
    parts = [
        "# What each part of ours earns",
        f"{kept.origin} Written by `python -m bench.sim.parts`.",
        "Mean JCT without a part over that with it, in cells of the [matrix](MATRIX.md): above 1 "
        "it earns something, below 1 it costs. Pins are taken away twice, beside a DRAM tier and "
        "where there is none (`order-only` over `no-dram`); without the tier there is no disk "
        "either. Simulated: README.md says what that can and cannot say; near saturation a single "
        f"seed moves by up to 7 %. -: not run.{missing}",
        "## By regime",
        "Median, least and most of the regime's cells, whose number is in brackets.",
        _regimes(earned),
        "## The most and the least",
        markdown(("part", "most", "least"), _extremes(earned)),
        "## Where a part costs more than 1 %",
        _losses(earned),
        "## Every cell",
        f"Mean JCT over that of `{OURS}`.",
        _cells(kept),
    ]
    return "\n\n".join(parts) + "\n"


def front(kept: Kept) -> str:
    """README.md's table, and the sentence below it."""
    earned = _earned(kept)
    least = "; ".join(f"{title}: {least}" for title, _, least in _extremes(earned))
    return (
        f"{_regimes(earned)}\n\n"
        "Mean job time in the [lab](bench/sim/README.md) without the part, over that with it: "
        "median, least and most of the cells whose number is in brackets. 1.30: jobs take 30 % "
        "longer without it; below 1 the part costs. "
        f"At worst: {least}. [Every cell](bench/sim/PARTS.md)"
    )


def regime(cell: Cell) -> str:
    """The one that the cell is in."""
    return next(name for name, has in REGIMES.items() if has(cell))


def _earned(kept: Kept) -> Earned:
    """By part, what it earns in each cell."""
    arms = kept.columns[2:]
    seconds = {str(name): dict(zip(arms, by, strict=True)) for name, _, *by in kept.rows}
    return {
        part.title: {
            cell: float(str(by[part.without])) / float(str(by[part.beside]))
            for cell, by in seconds.items()
        }
        for part in PARTS
    }


def _regimes(earned: Earned) -> str:
    of_cell = {cell.name: regime(cell) for cell in load_matrix().cells}
    rows = []
    for name in (*reversed(REGIMES), ALL):
        own = [
            [value for cell, value in by_cell.items() if name in (of_cell[cell], ALL)]
            for by_cell in earned.values()
        ]
        if own[0]:
            rows.append([f"{name} ({len(own[0])})", *map(_range, own)])
    return markdown(("cells", *earned), rows)


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _extremes(earned: Earned) -> Iterator[tuple[str, str, str]]:
    """Of each part: its title, the most and the least that it earns, and where."""
    for title, by_cell in earned.items():
        ordered = sorted((value, cell) for cell, value in by_cell.items())
        least, most = (f"{value:.2f} in {cell}" for value, cell in (ordered[0], ordered[-1]))
        yield title, most, least


def _losses(earned: Earned) -> str:
    rows = sorted(
        (value, title, cell)
        for title, by_cell in earned.items()
        for cell, value in by_cell.items()
        if value < LOSS
    )
    told = [(cell, title, f"{value:.3f}") for value, title, cell in rows]
    return markdown(("cell", "part", "it earns"), told) if told else "Nowhere."


def _cells(kept: Kept) -> str:
    rows = []
    for name, seeds, ours, *others in kept.rows:
        seconds = float(str(ours))
        over = (f"{float(str(other)) / seconds:.2f}" for other in others)
        rows.append([name, seeds, f"{seconds:.2f}", *over])
    return markdown(("cell", "seeds", f"{OURS}, s", *kept.columns[3:]), rows)


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.parts")
