"""Typical gaps of well-known tools: a prior for the first few calls, and nothing more.

Every number here was measured elsewhere, on other machines and other work, so a seed weighs as
much as a handful of observations (tool_times.PRIOR_WEIGHT) and fades as soon as there are some.
Sources: SWE-Bench agents, tools of 0.925 s on average (Continuum, Table 2); coding agents, gaps
of p10 4 s, p50 9 s, p90 72 s, and people, p50 127 s, p90 1,543 s (public Claude Code traces);
single commands in a sandbox: editor 0 s, grep 0.2 s, pytest of a path 0.7 s, of everything
6.9 s, pip install 8.2 s. The spreads of single commands are guesses, and wide ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from continuum_connector.forecast.forecast import EDGES

Curve = Sequence[float]  # P(gap > EDGES[i])

_NORMAL = NormalDist()
_LASTS_LONGER = 1.0  # sigma of ln(gap): nine in ten between a quarter and four times the median


def log_normal(median_s: float, sigma: float = _LASTS_LONGER, never: float = 0.01) -> Curve:
    """Gaps around `median_s`, sigma of their logarithm; a share `never` has no end."""
    mu = math.log(median_s)
    return tuple(
        never + (1.0 - never) * (1.0 - _NORMAL.cdf((math.log(edge) - mu) / sigma)) for edge in EDGES
    )


def mixture(*parts: tuple[float, Curve]) -> Curve:
    """The curve of (share, curve) pairs; shares add up to 1."""
    shares = [share for share, _ in parts]
    curves = zip(*(curve for _, curve in parts), strict=True)
    return tuple(sum(s * p for s, p in zip(shares, ps, strict=True)) for ps in curves)


FAST = log_normal(0.45, 1.2)  # mean 0.92 s: a tool in a sandbox
AGENT = mixture((0.7, log_normal(7.0, 0.5)), (0.3, log_normal(45.0, 1.2)))  # 4, 9, 84 s
PERSON = log_normal(127.0, 1.8, never=0.1)  # one answer in ten is the last
TOOLS = mixture((0.5, FAST), (0.5, AGENT))  # a tool of which nothing is known
EVERYTHING = mixture((0.85, TOOLS), (0.15, PERSON))  # a turn of which nothing is known

_EDITOR, _LOOK, _SEARCH = log_normal(0.05), log_normal(0.1), log_normal(0.2)
_NETWORK, _INSTALL, _BUILD = log_normal(2.0, 1.2), log_normal(8.0, 1.2), log_normal(10.0, 1.5)
_TESTS = mixture((0.6, log_normal(0.75)), (0.4, log_normal(7.0, 1.3)))  # a path; everything
_SCRIPT = log_normal(0.6, 1.5)

_NAMES: dict[str, Curve] = {
    "str_replace_editor str_replace_based_edit_tool edit_file write_file apply_patch sed": _EDITOR,
    "cd ls cat head tail pwd echo mkdir cp mv rm nl wc touch read_file list_files": _LOOK,
    "grep rg find awk git search": _SEARCH,
    "curl wget fetch_url web_search fetch": _NETWORK,
    "pip npm apt apt-get conda uv yarn pnpm": _INSTALL,
    "make cmake cargo mvn gradle ninja docker": _BUILD,
    "pytest tox unittest": _TESTS,
    "python python3 node": _SCRIPT,
}
BY_TOOL: dict[str, Curve] = {
    name: curve for names, curve in _NAMES.items() for name in names.split()
}
