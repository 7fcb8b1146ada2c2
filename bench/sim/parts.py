"""What order, DRAM and pins each earn: adaptive without one of them, in every cell of the matrix.

    python -m bench.sim.matrix --arms ARMS --seeds 101 --out runs/parts.jsonl
    python -m bench.sim.parts runs/parts.jsonl      keep what is in that file, write the pages
    python -m bench.sim.parts                       the pages again, of what is kept

ARMS is adaptive,no-order,no-dram,no-pins,order-only. Kept are seconds, in parts.json; the pages are
PARTS.md and README.md's table between <!-- parts --> and <!-- /parts -->. What was not run is - on
them, so a file that is not complete yet may be kept, too.
"""

from __future__ import annotations

import datetime
import math
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
from bench.sim.job import Result
from bench.sim.matrix import job
from continuum_connector.errors import ToldError

KEPT, PAGE = PATH.with_name("parts.json"), PATH.with_name("PARTS.md")
README = PATH.parents[2] / "README.md"
MARKER = "parts"
ARMS = (OURS, "no-order", "no-dram", "no-pins", "order-only")
WHO = ("vllm", "continuum-connector", "python")
DIGITS = 5  # of kept seconds
LOSS = 0.99  # a part below this costs more than it earns

Seconds = Mapping[str, float]  # a cell's mean JCT by arm, of the arms that were run


@dataclass(frozen=True)
class Part:
    """A part, as mean JCT of the arm `without` it over that of the arm `beside` it."""

    title: str
    without: str
    beside: str = OURS

    def earns(self, seconds: Seconds) -> float:
        """Above 1 it earns something. NaN if one of the two was not run."""
        return seconds.get(self.without, math.nan) / seconds.get(self.beside, math.nan)


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
    print(f"Written: {PAGE.name}.")
    try:
        markers.rewrite(README, {MARKER: front(kept)})
    except ValueError as error:
        print(f"{README.name} is as it was: {error}.")
    return 0


# --- keeping --------------------------------------------------------------------------------
def read() -> Kept:
    """What is kept."""
    return msgspec.json.decode(KEPT.read_bytes(), type=Kept)


def keep(path: Path) -> Kept:
    """The table of a results file: a row per cell of the matrix with runs of ours and another arm.

    An arm's seconds are the mean over the seeds that all arms of the cell were run with. Raises
    ToldError unless all runs are of one code.
    """
    done = {key: each for key, each in store.results(path).items() if each.record is not None}
    rows = [row for cell in load_matrix().cells if (row := _row(cell, done))]
    if not rows:
        raise ToldError(
            f"{path} has no cell of {PATH.name} with runs of {OURS} and an arm without a part, so "
            f"there is nothing to keep; run python -m bench.sim.matrix --arms {','.join(ARMS)}"
        )
    codes = sorted({each.code for each in done.values()})
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


def _row(cell: Cell, done: Mapping[str, Result]) -> list[str | float | None]:
    """The cell, its seeds, seconds by arm; empty if there is nothing to compare."""
    runs: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    for each in done.values():
        one = each.job
        if one.arm in runs and each.record and one.key == job(cell, one.arm, one.seed).key:
            runs[one.arm][one.seed] = fmean(each.record.jct_s.values())
    were_run = [set(by_seed) for by_seed in runs.values() if by_seed]
    seeds = sorted(set.intersection(*were_run)) if runs[OURS] and len(were_run) > 1 else []
    if not seeds:
        return []
    means = (fmean(by[s] for s in seeds) if by else None for by in runs.values())
    kept = (None if mean is None else float(f"{mean:.{DIGITS}g}") for mean in means)
    return [cell.name, ", ".join(map(str, seeds)), *kept]


