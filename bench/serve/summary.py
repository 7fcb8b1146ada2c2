"""A run in numbers: what its clients saw and what its server counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.common.tables import mean, quantile
from bench.serve.metrics import total
from bench.serve.results import Loaded, Turn
from bench.serve.stats import MIN_PROGRAMS_P95, Sampled, Statistic

PROMPT = "vllm:prompt_tokens_by_source_total"
MIN_PROGRAMS_P99 = 100  # of fewer it is the slowest one


@dataclass(frozen=True)
class Figure:
    """One number of a run. `sample`: what is paired, where its ratio is worth an interval, and
    `statistic`: what is made of it."""

    key: str
    title: str
    value: Callable[[Loaded], float]
    unit: str = ""
    sample: Callable[[Loaded], Sampled] | None = None
    statistic: Statistic = mean
    min_programs: int = 0  # with fewer there is no interval
    of_finished: bool = False  # programs that failed are in no such figure

    @property
    def name(self) -> str:
        """The title where it heads a column."""
        return self.title.strip()

    def show(self, value: float) -> str:
        """The value with its unit; a dash where there is none."""
        if math.isnan(value):
            return "-"
        if self.unit and abs(value) < 1000:
            return f"{value:.3g} {self.unit}"
        return f"{value:,.0f} {self.unit}".rstrip()


def _compared(
    key: str,
    title: str,
    sample: Callable[[Loaded], Sampled],
    statistic: Statistic = mean,
    min_programs: int = 0,
) -> Figure:
    """Seconds: the statistic of all that a run's sample has."""

    def value(run: Loaded) -> float:
        return statistic([one for values in sample(run).values() for one in values])

    return Figure(key, title, value, "s", sample, statistic, min_programs, sample is _jct)


def _jct(run: Loaded) -> Sampled:
    return {program.program: [program.jct_s] for program in run.finished}


def _turns(field: str) -> Callable[[Loaded], Sampled]:
    """Of turns that were answered, where there is such a time."""

    def sample(run: Loaded) -> Sampled:
        found: dict[str, list[float]] = {}
        for turn in _good(run):
            if seconds := getattr(turn, field):
                found.setdefault(turn.program, []).append(seconds)
        return found

    return sample


def _p95(values: Sequence[float]) -> float:
    return quantile(values, 0.95)


def _p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99) if len(values) >= MIN_PROGRAMS_P99 else math.nan


def _good(run: Loaded) -> list[Turn]:
    return [turn for turn in run.turns if not turn.error]


def _ttft_first(run: Loaded) -> list[float]:
    """Of first turns: program order may have them pay for later ones."""
    return [turn.ttft_s for turn in _good(run) if not turn.turn]


def _source(name: str) -> Callable[[Loaded], float]:
    return lambda run: total(run.added, PROMPT, source=name) if run.added else math.nan


def _saved(run: Loaded) -> float:
    return _source("local_cache_hit")(run) + _source("external_kv_transfer")(run)


def _cached_pct(run: Loaded) -> float:
    """Of the prompt tokens of turns that were answered, as the server said."""
    prompt = sum(turn.prompt_tokens for turn in _good(run))
    return 100 * sum(turn.cached_tokens for turn in _good(run)) / prompt if prompt else math.nan


def gaps(run: Loaded) -> list[float]:
    """Milliseconds between the tokens that clients received, of all turns; aiperf tells none."""
    return [gap for turn in _good(run) for gap in turn.gaps_ms]


def _hooks_ms(run: Loaded) -> float:
    """What all of our hooks took of the engine's steps, by turn."""
    seconds = total(run.added, "continuum:hook_seconds_sum")
    return 1e3 * seconds / len(_good(run)) if seconds and _good(run) else math.nan


def _told(name: str) -> Callable[[Loaded], float]:
    return lambda run: run.run.told.get(name, math.nan)


def _found_pct(run: Loaded) -> float:
    return 100 * _cached_pct(run) / run.run.told.get("theory_pct", math.nan)


def _late(run: Loaded) -> float:
    """How late the client itself was: a program begun too late, or its event loop held up."""
    return max([run.run.max_lag_s, *(p.start_s - p.arrival_s for p in run.programs)])


