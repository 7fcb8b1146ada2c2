"""Does the shadow of stock vLLM say what stock finds? Cell by cell of the scenario matrix.

    python -m bench.sim.against_stock [CELLS]

Shares of all prompt tokens, in percent, on the first development seed. `stock` is what plain vLLM
finds. `beside stock` is what the shadow says while our connector does nothing (policy stock, no
order): it must be what that server finds itself, so the number of turns that differ is told.
`beside adaptive` is what the shadow says while adaptive serves, in its order and at its times.
CELLS: words that a cell's name must contain, with commas; default: cells that a test runs.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.cli import start, teaching_parser
from bench.sim.arms import ARMS
from bench.sim.arms.arm import LabArm
from bench.sim.arms.ours import ours
from bench.sim.cells import Cell, load_matrix, scene
from bench.sim.lab import Lab

NOTHING = ours("stock", "ours, which does nothing", has_tier=False, order=False)


def main(arguments: list[str]) -> int:
    parser = teaching_parser("python -m bench.sim.against_stock", __doc__)
    parser.add_argument("cells", nargs="?", default="")
    words = parser.parse_args(arguments).cells.split(",")
    matrix = load_matrix()
    print("| cell | stock | beside stock | turns that differ | adaptive finds | beside adaptive |")
    print("|---|---|---|---|---|---|")
    for cell in matrix.cells:
        if any(word in cell.name for word in words) and (cell.fast or words != [""]):
            print(f"| {cell.name} | {' | '.join(row(cell, matrix.seeds['dev'][0]))} |", flush=True)
    return 0


def row(cell: Cell, seed: int) -> list[str]:
    """The columns after the cell's name."""
    stock, beside, adaptive = (
        found(cell, arm, seed) for arm in (ARMS["stock"], NOTHING, ARMS["adaptive"])
    )
    differing = f"{beside['differing']:,} of {beside['turns']:,}"
    shares = [stock["found"], beside["in_stock"], None, adaptive["found"], adaptive["in_stock"]]
    return [differing if each is None else f"{100 * each:.1f}" for each in shares]


def found(cell: Cell, arm: LabArm, seed: int) -> dict[str, Any]:
    """Shares of prompt tokens that the server found, and that the shadow has."""
    played = scene(cell, seed)
    lab = Lab(played.machine, arm, played.workload)
    side = getattr(lab.engine.connector, "side", None)
    told: list[tuple[int, int]] = []
    if side is not None:
        admitted = side.records.admitted

        def noting(request: Any, turn: Any, now: float) -> None:
            told.append((turn.stock_tokens, sum(turn.hit_tokens.values())))
            admitted(request, turn, now)

        side.records.admitted = noting
    turns = lab.play().turns
    num = sum(turn.num_prompt for turn in turns)
    return {
        "found": sum(turn.num_local + turn.num_external for turn in turns) / num,
        "in_stock": sum(in_stock for in_stock, _ in told) / num,
        "differing": sum(in_stock != in_ours for in_stock, in_ours in told),
        "turns": len(told),
    }


if __name__ == "__main__":
    start(lambda: main(sys.argv[1:]), "python -m bench.sim.against_stock")