# --- the pages ------------------------------------------------------------------------------
def page(kept: Kept) -> str:
    """PARTS.md."""
    seconds = _seconds(kept)
    parts = [
        "# What each part of ours earns",
        f"{kept.origin} Written by `python -m bench.sim.parts`.",
        "Mean JCT without a part over that with it, in cells of the [matrix](MATRIX.md): above 1 "
        "it earns something, below 1 it costs. Pins are taken away twice, beside a DRAM tier and "
        "where there is none (`order-only` over `no-dram`); without the tier there is no disk "
        "either. Simulated: README.md says what that can and cannot say; near saturation a single "
        f"seed moves by up to 7 %. -: not run.{_missing(seconds)}",
        "## By regime",
        "Median, least and most of the regime's cells, whose number is in brackets.",
        _regimes(seconds),
        "## The most and the least",
        markdown(("part", "most", "least"), _extremes(seconds)),
        "## Where a part costs more than 1 %",
        _losses(seconds),
        "## Every cell",
        f"Mean JCT over that of `{OURS}`.",
        _cells(kept, seconds),
    ]
    return "\n\n".join(parts) + "\n"


def front(kept: Kept) -> str:
    """README.md's table, and the sentence below it."""
    seconds = _seconds(kept)
    least = "; ".join(f"{title}: {least}" for title, _, least in _extremes(seconds))
    return (
        f"{_regimes(seconds)}\n\n"
        "Mean job time in the [lab](bench/sim/README.md) without the part, over that with it: "
        "median, least and most of the cells whose number is in brackets. 1.30: jobs take 30 % "
        "longer without it; below 1 the part costs. "
        f"At worst: {least}. [Every cell](bench/sim/PARTS.md)"
    )


def _seconds(kept: Kept) -> dict[str, Seconds]:
    """By cell, of the arms that were run."""
    arms = kept.columns[2:]
    return {
        str(name): {
            arm: value
            for arm, value in zip(arms, values, strict=True)
            if isinstance(value, float | int)
        }
        for name, _, *values in kept.rows
    }


def regime(cell: Cell) -> str:
    """The one that the cell is in."""
    return next(name for name, has in REGIMES.items() if has(cell))


def _missing(seconds: Mapping[str, Seconds]) -> str:
    whole = sum(set(ARMS) <= set(by) for by in seconds.values())
    num_missing = len(load_matrix().cells) - whole
    return f" **{num_missing} cells were not run with every arm.**" if num_missing else ""


def _regimes(seconds: Mapping[str, Seconds]) -> str:
    regimes = {cell.name: regime(cell) for cell in load_matrix().cells}
    grouped = {
        name: {cell: by for cell, by in seconds.items() if regimes[cell] == name}
        for name in reversed(REGIMES)
    }
    rows = [
        [f"{name} ({len(own)})", *(_range(_earned(own, part)) for part in PARTS)]
        for name, own in {**grouped, "all": seconds}.items()
        if own
    ]
    return markdown(("cells", *(part.title for part in PARTS)), rows)


def _earned(seconds: Mapping[str, Seconds], part: Part) -> dict[str, float]:
    """By cell, where both arms were run."""
    found = {cell: part.earns(by) for cell, by in seconds.items()}
    return {cell: value for cell, value in found.items() if not math.isnan(value)}


def _range(earned: Mapping[str, float]) -> str:
    if not earned:
        return "-"
    values = earned.values()
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _extremes(seconds: Mapping[str, Seconds]) -> Iterator[tuple[str, str, str]]:
    """Of each part that was taken away: its title, the most and the least that it earns, where."""
    for part in PARTS:
        if found := sorted((value, cell) for cell, value in _earned(seconds, part).items()):
            least, most = (f"{value:.2f} in {cell}" for value, cell in (found[0], found[-1]))
            yield part.title, most, least


def _losses(seconds: Mapping[str, Seconds]) -> str:
    rows = sorted(
        (value, part.title, cell)
        for part in PARTS
        for cell, value in _earned(seconds, part).items()
        if value < LOSS
    )
    told = [(cell, title, f"{value:.3f}") for value, title, cell in rows]
    return markdown(("cell", "part", "it earns"), told) if told else "Nowhere."


def _cells(kept: Kept, seconds: Mapping[str, Seconds]) -> str:
    arms = kept.columns[3:]
    rows = []
    for name, seeds, *_ in kept.rows:
        by = seconds[str(name)]
        over = (f"{by[arm] / by[OURS]:.2f}" if arm in by else "-" for arm in arms)
        rows.append([name, seeds, f"{by[OURS]:.2f}", *over])
    return markdown(("cell", "seeds", f"{OURS}, s", *arms), rows)


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.parts")
