"""Asked: what any workload is asked for. Shape: the sizes of made-up programs. Gaps: how long they
are away between two turns, by regime, in real seconds."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist

from bench.common.plans import ProgramPlan, Talk, TurnPlan

TOOLS = ("read", "edit", "search", "bash", "test")  # made up; from the fastest to the slowest
NAME_TELLS = 0.8  # how often a call's name is that of its own fifth of the gaps; else any name


# How long programs are away, by quantiles: (share back by then, seconds); in between log-linear.
Curve = tuple[tuple[float, float], ...]

_CODING = (  # tool gaps of 423 Claude Code sessions (workloads/recorded.py)
    *((0.0, 2.0), (0.1, 4.0), (0.25, 5.0), (0.5, 9.0), (0.75, 19.0)),
    *((0.9, 72.0), (0.95, 168.0), (0.99, 916.0), (1.0, 916.0)),
)
_SHARES = (0.001, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)


def _drawn(second_at: Callable[[float], float]) -> Curve:
    """The points of a distribution, whose rarest gap is the one of one in ten thousand."""
    points = tuple((share, second_at(share)) for share in _SHARES)
    return (*points, (1.0, points[-1][1]))


def _lognormal(mean_s: float, sd_s: float) -> Curve:
    spread = math.log1p((sd_s / mean_s) ** 2)
    middle = NormalDist(math.log(mean_s) - spread / 2, math.sqrt(spread))
    return _drawn(lambda share: math.exp(middle.inv_cdf(share)))


_PERSON = (  # between a person's messages, same sessions
    *((0.0, 8.0), (0.1, 16.0), (0.25, 40.0), (0.5, 127.0), (0.75, 409.0)),
    *((0.9, 1543.0), (1.0, 1543.0)),
)
CURVES: dict[str, Curve] = {
    "fast": ((0.0, 0.35), (0.5, 0.5), (1.0, 0.7)),  # half a second, little spread
    "slow": ((0.0, 3.5), (0.5, 5.0), (1.0, 7.0)),  # five seconds, little spread
    "coding": _CODING,
    "person": _PERSON,
    # the Continuum paper's table 2: mini-swe-agent on SWE-bench
    "swe": _lognormal(0.925, 3.55),
    # mean 10 s; whoever was away long is no likelier to come than whoever has just gone
    "memoryless": _drawn(lambda share: -10.0 * math.log1p(-share)),
}


@dataclass(frozen=True)
class Gaps:
    """Draws gaps from the curve of that name. `scale`: seconds here per real second; `longest_s`:
    what is longer takes this long (after scaling); `parallel`: up to so many tools are called at
    once, the slowest of which is waited for."""

    curve: str
    scale: float = 1.0
    longest_s: float = 300.0
    parallel: int = 1

    def at(self, share: float) -> float:
        """Real seconds by which `share` of the programs are back."""
        points = CURVES[self.curve]
        shares = [each for each, _ in points]
        above = min(max(bisect_right(shares, share), 1), len(shares) - 1)
        (q0, low), (q1, high) = points[above - 1], points[above]
        return float(low * (high / low) ** ((share - q0) / (q1 - q0)))

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return a gap in seconds and the name of the tool that took it."""
        share = max(rng.random() for _ in range(rng.randint(1, self.parallel)))
        tells = rng.random() < NAME_TELLS
        tool = TOOLS[int(share * len(TOOLS))] if tells else rng.choice(TOOLS)
        return min(self.at(share) * self.scale, self.longest_s), tool

    @property
    def note(self) -> str:
        """What is not as in reality, "" if nothing."""
        return f"gaps times {self.scale:g}" if self.scale != 1.0 else ""


@dataclass(frozen=True)
class Asked:
    """`gap_scale`, `longest_s`: as in Gaps; `says_...`: what clients tell the server, as in
    ProgramPlan."""

    programs: int = 40
    turns: int = 8
    gap_scale: float = 1.0
    longest_s: float = 300.0
    says_final: bool = True
    says_tools: bool = True
    says_program: bool = True
    seed: int = 1

    def rng(self, what: str) -> random.Random:
        """Random numbers of one kind of workload and this seed: the same in every process."""
        return random.Random(f"{what} {self.seed}")

    def program(self, name: str, turns: Iterable[TurnPlan], arrival_s: float) -> ProgramPlan:
        """A program that tells the server as much as here is said."""
        return ProgramPlan(
            *(name, tuple(turns), arrival_s),
            says_final=self.says_final,
            says_tools=self.says_tools,
            says_program=self.says_program,
        )


@dataclass(frozen=True)
class Shape(Asked):
    """`programs`, `turns` (on average), `context`: tokens of a program's last turn (on average);
    `first`: share of it that the first prompt brings; `answer`: tokens (on average); `shared`:
    tokens of system prompt that all have in common. `gaps`, `parallel`: as in Gaps. Averages are
    means of uniform draws from half to one and a half."""

    context: int = 12_000
    first: float = 0.3
    answer: int = 24
    shared: int = 512
    gaps: str = "fast"
    parallel: int = 1

    @property
    def gap(self) -> Gaps:
        return Gaps(self.gaps, self.gap_scale, self.longest_s, self.parallel)

    def arrivals(self, rng: random.Random, count: int | None = None) -> list[float]:
        """Moments of a second, as a Poisson process that is known to have this many has them;
        load.py stretches them to a load."""
        return sorted(rng.random() for _ in range(self.programs if count is None else count))

    def about(self, rng: random.Random, mean: float) -> int:
        """An integer between half of `mean` and one and a half of it."""
        return max(1, round(mean * rng.uniform(0.5, 1.5)))

    def grow(
        self, talk: Talk, rng: random.Random, num_turns: int, context: int, gap_s: float = 0.0
    ) -> float:
        """Add turns, the first `gap_s` after what was there, until the talk is about `context`
        tokens long; steps are of uneven size, as tool results are. Returns the gap after it."""
        room = max(num_turns, context - talk.num_tokens)
        begin = round(room * self.first) if num_turns > 1 else room
        parts = [rng.expovariate(1.0) for _ in range(num_turns - 1)]
        for index in range(num_turns):
            part = begin if not index else round((room - begin) * parts[index - 1] / sum(parts))
            answer = self.about(rng, self.answer)
            next_gap_s, tool = self.gap.draw(rng)
            talk.turn(part - answer, answer, gap_s, tool)
            gap_s = next_gap_s
        return gap_s
