"""The calibration as a picture: always as text, and as a file if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from continuum_connector.errors import shown
from continuum_connector.tools.analysis.hindsight import NUM_BINS, Calibration
from continuum_connector.tools.cli.server import CommandError

WIDTH = 50  # characters for 100 %
KINDS = (".png", ".svg", ".pdf")


def as_text(calibration: Calibration) -> Iterator[str]:
    """A bar per bin: `#` up to what was observed, `|` where it should have been."""
    yield f"{'predicted':>10}  {'observed':>8}  {'turns':>7}"
    for index, one in enumerate(calibration.bins):
        low, high = (100 * each // NUM_BINS for each in (index, index + 1))
        if not one.num:
            yield f"{low:>3}-{high:>3} %  {'-':>8}  {0:>7,}"
            continue
        bar = list(("#" * round(WIDTH * one.observed)).ljust(WIDTH + 1))
        bar[round(WIDTH * one.predicted)] = "|"
        observed = f"{100 * one.observed:.0f} %"
        yield f"{low:>3}-{high:>3} %  {observed:>8}  {one.num:>7,}  {''.join(bar).rstrip()}"


def check(path: Path | None) -> None:
    """Before a long read: can the picture be made at all?"""
    if path is None:
        return
    if path.suffix not in KINDS:
        raise CommandError(f"--plot {path} should end in one of {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise CommandError(f"there is no folder {path.parent}; make it, or give another --plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(
            "--plot needs matplotlib; install it with: pip install '.[plot]' in a clone, "
            "or leave --plot out: the same is in the text"
        )


def save(path: Path, calibrations: dict[str, Calibration]) -> None:
    """Draw predicted against observed, a line per trace, points as large as turns are many."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 6.0), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle="--", label="perfect")
    for name, calibration in calibrations.items():
        bins = [one for one in calibration.bins if one.num]
        most = max((one.num for one in bins), default=1)
        xs, ys = [one.predicted for one in bins], [one.observed for one in bins]
        # `$` would begin a formula, and a label that begins with _ is left out.
        label = f"{calibration.num:,} turns: {shown(name)}".replace("$", r"\$")
        (line,) = axes.plot(xs, ys, label=label)
        sizes = [20 + 180 * one.num / most for one in bins]
        axes.scatter(xs, ys, sizes, color=line.get_color())
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes.set(xlabel="predicted P(back in time)", ylabel="share that was back in time")
    axes.legend(loc="lower right")
    try:
        figure.savefig(path)
    except OSError as error:
        raise CommandError(f"{path} cannot be written ({error.strerror})") from None
