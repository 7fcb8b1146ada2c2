"""Words: what was run, what to take away from it, and what it cannot tell."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from bench.page import document
from bench.page.palette import Look
from bench.serve.compare import sameness
from bench.serve.page.points import Point, Reported
from bench.serve.results import Loaded
from bench.serve.stats import MIN_REPEATS, Ratio

BUSY = 2.0  # processes that want to run, per core: more is someone else's work
STATES = {"done": "done", "interrupted": "interrupted", "running": "never ended",
          "cannot_run": "could not run", "died": "died"}  # fmt: skip


# --- what to take away ----------------------------------------------------------------------
def verdicts(reported: Reported) -> Iterator[str]:
    """Ours against the first arm and the best of the others: a sentence, or a row per point."""
    told = [point for point in reported.points if point.ours and point.ours != point.base]
    with_times = not is_busy(reported.runs)
    if len(told) == 1:
        yield f"<p>{_sentence(told[0], with_times)}</p>"
    elif told:
        yield _rows(told, with_times)


def _sentence(point: Point, with_times: bool) -> str:
    base = f"<b>{escape(point.base)}</b>"
    said = [f"computes {_of(point, 'computed_tokens')} the prompt tokens of {base}"]
    if with_times and not math.isnan(point.ratios[point.ours, "jct_mean_s"].value):
        said.append(f"its programs take {_of(point, 'jct_mean_s')} as long")
    ours = f"<b>{escape(point.ours)}</b>"
    return f"{capital(point.title)}: {ours} {'; '.join(said)}. {_answers(point)}"


def _rows(points: Sequence[Point], with_times: bool) -> str:
    figures = {"computed_tokens": "tokens computed", "jct_mean_s": "JCT mean"}
    keys = list(figures)[: 2 if with_times else 1]
    head = "".join(f"<th>{figures[key]}</th><th>the best other</th>" for key in keys)
    first = f"{points[0].ours}, times {points[0].base}"
    rows = [f"<tr><th>{escape(first)}</th>{head}<th>same answers</th></tr>"]
    for point in points:
        cells = "".join(f"<td>{_mine(point, key)}</td><td>{_best(point, key)}</td>" for key in keys)
        same = escape(str(sameness(point.arms[point.base], point.arms[point.ours])))
        rows.append(f"<tr><td>{capital(point.title)}</td>{cells}<td>{same}</td></tr>")
    return document.table(rows, "dense")


def capital(text: str) -> str:
    """Text that begins a line, in HTML."""
    return escape(text[:1].upper() + text[1:])


def _of(point: Point, key: str) -> str:
    """Ours, with its interval, and the best of the others."""
    best = _best(point, key)
    return f"{_mine(point, key)}{f' (the best other, {best})' if best else ''}"


def _mine(point: Point, key: str) -> str:
    return f"<b>{interval(point.ratios[point.ours, key])}</b>"


def _best(point: Point, key: str) -> str:
    others = {
        arm: ratio.value
        for (arm, what), ratio in point.ratios.items()
        if what == key and _is_other(point.looks[arm]) and not math.isnan(ratio.value)
    }
    best = min(others, key=lambda arm: others[arm], default="")
    return f"{escape(best)}: {others[best]:.2f}x" if best else ""


def _is_other(look: Look) -> bool:
    return not (look.is_ours or look.is_oracle)


def interval(ratio: Ratio) -> str:
    """A ratio in HTML, its interval in small."""
    value, _, bounds = str(ratio).partition(" ")
    return f"{value}{f' <small>{bounds}</small>' if bounds else ''}"


def _answers(point: Point) -> str:
    first = point.arms[point.base]
    found = {arm: sameness(first, c) for arm, c in point.arms.items() if arm != point.base}
    told = {arm: each for arm, each in found.items() if each.of}
    if not told:
        return ""
    wrong = [f"<b>{escape(arm)}</b>: {escape(str(s))}" for arm, s in told.items() if s.same < s.of]
    if wrong:
        return f"Answers that differ from those of {escape(point.base)}: {'; '.join(wrong)}."
    return f"All {sum(s.of for s in told.values()):,} answers are those of {escape(point.base)}."


# --- what it cannot tell --------------------------------------------------------------------
def cautions(reported: Reported) -> str:
    """What a reader must know before believing a number; "" if nothing stands against it."""
    said = list(_cautions(reported, [run for run in reported.runs if run.turns]))
    return f'<ul class="soft">{"".join(f"<li>{each}</li>" for each in said)}</ul>' if said else ""


def _cautions(reported: Reported, runs: Sequence[Loaded]) -> Iterator[str]:
    if reported.caution:
        yield reported.caution
    elif any("cpu" in run.run.versions.get("vllm", "") for run in runs):
        yield (
            "On a CPU what is decided is real and what it costs is not: a copy crosses no bus and "
            "prefill is slow. Times say nothing about a GPU."
        )
    if is_busy(runs):
        yield (
            f"The machine was busy: before a run up to {_most(runs, 'load_before'):.0f} processes "
            f"wanted its {_most(runs, 'cores'):.0f} cores. Times of this result say little."
        )
    if runs and _num_repeats(runs) < MIN_REPEATS:
        yield (
            f"Fewer than {MIN_REPEATS} repeats: too few to say how one run differs from the next, "
            "so ratios have no interval."
        )
    if any(run.run.state == "interrupted" for run in runs):
        yield "A run was interrupted: its mean JCT is too low, for the slow programs are missing."


def is_busy(runs: Sequence[Loaded]) -> bool:
    """Whether something else had the machine, so that times say little."""
    return _most(runs, "load_before") > BUSY * _most(runs, "cores") > 0


def _most(runs: Sequence[Loaded], key: str) -> float:
    return max((float(run.run.machine.get(key) or 0) for run in runs), default=0.0)


# --- what was run ---------------------------------------------------------------------------
def facts(reported: Reported) -> str:
    """Load, server, DRAM, versions, machine, time."""
    runs = reported.runs
    return document.facts(
        {
            "Runs": _states(runs),
            "Load": "<br>".join(_each(runs, _load)),
            "Client": "<br>".join(_each(runs, _client)),
            "Model": "<br>".join(_each(runs, _model)),
            "DRAM": "<br>".join(_each(runs, _dram)),
            "Versions": "<br>".join(_each(runs, lambda run: _pairs(run.run.versions))),
            "Machine": "<br>".join(_each(runs, _machine)),
            "When": " to ".join(_ends(sorted(filter(None, (r.run.started for r in runs))))),
            **reported.told,
        }
    )


def _each(runs: Iterable[Loaded], told: Any) -> list[str]:
    """What runs say, each thing once, in HTML."""
    return [escape(each) for each in dict.fromkeys(map(told, runs)) if each]


def _states(runs: Sequence[Loaded]) -> str:
    counted = [
        (sum(run.run.state == state for run in runs), text) for state, text in STATES.items()
    ]
    repeats = _num_repeats(runs)
    said = ", ".join(f"{number} {text}" for number, text in counted if number)
    return f"{said}; {repeats} repeat{'s' if repeats > 1 else ''}"


def _num_repeats(runs: Sequence[Loaded]) -> int:
    return len({run.run.repeat for run in runs})


def _load(run: Loaded) -> str:
    settings = run.run.settings
    programs = run.run.planned_programs or settings.get("programs")
    return ", ".join(
        filter(
            None,
            (
                run.run.workload,
                str(settings.get("arrivals", "")),
                f"{programs} programs" if programs else "",
                f"seed {settings['seed']}" if "seed" in settings else "",
            ),
        )
    )


def _client(run: Loaded) -> str:
    """Who asked, where those were not our agents."""
    named = (run.run.settings.get(key, "") for key in ("client", "scenario"))
    return ", ".join(filter(None, named))


def _model(run: Loaded) -> str:
    settings = run.run.settings
    pool = (settings.get("blocks", 0) - 1) * settings.get("block_size", 0)  # one is vLLM's own
    said = (run.run.model, settings.get("dtype"), f"VRAM for {pool:,} tokens" if pool > 0 else "")
    return ", ".join(filter(None, said))


def _dram(run: Loaded) -> str:
    dram = run.run.dram
    if dram is None:
        return ""
    return f"{dram.bytes / 2**20:,.0f} MiB, live KV / DRAM = {dram.pressure:.3g}"


def _machine(run: Loaded) -> str:
    machine = run.run.machine
    cores = f"{machine['cores']} cores" if machine.get("cores") else ""
    return ", ".join(filter(None, (machine.get("system"), cores, machine.get("gpu"))))


def _pairs(told: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _ends(ordered: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(each.replace("T", " ") for each in (*ordered[:1], *ordered[-1:])))


def unfinished(runs: Sequence[Loaded]) -> str:
    """Arms that could not run, runs that never ended, and why."""
    reasons: dict[tuple[str, str], int] = {}
    for run in runs:
        if run.run.state != "done":
            key = (run.run.arm or run.run.title, run.run.reason or STATES[run.run.state])
            reasons[key] = reasons.get(key, 0) + 1
    lines = (
        f"<b>{escape(arm)}</b>{f' ({number}x)' if number > 1 else ''}: {escape(reason)}"
        for (arm, reason), number in reasons.items()
    )
    return document.failed("Not measured, or not to the end", lines)


def commands(runs: Sequence[Loaded]) -> str:
    """How each arm's server was started, its port aside."""
    found: dict[str, str] = {}
    for run in runs:
        if run.run.command:
            found.setdefault(run.run.arm, shlex.join(run.run.command))
    if not found:
        return ""
    shown = "".join(
        f"<p><b>{escape(arm)}</b></p><pre>{escape(command)}</pre>" for arm, command in found.items()
    )
    return f"<details><summary>How each server was started</summary>{shown}</details>"
