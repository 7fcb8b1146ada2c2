"""Kept tables as pages: docs/results.md, and the numbers that the front page quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from bench.common.tables import markdown
from bench.gpu.__main__ import COMMITTED, claims
from bench.gpu.runner import read_state
from bench.gpu.steps import Verdict
from bench.results.kept import Cell, Kept

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "bench" / "sim" / "MATRIX.md"

TABLES = "tables"  # the markers between which all of this stands in docs/results.md
STOCK, OURS, RIVAL = "none", "continuum", "simple"  # of the runs on a GPU


def results(kept: Mapping[str, Kept]) -> str:
    """All of docs/results.md that is made."""
    return "\n\n".join([_gpu(), *(_section(each) for each in kept.values()), _matrix()])


def _gpu() -> str:
    """Whether a device has shown anything: bench/gpu/result.json says."""
    state = read_state(COMMITTED)
    proven = sum(state.of(each).verdict == Verdict.PROVEN.value for each in claims())
    return (
        f"**On a GPU {proven} of {len(claims())} claims are proven** "
        "([which](limits.md#what-is-not-proven)). The first table comes from a GPU. The others "
        "come from CPU servers or from the lab. On a CPU server what is decided, found and "
        "computed again is real; times are not, and neither are ratios of times, because prefill "
        "and copies have other prices there than on a GPU. The lab computes times from data sheets."
    )


def _section(kept: Kept) -> str:
    parts = [f"## {kept.question}", table(kept)]
    parts += [f"{note}" for note in kept.notes]
    return "\n\n".join([*parts, kept.origin])


def table(kept: Kept) -> str:
    """As Markdown."""
    return markdown(kept.columns, (map(_cell, row) for row in kept.rows))


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    return f"{cell:,.0f}" if abs(cell) >= 100 or cell == int(cell) else f"{cell:.3g}"


def _matrix() -> str:
    """How many cells hold their aim, as the lab's own page says."""
    text = MATRIX.read_text()
    origin = re.search(r"^`.*?commit \w+", text, re.MULTILINE)
    aims = re.search(r"^\| aim \|.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    if origin is None or aims is None:
        raise ValueError(f"{MATRIX} is not the page that python -m bench.sim.matrix --write makes")
    cells = "[All cells and arms](../bench/sim/MATRIX.md), including those where ours loses"
    reach = (
        "[What the lab can and cannot say](../bench/sim/README.md#does-it-tell-what-was-measured)"
    )
    heading = "## In the lab's matrix, where do the aims hold?"
    return "\n\n".join([heading, aims[0], f"{cells}: {origin[0]}. {reach}."])


# --- the front page ---------------------------------------------------------------------
def front(kept: Mapping[str, Kept]) -> str:
    """Three numbers, and what stands beside each."""
    agents, gpu, step = (kept[name].cited for name in ("agents", "gpu", "step-cost"))
    rows = [
        (
            "mean job completion time on an H200, agents whose live contexts need twice the VRAM "
            "pool, 3 arrive a second, one run",
            f"**{gpu[f'{OURS} 3 42']:.2f}x** of stock vLLM's",
            f"vLLM's own offloading ([`{RIVAL}`](docs/glossary.md#simple)): "
            f"{gpu[f'{RIVAL} 3 42']:.2f}x. With less pressure, 2 a second, "
            f"three seeds: ours {_seeds(gpu, OURS)}, `{RIVAL}` {_seeds(gpu, RIVAL)}",
        ),
        (
            "prompt tokens computed for 12 agents whose contexts need twice the VRAM pool",
            f"**{agents['computed_tokens']:.2f}x** of stock vLLM's",
            f"{agents['same_answers']:.0f} of {agents['answers']:.0f} answers are stock's, token "
            "for token; a program's first answer begins after "
            f"{agents['ttft_first_mean_s']:.2g}x of stock's time",
        ),
        (
            "CPU time of a scheduler's step that only decodes, with nothing pinned",
            f"**{step['adaptive 0']:.1f} %** more than stock's",
            f"of a connector that does nothing: {step['nothing 0']:.1f} %",
        ),
    ]
    return markdown(("", "with ContinuumConnector", "for comparison"), rows)


def _seeds(gpu: Mapping[str, float], arm: str) -> str:
    """Each seed's ratio; a dash where the arm did not run."""
    keys = (f"{arm} 2 {seed}" for seed in (42, 43, 44))
    return ", ".join(f"{gpu[key]:.2f}x" if key in gpu else "-" for key in keys)
