"""The page: result folders as one HTML file that needs nothing else: no script, font or picture.

What was run, what stands against believing it, then a table per point; of several points one of
mean JCT and one of tokens computed, and lines where only the load differs. Numbers are those of
summary.py and compare.py.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from bench.common.arms import is_ours
from bench.serve import results
from bench.serve.arms import DEFAULT
from bench.serve.compare import PLAIN, Column, Point, place, points_of, ratio, sameness, shown
from bench.serve.results import Loaded, ResultError
from bench.serve.stats import MIN_REPEATS
from bench.serve.summary import BY_KEY
from continuum_connector.errors import ToldError

BUSY = 2.0  # processes that want to run, per core: more is someone else's work
MOST_NAMED = 4  # arms in the heading
VARIED = {"arrivals", "duration_s", "programs"}  # a load may differ from the next in these
CLOSE = 1.02  # times the best: as good as the best
NOTHING = "No run got as far as its first answer, so there is nothing to compare yet."
STATES = {"done": "done", "interrupted": "interrupted", "running": "never ended",
          "cannot_run": "could not run", "died": "died"}  # fmt: skip
OVERVIEW = {"jct_mean_s": "Mean JCT", "computed_tokens": "Prompt tokens computed"}
FOUND = {"hit_vram_tokens": "#0066a8", "hit_dram_tokens": "#7fc4ee", "computed_tokens": "#9aa2ab"}
STYLE = """
:root { color-scheme: light dark; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 1080px; font: 15px/1.5 system-ui, sans-serif; }
h2 { margin-top: 3rem; } p, li { max-width: 75ch; } .soft, dt, small { opacity: .7; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; }
dd { margin: 0; min-width: 0; } pre { overflow-x: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .25rem .4rem; border-bottom: 1px solid #8886; }
th:first-child, td:first-child { text-align: left; } td small { display: block; white-space: nowrap; }
.ours, .best { font-weight: 700; } .bar { display: flex; height: .7rem; min-width: 9rem; }
"""  # noqa: E501


def read(folders: Sequence[Path], base: str = "") -> tuple[list[Loaded], list[Point]]:
    """All runs of result folders that differ in nothing but their load, as they were started, and
    the points to compare at, loads ascending."""
    runs = [run for folder in folders for run in _runs(folder)]
    _same(runs)
    if len({place(run) for run in runs}) < len(folders):
        raise ResultError(
            "two of the folders hold the same load, so their runs would mix; "
            "compare them with: continuum bench compare FIRST SECOND"
        )
    return runs, points_of(runs, base or PLAIN, DEFAULT)


def _runs(folder: Path) -> list[Loaded]:
    found = results.load(folder)
    if not found:
        raise ResultError(
            f"{folder} holds no run yet: `continuum bench ab` writes one as soon as a server starts"
        )
    return found


def _same(runs: Sequence[Loaded]) -> None:
    first = runs[0].run.settings
    for each in runs:
        settings = each.run.settings
        other = [key for key in first if key not in VARIED and settings.get(key) != first[key]]
        if other:
            raise ResultError(
                f"{runs[0].folder} and {each.folder} differ in {', '.join(other)}, not only in "
                "their load; write a report of each"
            )


def write(folders: Sequence[Path], out: Path | None = None, base: str = "") -> Path:
    """Write the page, beside the first folder's runs unless told where; ToldError if it cannot.

    `base`: the arm that the others are compared with; empty for plain vLLM.
    """
    text, path = page(folders, base), out or folders[0] / "report.html"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ToldError(f"{path} cannot be written: {error}; give another -o FILE") from None
    return path


def page(folders: Sequence[Path], base: str = "") -> str:
    """The page of result folders. ResultError where they hold nothing, or nothing that belongs
    together."""
    runs, points = read(folders, base)
    arms = list(dict.fromkeys(arm for point in points for arm in point.arms))
    heading = escape(_heading(arms))
    body = [f"<h1>{heading}</h1>", _list(cautions(runs, points)), _list(_unfinished(runs))]
    if not points:
        body.append(f"<p>{NOTHING}</p>")
    body += [facts(runs), _commands(runs), *_all_points(points, arms)]
    for point in points:
        title = point.title[:1].upper() + point.title[1:]
        body += [f"<h2>{escape(title)}</h2>", *_point(point)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{heading}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _heading(arms: Sequence[str]) -> str:
    if len(arms) <= MOST_NAMED:
        return f"{' · '.join(arms) or 'Nothing measured'}, on real servers"
    ours = [arm for arm in arms if is_ours(arm)]
    return (
        f"{ours[0] if ours else arms[0]} and {len(arms) - 1} other ways to serve, on real servers"
    )


def _list(lines: Iterable[str]) -> str:
    told = "".join(f"<li>{line}</li>" for line in lines)
    return f"<ul>{told}</ul>" if told else ""


def _table(head: Iterable[str], rows: Iterable[tuple[str, Iterable[str]]]) -> str:
    """Cells are HTML; the class of a row comes with it."""
    made = [f"<tr>{''.join(f'<th>{each}</th>' for each in head)}</tr>"]
    made += [f'<tr class="{kind}">{"".join(cells)}</tr>' for kind, cells in rows]
    return f'<div class="wide"><table>{"".join(made)}</table></div>'


# --- tables ---------------------------------------------------------------------------------
def _point(point: Point) -> Iterator[str]:
    """A row per arm; below a figure its ratio to the first arm's, with its interval."""
    keys, base = shown(point.columns), point.columns[0]
    by_tier = {arm: [c.figure(key) for key in FOUND] for arm, c in point.arms.items()}
    most = max((sum(found) for found in by_tier.values() if not math.isnan(sum(found))), default=0)

    def row(arm: str) -> Iterator[str]:
        column = point.arms[arm]
        yield f"<td>{escape(arm)}<small>{_number(len(column.runs), 'run')}</small></td>"
        yield from (f"<td>{_cell(base, column, key)}</td>" for key in keys)
        same = "-" if column is base else str(sameness(base, column))
        yield f"<td>{escape(same)}</td>"
        if most:
            yield f"<td>{_bar(by_tier[arm], most)}</td>"

    head = ["arm", *(BY_KEY[key].name for key in keys), "same answers"]
    if most:
        head.append("found in VRAM, in DRAM; computed")
    yield _table(head, (("ours" if is_ours(arm) else "", row(arm)) for arm in point.arms))
    yield (
        '<p class="soft">Means over the runs. In small: the ratio to the first arm, programs '
        "compared with themselves, and its 95 % interval.</p>"
    )


def _cell(base: Column, arm: Column, key: str) -> str:
    text, told = escape(BY_KEY[key].show(arm.figure(key))), ratio(base, arm, key)
    return text if told is None or math.isnan(told.value) else f"{text}<small>{told}</small>"


def _bar(found: Sequence[float], most: float) -> str:
    if math.isnan(sum(found)):
        return "-"
    parts = (
        f'<i style="width:{100 * tokens / most:.1f}%;background:{colour}"></i>'
        for tokens, colour in zip(found, FOUND.values(), strict=True)
    )
    return f'<div class="bar">{"".join(parts)}</div>'


def _all_points(points: Sequence[Point], arms: Sequence[str]) -> Iterator[str]:
    """What only several points can tell: figures side by side, and lines along the load."""
    if len(points) < 2:
        return
    yield "<h2>All points</h2>"
    for key, name in OVERVIEW.items():
        yield f'<h3>{name}</h3><p class="soft">Bold: within 2 % of the best that can be had.</p>'
        yield _table(("", *map(escape, arms)), (("", _row(point, arms, key)) for point in points))
    for here in _levels(points):
        yield f"<h3>Mean JCT against load <small>{escape(here[0].scene)}</small></h3>"
        yield _lines(here, arms)


def _levels(points: Sequence[Point]) -> list[list[Point]]:
    """Points that differ in load, by the place of their pressure among those of their load: DRAM
    of one size is under another pressure at each. Those with two loads or more."""
    found: dict[tuple[str, int], list[Point]] = {}
    of_load = Counter[tuple[str, str]]()
    for point in points:
        place = of_load[point.scene, point.arrivals]
        of_load[point.scene, point.arrivals] += 1
        if point.load is not None:
            found.setdefault((point.scene, place), []).append(point)
    return [here for here in found.values() if len(here) > 1]


def _row(point: Point, arms: Sequence[str], key: str) -> Iterator[str]:
    values = {arm: column.figure(key) for arm, column in point.arms.items()}
    fair = {arm: v for arm, v in values.items() if not math.isnan(v)}
    best = min(fair.values(), default=math.nan)
    yield f"<td>{escape(point.title)}</td>"
    for arm in arms:
        kind = "best" if fair.get(arm, math.nan) <= CLOSE * best else ""
        yield f'<td class="{kind}">{escape(BY_KEY[key].show(values.get(arm, math.nan)))}</td>'


def _lines(points: Sequence[Point], arms: Sequence[str]) -> str:
    """Seconds on a logarithmic scale, a line per arm, named at its end."""
    told = {
        arm: [(p.load or 0.0, p.arms[arm].figure("jct_mean_s")) for p in points if arm in p.arms]
        for arm in arms
    }
    known = {a: [(x, y) for x, y in each if y > 0] for a, each in told.items()}
    ys = [y for each in known.values() for _, y in each]
    low, high = math.log(min(ys, default=1.0)), math.log(max(ys, default=1.0) * 1.01)
    first, last = points[0].load or 0.0, points[-1].load or 0.0

    def at(x: float, y: float) -> tuple[float, float]:
        along = (x - first) / (last - first or 1.0)
        return 60 + 620 * along, 250 - 230 * (math.log(y) - low) / (high - low)

    drawn, names = [], list[tuple[float, str, str]]()
    for number, (arm, each) in enumerate((a, e) for a, e in known.items() if e):
        colour = "#d1480f" if is_ours(arm) else f"hsl({(200 + 67 * number) % 360} 45% 50%)"
        dots = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*one) for one in each))
        width = 3 if is_ours(arm) else 1.5
        drawn.append(
            f'<polyline points="{dots}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )
        names.append((at(*each[-1])[1], arm, colour))
    lowest = 0.0
    for y, arm, colour in sorted(names):  # apart, so that each can be read
        lowest = max(y, lowest + 13)
        drawn.append(f'<text x="690" y="{lowest:.1f}" fill="{colour}">{escape(arm)}</text>')
    drawn += [f'<text x="{at(p.load or 0, 1)[0]:.1f}" y="272">{p.load:g}</text>' for p in points]
    ends = (math.exp(low), math.exp(high))
    drawn += [f'<text x="0" y="{at(0, y)[1]:.1f}">{y:.3g} s</text>' for y in ends]
    kind = points[0].arrivals.partition(":")[0]
    unit = "programs that arrive per second" if kind == "poisson" else "programs at a time"
    drawn.append(f'<text x="250" y="292">{unit}</text>')
    return (
        '<svg viewBox="0 0 900 300" width="900" font-size="12" fill="currentColor">'
        f"{''.join(drawn)}</svg>"
    )


# --- what it cannot tell --------------------------------------------------------------------
def cautions(all_runs: Sequence[Loaded], points: Sequence[Point]) -> Iterator[str]:
    """What a reader must know before believing a number, in HTML."""
    runs = [run for run in all_runs if run.turns]
    if any("cpu" in run.run.versions.get("vllm", "") for run in runs):
        yield (
            "On a CPU what is decided is real and what it costs is not: a copy crosses no bus and "
            "prefill is slow. Times say nothing about a GPU."
        )
    if _most(runs, "load_before") > BUSY * _most(runs, "cores") > 0:
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
    for point in points:
        base, *others = point.arms
        for arm in others:
            same = sameness(point.arms[base], point.arms[arm])
            if same.same < same.of:
                yield f"Answers differ from those of {escape(base)}: {escape(arm)}, {same}."


def _most(runs: Sequence[Loaded], key: str) -> float:
    return max((float(run.run.machine.get(key) or 0) for run in runs), default=0.0)


# --- what was run ---------------------------------------------------------------------------
def facts(runs: Sequence[Loaded]) -> str:
    """Load, server, DRAM, versions, machine, time."""
    started = sorted(run.run.started.replace("T", " ") for run in runs if run.run.started)
    told = {
        "Runs": _states(runs),
        "Load": _each(runs, _load),
        "Client": _each(runs, lambda run: run.run.settings.get("client", "")),
        "Model": _each(runs, _model),
        "DRAM": _each(runs, _dram),
        "Versions": _each(runs, lambda run: _joined(map(" ".join, run.run.versions.items()))),
        "Machine": _each(runs, _machine),
        "When": " to ".join(dict.fromkeys((*started[:1], *started[-1:]))),
    }
    return f"<dl>{''.join(f'<dt>{k}</dt><dd>{v}</dd>' for k, v in told.items() if v)}</dl>"


def _each(runs: Iterable[Loaded], told: Callable[[Loaded], str]) -> str:
    """What runs say, each thing once, in HTML."""
    return "<br>".join(escape(each) for each in dict.fromkeys(map(told, runs)) if each)


def _joined(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts if part)


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _states(runs: Sequence[Loaded]) -> str:
    counted = {text: sum(run.run.state == state for run in runs) for state, text in STATES.items()}
    said = _joined(f"{number} {text}" for text, number in counted.items() if number)
    return f"{said}; {_number(_num_repeats(runs), 'repeat')}"


def _num_repeats(runs: Sequence[Loaded]) -> int:
    return len({run.run.repeat for run in runs})


def _load(run: Loaded) -> str:
    settings = run.run.settings
    programs = run.run.planned_programs or settings.get("programs")
    seed = f"seed {settings['seed']}" if "seed" in settings else ""
    arrivals = settings.get("arrivals", "")
    return _joined([run.run.workload, arrivals, programs and f"{programs} programs", seed])


def _model(run: Loaded) -> str:
    settings = run.run.settings
    pool = (settings.get("blocks", 0) - 1) * settings.get("block_size", 0)  # one is vLLM's own
    vram = f"VRAM for {pool:,} tokens" if pool > 0 else ""
    return _joined([run.run.model, settings.get("dtype"), vram])


def _dram(run: Loaded) -> str:
    dram = run.run.dram
    if dram is None:
        return ""
    return f"{dram.bytes / 2**20:,.0f} MiB, live KV / DRAM = {dram.pressure:.3g}"


def _machine(run: Loaded) -> str:
    machine = run.run.machine
    cores = f"{machine['cores']} cores" if machine.get("cores") else ""
    return _joined([machine.get("system"), cores, machine.get("gpu")])


def _unfinished(runs: Sequence[Loaded]) -> Iterator[str]:
    """Arms that could not run, runs that never ended, and why."""
    reasons: dict[tuple[str, str], int] = {}
    for run in runs:
        if run.run.state != "done":
            key = (run.run.arm or run.run.title, run.run.reason or STATES[run.run.state])
            reasons[key] = reasons.get(key, 0) + 1
    for (arm, reason), number in reasons.items():
        yield f"<b>{escape(arm)}</b>{f' ({number}x)' if number > 1 else ''}: {escape(reason)}"


def _commands(runs: Sequence[Loaded]) -> str:
    """How each arm's server was started, its port aside, and the router in front of it."""
    found = {
        run.run.arm: "\n".join(map(shlex.join, filter(None, (run.run.command, run.run.front))))
        for run in reversed(runs)
        if run.run.command
    }
    pairs = (f"<p>{escape(arm)}</p><pre>{escape(said)}</pre>" for arm, said in found.items())
    told = "".join(pairs)
    return f"<details><summary>How each server was started</summary>{told}</details>" * bool(told)
