"""Are the forecasts of gaps any good? One online pass over a trace; see README.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from bench.cli import any_number, start, teaching_parser
from bench.common.tables import markdown
from bench.common.workloads import Request
from bench.gaps.trace import Event, events
from continuum_connector.forecast import tool_times
from continuum_connector.forecast.gaps import Gap, Gaps
from continuum_connector.toolcalls.asked import UNREAD, Asked, Ending
from continuum_connector.tools.cli.ending import ToldError

TTLS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
WARM_UP = 500  # turns that are learned from and not scored

Reader = Callable[[Request, str], Asked]
Scored = tuple[tuple[float, ...], float]  # P(gap <= TTL) for each, and the gap: infinite if never


def _ending(request: Request, tool: str) -> Asked:
    if request.stop == "tool_use":
        return Asked(Ending.CALLS, (tool,))
    return Asked(Ending.ANSWER) if request.stop == "end_turn" else UNREAD


# What a server could know of a turn; the trace names no tools, so other things stand in for them.
READERS: dict[str, Reader] = {
    "nothing: one curve": lambda request, program: UNREAD,
    "tool or person": lambda request, program: _ending(request, "tool"),
    "+ model as tool": lambda request, program: _ending(request, request.model),
    "+ a useless tool, 1 of 16": lambda request, program: _ending(request, str(request.inp % 16)),
    "+ the program itself as tool": lambda request, program: _ending(request, program),
}


def scored(trace: Sequence[Event], reader: Reader) -> list[Scored]:
    """Forecast at each finish, learn at each arrival, in the order a server would."""
    gaps, waiting, found = Gaps(), dict[str, tuple[float, ...]](), list[Scored]()
    away: dict[str, Gap] = {}
    for event in trace:
        if event.request is not None:
            asked = reader(event.request, event.program)
            forecast = gaps.forecast(asked)
            waiting[event.program] = tuple(forecast.within(ttl) for ttl in TTLS)
            away[event.program] = gaps.begin(asked, event.now)
        else:
            gaps.arrived(away.pop(event.program), event.now)
            found.append((waiting.pop(event.program), event.gap_s))
    found += [(forecast, math.inf) for forecast in waiting.values()]
    return found[WARM_UP:]


def log_loss(found: Sequence[Scored]) -> float:
    """Nats per gap for the span between two TTLs into which it falls; lower is better."""
    total = 0.0
    for forecast, gap_s in found:
        cdf = (0.0, *forecast, 1.0)
        span = sum(gap_s > ttl for ttl in TTLS)
        total -= math.log(max(cdf[span + 1] - cdf[span], 1e-6))
    return total / len(found)


def in_hindsight(found: Sequence[Scored]) -> float:
    """The log-loss of the one curve that fits all gaps best, known from the start."""
    counts = [sum(sum(gap > t for t in TTLS) == span for _, gap in found) for span in range(8)]
    return -sum(n / len(found) * math.log(n / len(found)) for n in counts if n)


def calibration(found: Sequence[Scored]) -> str:
    """For each TTL: forecasts by fifth, mean predicted and observed share of returns."""
    rows = []
    for i, ttl in enumerate(TTLS):
        pairs = sorted((forecast[i], gap_s <= ttl) for forecast, gap_s in found)
        fifths = [pairs[k * len(pairs) // 5 : (k + 1) * len(pairs) // 5] for k in range(5)]
        rows.append([f"{ttl:g}", *map(_means, (pairs, *fifths))])
    titles = ["TTL s", "all: predicted / observed", *(f"fifth {i + 1}" for i in range(5))]
    return markdown(titles, rows)


def _means(pairs: Sequence[tuple[float, bool]]) -> str:
    predicted = sum(p for p, _ in pairs) / len(pairs)
    return f"{predicted:.3f} / {sum(hit for _, hit in pairs) / len(pairs):.3f}"


@contextmanager
def tuned(half_life: float, prior_weight: float) -> Iterator[None]:
    with (
        patch("continuum_connector.forecast.forecast._GROWTH", 2.0 ** (1.0 / half_life)),
        patch.object(tool_times, "PRIOR_WEIGHT", prior_weight),
    ):
        yield


def main() -> None:
    parser = teaching_parser("python -m bench.gaps.run", __doc__)
    parser.add_argument("trace", help="requests.jsonl.gz with trace, lane, think, api, stop")
    parser.add_argument("--seed", type=any_number, default=0)
    parser.add_argument("--sweep", action="store_true", help="half-lives and prior weights too")
    args = parser.parse_args()
    trace = events(args.trace, args.seed)
    names = {name: scored(trace, reader) for name, reader in READERS.items()}
    some = names["tool or person"]
    if not some:
        raise ToldError(f"{args.trace} holds no gap between two turns")
    print(f"{len(some)} gaps, {sum(gap == math.inf for _, gap in some)} of them never end\n")
    rows = [(name, f"{log_loss(found):.4f}") for name, found in names.items()]
    hindsight = "one curve, fitted in hindsight", f"{in_hindsight(some):.4f}"
    print(markdown(("known of a turn", "log-loss, nats per gap"), [hindsight, *rows]))
    print(f"\nTool or person:\n\n{calibration(some)}")
    if args.sweep:
        sweep(trace)


def sweep(trace: Sequence[Event]) -> None:
    """Log-loss by half-life and by prior weight."""
    readers = [name for name in READERS if not name.startswith("nothing")]
    rows = []
    settings = [(h, 8.0) for h in (50, 100, 200, 400, 1600, 1e9)]
    settings += [(100, w) for w in (1.0, 2.0, 4.0, 16.0)]
    for half_life, weight in settings:
        with tuned(half_life, weight):
            losses = [log_loss(scored(trace, READERS[name])) for name in readers]
        rows.append([f"{half_life:g}, {weight:g}", *(f"{loss:.4f}" for loss in losses)])
    print("\n" + markdown(["half-life, prior weight", *readers], rows))


if __name__ == "__main__":
    start(main, "python -m bench.gaps.run")
