"""The page: what was run, what to take away, then every point in tables and plots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from bench.common.arms import looks
from bench.page import document
from bench.serve.page import plots, sweeps, tables, words
from bench.serve.page.points import Point, Reported, read

MOST_NAMED = 4  # arms in the heading
NOTHING = "No run got as far as its first answer, so there is nothing to compare yet."
SECTIONS: tuple[tuple[str, str, Callable[[Point], str], Callable[[Point], bool]], ...] = (
    (
        "Against {base}",
        "A dot is the ratio, its line the 95 % interval over repeats; left of the "
        "upright line is better.",
        plots.ratios,
        lambda point: len(point.arms) > 1,
    ),
    (
        "Where prompts were found",
        "Tokens in <b>VRAM</b> (dark blue), brought back from <b>DRAM</b> (light blue), computed "
        "(grey). Text that is new must be computed by everyone.",
        plots.tiers,
        plots.has_tiers,
    ),
    (
        "The same over time",
        "Prompt tokens so far, each arm's first repeat; the dashed line is its end. A steeper "
        "slope is a faster server.",
        plots.over_time,
        plots.has_samples,
    ),
    (
        "Turn by turn",
        "Means over programs. A climb to the right is context computed again.",
        plots.turns,
        plots.has_turns,
    ),
    (
        "Programs and turns",
        "Share of programs that were done, and of turns that had their first token, by then. "
        "Upper left is better.",
        plots.distributions,
        lambda point: True,
    ),
)


def page(folders: Sequence[Path], title: str = "", base: str = "") -> str:
    """The page of result folders. ResultError where they hold nothing, or nothing that belongs
    together."""
    return page_of(read(folders, base), title)


def page_of(reported: Reported, title: str = "", where: str = "on real servers") -> str:
    """The whole page. `where`: the arms ran."""
    arms = list(dict.fromkeys(arm for point in reported.points for arm in point.arms))
    heading = title or _heading(arms, where)
    body = [f"<h1>{escape(heading)}</h1>"]
    body += words.verdicts(reported)
    if not reported.points:
        body.append(f"<p>{NOTHING}</p>")
    body += [words.cautions(reported), words.facts(reported), words.unfinished(reported.runs)]
    body.append(words.commands(reported.runs))
    body += _sweeps(reported, arms)
    for number, point in enumerate(reported.points):
        body += [f'<h2 id="p{number}">{words.capital(point.title)}</h2>', *_point(point)]
    return document.document(heading, filter(None, body))


def _heading(arms: Sequence[str], where: str) -> str:
    if len(arms) <= MOST_NAMED:
        return f"{' · '.join(arms) or 'Nothing measured'}, {where}"
    ours = [arm for arm, look in looks(arms).items() if look.is_ours]
    if ours:
        return f"{ours[0]} and {len(arms) - 1} other ways to serve, {where}"
    return f"{len(arms)} ways to serve, {where}"


def _sweeps(reported: Reported, arms: Sequence[str]) -> Iterator[str]:
    """What only several points can tell."""
    if len(reported.points) < 2:
        return
    links = (f'<a href="#p{i}">{words.capital(p.title)}</a>' for i, p in enumerate(reported.points))
    yield f"<h2>All points</h2><nav>{''.join(links)}</nav>{document.legend(looks(arms))}"
    for points in sweeps.levels(reported):
        yield document.section(
            f"JCT against load {_where(sweeps.level_title(points))}",
            "Lower is better; bars span the repeats of the first arm and ours.",
            sweeps.against_load(points),
        )
    for points in reported.loads.values():
        if len(points) > 1:
            which = points[0].load_title if len(reported.loads) > 1 else ""
            yield document.section(
                f"The less DRAM there is {_where(which)}",
                "To the right all programs' KV together is more than DRAM holds. An arm without "
                "DRAM is the same everywhere. Lower is better; bars span the repeats of the first "
                "arm and ours.",
                sweeps.against_pressure(points),
            )
    how = '<p class="how">A dot: within 2 % of the best that a server could run.</p>'
    for key, name in (("jct_mean_s", "Mean JCT"), ("computed_tokens", "Prompt tokens computed")):
        yield f"<h3>{name}</h3>{how}{tables.overview(reported.points, key)}"


def _where(text: str) -> str:
    return f'<small class="soft">{escape(text)}</small>' if text else ""


def _point(point: Point) -> Iterator[str]:
    yield document.legend(point.looks)
    yield tables.point_table(point)
    yield (
        '<p class="how">Means over the runs. In small: the ratio to the first arm, programs '
        "compared with themselves, and its 95 % interval.</p>"
    )
    for heading, how, draw, has in SECTIONS:
        if has(point):
            yield document.section(heading.format(base=escape(point.base)), how, draw(point))
