"""The page: what was run, and what came of it, in tables and plots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from bench.common.arms import OURS, STOCK, Role, looks
from bench.common.tables import mean
from bench.page import document
from bench.sim.arms import role_of
from bench.sim.job import Result, Start
from bench.sim.report import plots
from bench.sim.report.columns import COLUMNS, cells, seconds, times
from bench.sim.report.summary import Figures, Table, arm_names, table

HONEST = (
    "Every number is simulated: vLLM's own scheduler, KV cache manager and block pool with the "
    "real connectors, around a model of how long steps and copies take. Good for comparing arms; "
    "differences below some 20 % in absolute seconds, and near critical load, say nothing about a "
    "real GPU."
)


def is_oracle(arm: str) -> bool:
    """Whether no server can run it."""
    return role_of(arm) is Role.ORACLE


def in_order(results: Iterable[Result]) -> list[Result]:
    """Plain vLLM first, oracles last, the rest as they lie in the file."""

    def place(result: Result) -> int:
        return 0 if result.job.arm == STOCK else 2 if is_oracle(result.job.arm) else 1

    return sorted(results, key=place)


def page(results: Sequence[Result], starts: Sequence[Start], title: str = "") -> str:
    """The whole page. The first arm is what the others are compared with."""
    found = table(results)
    scenes = {
        scene: {point: found[point] for point in points}
        for scene, points in groupby(found, key=lambda point: point.scene)
    }
    arms = arm_names(found)
    heading = title or f"{' · '.join(arms)}, simulated"
    body = [f"<h1>{escape(heading)}</h1>", f"<p>{_verdict(found, arms)}</p>"]
    body += [f'<p class="soft">{HONEST}</p>', _facts(results, starts), _failed(results)]
    if len(found) > 1:
        body += [
            "<h3>Mean JCT, in seconds, everywhere</h3>",
            '<p class="how">A dot: within 2 % of the best that a server could run.</p>',
            document.legend(looks(arms)),
            _overview(found),
        ]
    if len(scenes) > 1:
        links = (f'<a href="#s{i}">{escape(scene)}</a>' for i, scene in enumerate(scenes))
        body.append(f"<nav>{''.join(links)}</nav>")
    for i, (scene, part) in enumerate(scenes.items()):
        body += [f'<h2 id="s{i}">{escape(scene)}</h2>', *_scene(part)]
    return document.document(heading, body)


# --- what was run ---------------------------------------------------------------------------
def _verdict(found: Table, arms: Sequence[str]) -> str:
    """The one sentence to take away: ours against the first arm and the best other one."""
    both = [each for each in found.values() if OURS in each and arms[0] in each]
    if not both or arms[0] == OURS:
        return ""
    ratios = [mean(each[OURS].jct_s) / mean(each[arms[0]].jct_s) for each in both]
    middle = math.exp(mean([math.log(ratio) for ratio in ratios]))
    rivals = [
        min((mean(f.jct_s) for arm, f in each.items() if arm != OURS and not is_oracle(arm)))
        for each in both
    ]
    ours = [mean(each[OURS].jct_s) for each in both]
    wins = sum(mine <= document.CLOSE * best for mine, best in zip(ours, rivals, strict=True))
    where = "at the one point" if len(both) == 1 else f"over {len(both)} points (geometric mean)"
    return (
        f"Programs take <b>{times(middle)}</b> as long with <b>{OURS}</b> as with "
        f"<b>{escape(arms[0])}</b> {where}; it is within 2 % of the best other arm, or better, "
        f"at {wins} of {len(both)}."
    )


def _facts(results: Sequence[Result], starts: Sequence[Start]) -> str:
    records = [result.record for result in results if result.record is not None]
    wall_s = sum(record.wall_s for record in records)
    seeds = sorted({record.seed for record in records})
    notes = list(dict.fromkeys(record.note for record in records if record.note))
    versions = list(
        dict.fromkeys(", ".join(f"{k} {v}" for k, v in s.versions.items()) for s in starts)
    )
    facts = {
        "Runs": f"{len(records)}, {wall_s:,.0f} s of computing",
        "Seeds": ", ".join(map(str, seeds)),
        "Workload": "<br>".join(map(escape, notes)),
        "Versions": "<br>".join(map(escape, versions)),
        "Command": "".join(
            f"<pre>{escape(command)}</pre>" for command in dict.fromkeys(s.command for s in starts)
        ),
    }
    return document.facts(facts)


def _failed(results: Sequence[Result]) -> str:
    failed = [result for result in results if result.error]
    lines = (f"<code>{escape(str(r.job))}</code>: {escape(r.error)}" for r in failed)
    return document.failed(f"{len(failed)} failed", lines)


# --- tables ---------------------------------------------------------------------------------
def _overview(found: Table) -> str:
    rows = {
        point.title: {arm: mean(figures.jct_s) for arm, figures in here.items()}
        for point, here in found.items()
    }
    return document.overview(rows, seconds, lambda arm: not is_oracle(arm))


def _point_table(here: dict[str, Figures]) -> str:
    head = "".join(f"<th>{column.name}</th>" for column in COLUMNS)
    rows = [f"<tr><th>arm</th>{head}</tr>"]
    for arm in here:
        row = "".join(
            f"<td>{text}{f'<small>{ratio}</small>' if ratio else ''}</td>"
            for text, ratio in cells(here, arm)
        )
        kind = ' class="ours"' if arm == OURS else ""
        rows.append(f"<tr{kind}><td>{escape(arm)}</td>{row}</tr>")
    return document.table(rows)


# --- one scene ------------------------------------------------------------------------------
SECTIONS = (
    (
        "Latency of each turn",
        "Mean seconds from a turn's arrival to its answer. A hump at the second turn is the queue "
        "that programs wait in once; a climb to the right is context computed again.",
        plots.turn_latency,
    ),
    (
        "Where prompts were found",
        "Of all prompt tokens: in <b>VRAM</b> (dark blue), brought back from <b>DRAM</b> (light "
        "blue), computed (grey). Text that is new must be computed by everyone.",
        plots.tiers,
    ),
    (
        "Bytes over PCIe",
        "Stored to the left, loaded to the right; beside it how often a stored byte came back.",
        plots.bus,
    ),
    (
        "Waiting",
        "Share of turns that waited longer than that for their first token. Lower left is better; "
        "the right end is what the unluckiest see.",
        plots.waiting_tail,
    ),
    (
        "Programs done",
        "Share of programs that took no longer than that. Upper left is better.",
        plots.jct_shares,
    ),
)


def _scene(part: Table) -> Iterator[str]:
    arms = arm_names(part)
    yield document.legend(looks(arms))
    if len(part) > 1:
        yield "<h3>JCT against load</h3>"
        yield '<p class="how">Lower is better; bars span the seeds.</p>'
        yield plots.against_load(part)
    for heading, how, draw in SECTIONS:
        if draw is plots.bus and not _uses_bus(part):
            continue
        if draw is not plots.jct_shares and draw is not plots.tiers and not _has_turns(part):
            continue
        yield document.section(heading, how, draw(part))
    for index, (point, here) in enumerate(part.items()):
        is_open = " open" if index == len(part) - 1 else ""
        name = f"{point.load:g} programs/s" if point.load is not None else "Numbers"
        yield f"<details{is_open}><summary>{name}</summary>{_point_table(here)}</details>"


def _uses_bus(part: Table) -> bool:
    return any(
        f.total("stored_bytes") or f.total("loaded_bytes")
        for arms in part.values()
        for f in arms.values()
    )


def _has_turns(part: Table) -> bool:
    return any(f.turns for arms in part.values() for f in arms.values())