COMPUTED = _source("local_compute")
FIGURES = (
    _compared("jct_mean_s", "JCT mean", _jct),
    _compared("jct_p95_s", "JCT P95", _jct, _p95, MIN_PROGRAMS_P95),
    _compared("jct_p99_s", "JCT P99", _jct, _p99, MIN_PROGRAMS_P99),
    _compared("ttft_mean_s", "TTFT mean", _turns("ttft_s")),
    _compared("ttft_p95_s", "TTFT P95", _turns("ttft_s"), _p95, MIN_PROGRAMS_P95),
    Figure("ttft_first_mean_s", "first turns", lambda r: mean(_ttft_first(r)), "s"),
    _compared("tpot_mean_s", "TPOT mean", _turns("tpot_s")),
    Figure("gap_p99_ms", "token gap P99", lambda r: quantile(gaps(r), 0.99), "ms"),
    Figure("hooks_ms", "hooks per turn", _hooks_ms, "ms"),
    _compared("turn_mean_s", "turn mean", _turns("latency_s")),
    Figure("prompt_tokens", "prompt tokens", lambda r: sum(t.prompt_tokens for t in _good(r))),
    Figure("cached_tokens", "  cached", lambda r: sum(t.cached_tokens for t in _good(r))),
    Figure("cached_pct", "  cached", _cached_pct, "%"),
    Figure("theory_pct", "  could be cached", _told("theory_pct"), "%"),
    Figure("found_pct", "  of that cached", _found_pct, "%"),
    Figure("tokens_per_s", "tokens per second", _told("tokens_per_s")),
    Figure("stored_gb", "stored", _told("stored_gb"), "GB"),
    Figure("loaded_gb", "loaded", _told("loaded_gb"), "GB"),
    Figure("written_gb", "written to disk", _told("written_gb"), "GB"),
    Figure("read_gb", "read from disk", _told("read_gb"), "GB"),
    Figure("busy_pct", "GPU busy", _told("busy_pct"), "%"),
    Figure("computed_tokens", "  computed", COMPUTED, sample=lambda r: {"": [COMPUTED(r)]}),
    Figure("hit_vram_tokens", "  hit in VRAM", _source("local_cache_hit")),
    Figure("hit_dram_tokens", "  hit in DRAM", _source("external_kv_transfer")),
    Figure("saved_tokens", "  saved by both", _saved),
    Figure("programs", "programs done", lambda r: len(r.finished)),
    Figure("failed_programs", "programs failed", lambda r: len(r.programs) - len(r.finished)),
    Figure("failed_turns", "turns failed", lambda r: sum(bool(t.error) for t in r.turns)),
    Figure("retries", "retries", lambda r: sum(max(t.tries - 1, 0) for t in r.turns)),
    Figure("wall_s", "wall", lambda r: r.run.wall_s, "s"),
    Figure("late_s", "client late, most", _late, "s"),
)
BY_KEY = {figure.key: figure for figure in FIGURES}


def summarize(run: Loaded) -> dict[str, float]:
    """Every figure by its key; nan where the run does not tell."""
    return {figure.key: figure.value(run) for figure in FIGURES}


def per_turn(run: Loaded) -> dict[int, list[Turn]]:
    """The turns that were answered, by their number in their program."""
    grouped: dict[int, list[Turn]] = {}
    for turn in sorted(_good(run), key=lambda each: each.turn):
        grouped.setdefault(turn.turn, []).append(turn)
    return grouped


def table_of(run: Loaded) -> Table:
    """One run: its figures, then a line per turn."""
    table = Table(title=f"{run.run.workload}: {run.run.state}", title_justify="left")
    table.add_column("")
    table.add_column(run.run.title or run.run.url, justify="right")
    for figure in FIGURES:
        table.add_row(figure.title, figure.show(figure.value(run)))
    for index, turns in per_turn(run).items():
        seconds, tokens = mean([t.latency_s for t in turns]), mean([t.prompt_tokens for t in turns])
        cached = mean([t.cached_tokens for t in turns])
        table.add_row(
            f"turn {index + 1}: {tokens:,.0f} tokens, {cached:,.0f} cached", f"{seconds:.3g} s"
        )
    return table
