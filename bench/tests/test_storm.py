"""bench/storm: what it makes of what it saw, and that nothing bad passes."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.serve.ledger import open_accounts, still_held
from bench.serve.metrics import Metrics, parse_metrics
from bench.serve.server import ServerError
from bench.storm import __main__ as command
from bench.storm.arm import OURS, STOCK, ArmRun, Sample, tracebacks
from bench.storm.client import ABORTED, Ended, Tally
from bench.storm.judge import Finding, Verdict, compare, hit_rate, judge
from bench.storm.processes import (
    API_SERVER,
    ENGINE,
    WORKER,
)
from bench.storm.slopes import Growth, growth, sparkline, theil_sen

MIB = 2**20
REQUESTS = 20_000


# --- runs that were never run -------------------------------------------------------------
def metrics(done: int, **more: float) -> Metrics:
    """A server's numbers after `done` requests: books that close, half of all tokens found."""
    text = {
        'continuum:transfers_admitted_total{direction="store"}': done / 2,
        'continuum:transfers_admitted_total{direction="load"}': done / 4,
        "continuum:pins_started_total": done / 2,
        "continuum:pins_ended_total": done / 2,
        "continuum:stores_total": done / 2,
        "continuum:loads_total": done / 4,
        "continuum:hit_tokens_total": 50 * done,
        "continuum:prompt_tokens_total": 100 * done,
        "vllm:prefix_cache_hits_total": 50 * done,
        "vllm:prefix_cache_queries_total": 100 * done,
    } | more
    return parse_metrics("\n".join(f"{name} {value}" for name, value in text.items()))


def a_run(name: str = OURS, leak: float = 0.0, requests: int = REQUESTS) -> ArmRun:
    """A storm in which all went well; the EngineCore grows by `leak` bytes per request."""
    run = ArmRun(name, alive=True, answers=[{"yes"}, {"no"}])
    run.tally.by_status.update({"200": requests - 100, "400": 60, ABORTED: 40})
    rng = random.Random(name)
    for done in range(0, requests + 1, requests // 200):
        warm = 60 * MIB * min(1.0, 4 * done / requests)
        rss = {
            role: int(600 * MIB + warm + rng.gauss(0, 1) * MIB + leak * done * (role == ENGINE))
            for role in (API_SERVER, ENGINE, WORKER)
        }
        run.samples.append(Sample(float(done), done, rss))
        run.scrapes.append((done, metrics(done)))
    return run


def wrong(run: ArmRun, stock: ArmRun | None = None) -> list[str]:
    return [f.what for f in judge(run, stock) if f.verdict is Verdict.WRONG]


def found(what: str, findings: list[Finding]) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_a_storm_in_which_all_went_well_has_no_finding_against_it() -> None:
    findings = judge(a_run(), a_run(STOCK))
    assert {finding.verdict for finding in findings} == {Verdict.OK}


# --- statuses -----------------------------------------------------------------------------
@pytest.mark.parametrize("status", ["500", "422", "connection broken", "200 without an answer"])
def test_one_unexpected_status_is_enough(status: str) -> None:
    run = a_run()
    run.tally.add(Ended(status, "why"), "what was sent")
    assert wrong(run) == ["statuses"]
    assert run.tally.unexpected == [f"{status}: what was sent: why"]


def test_examples_of_what_was_unexpected_are_bounded() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.add(Ended("500", "x" * 10**5), "hint")
    assert tally.num_unexpected == 1000
    assert len("".join(tally.unexpected)) < 10**4


def test_a_dead_server_an_idle_connector_and_a_wrong_answer_are_found() -> None:
    dead, idle, lying = a_run(), a_run(), a_run()
    dead.alive = False
    idle.scrapes[-1] = (REQUESTS, metrics(REQUESTS, **{"continuum:loads_total": 0.0}))
    assert wrong(dead) == ["server"]
    assert found("ledger", judge(dead, None)).verdict is Verdict.UNSEEN
    assert "connector" in wrong(idle)
    lying.answers[1].add("maybe")
    assert wrong(lying) == ["answers"]
    other = a_run(STOCK)
    other.answers[0] = {"nay"}
    assert wrong(a_run(), other) == ["answers"]


def test_a_traceback_that_is_no_refusal_and_not_stocks_is_found() -> None:
    run, stock = a_run(), a_run(STOCK)
    run.tracebacks = ["fastapi.exceptions.RequestValidationError: 1", "CancelledError: 7"]
    stock.tracebacks = ["CancelledError: 8"]
    assert wrong(run, stock) == []
    assert wrong(run) == ["log"]
    run.tracebacks.append("continuum_connector.errors.InvariantError: transfer 812")
    assert wrong(run, stock) == ["log"]
    assert "transfer 812" in found("log", judge(run, stock)).text


# --- the ledger -----------------------------------------------------------------------------
def test_books_that_do_not_close_are_found_with_their_numbers() -> None:
    assert open_accounts(metrics(8)) == []
    pins = metrics(8, **{"continuum:pins_ended_total": 3.0})
    assert open_accounts(pins) == ["pins: 4 started, 3 ended, 0 live"]
    store = {'continuum:transfers_in_flight{direction="store"}': 1.0}
    assert open_accounts(metrics(8, **store)) == ["stores: 4 admitted, 4 settled, 1 in flight"]
    for way in ("write", "read"):  # of a disk
        begun = {f'continuum:transfers_admitted_total{{direction="{way}"}}': 2.0}
        lost = [f"{way}s: 2 admitted, 1 settled, 0 in flight"]
        assert open_accounts(metrics(8, **begun, **{f"continuum:{way}s_total": 1.0})) == lost
    run = a_run()
    run.open_accounts = open_accounts(pins)
    assert wrong(run) == ["ledger"]


def test_what_an_idle_server_still_holds_is_found() -> None:
    run = a_run()
    run.held = still_held(metrics(8, **{"continuum:held_blocks": 7.0, "continuum:pins_live": 0.0}))
    assert run.held == {"held_blocks": 7.0}
    writing = {'continuum:disk_blocks{state="writing"}': 4.0}
    assert still_held(metrics(8, **writing)) == {"disk_blocks writing": 4.0}
    assert wrong(run) == ["ledger"]


# --- memory -----------------------------------------------------------------------------
def test_a_leak_of_two_kib_a_request_is_noticed_in_its_process() -> None:
    assert wrong(a_run(leak=2048), a_run(STOCK)) == [f"memory, {ENGINE}"]


def test_growth_that_stock_has_too_is_not_ours() -> None:
    assert wrong(a_run(leak=2048), a_run(STOCK, leak=2048)) == []


def test_a_storm_too_short_or_too_noisy_says_that_it_saw_nothing() -> None:
    steady = Growth(600 * MIB, 0.0, 0.1 * MIB, REQUESTS)
    leak = replace(steady, slope=10 * MIB)
    assert compare(ENGINE, leak, steady).verdict is Verdict.WRONG
    noisy = replace(steady, noise=5 * MIB)
    assert compare(ENGINE, leak, noisy).verdict is Verdict.UNSEEN
    assert compare(ENGINE, replace(leak, requests=150), steady).verdict is Verdict.UNSEEN
    findings = judge(a_run(leak=10**5), None)
    assert found("memory", findings).verdict is Verdict.UNSEEN


def test_a_third_of_the_points_may_be_anything() -> None:
    x = list(range(90))
    y = [3.0 * i + (10**6 if i % 4 == 0 else 0) for i in x]
    assert theil_sen(x, y) == pytest.approx(3.0, rel=0.05)
    assert theil_sen([5, 5, 5], [1, 2, 3]) == 0.0
    assert theil_sen(range(10_000), [2.0 * i for i in range(10_000)]) == pytest.approx(2.0)


def test_only_the_second_half_counts_and_noise_is_what_wiggles() -> None:
    x = [float(i) for i in range(1001)]
    flat = growth(x, [min(i, 500.0) * MIB for i in x])
    assert (flat.slope, flat.noise, flat.requests) == (0.0, 0.0, 1000)
    rng = random.Random(1)
    slopes = [growth(x, [100 + rng.gauss(0, 5) for _ in x]) for _ in range(20)]
    assert all(abs(each.slope) < each.noise for each in slopes)
    assert growth([], []) == Growth(0.0, 0.0, 0.0, 0)


def test_a_sparkline_goes_from_the_least_to_the_most() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5], 3) == "▁▁▁"
    assert sparkline([]) == ""


# --- hits -----------------------------------------------------------------------------
def test_hits_that_decay_are_found_by_whichever_counter() -> None:
    for name in ("continuum:hit_tokens_total", "vllm:prefix_cache_hits_total"):
        run = a_run()
        most = 50 * REQUESTS * 0.6  # nothing is found after that
        run.scrapes = [
            (done, metrics(done, **{name: min(50.0 * done, most)})) for done, _ in run.scrapes
        ]
        assert wrong(run) == ["hits"]
        early = hit_rate(run, (name,), "vllm:prefix_cache_queries_total")
        assert (early.early, early.late) == (0.5, 0.0)


# --- the log, the command -------------------------------------------------------------------
def test_tracebacks_are_told_by_their_last_line() -> None:
    log = """\
INFO:     Started
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929] Traceback (most recent call last):
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929]   File "x.py", line 1, in y
(APIServer pid=1) ERROR 11-22 13:18:57 [serving.py:929] ValueError: one
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)   File "x.py", line 1, in y
(EngineCore pid=2) KeyError: 'two'
"""
    assert tracebacks(log) == ["ValueError: one", "KeyError: 'two'"]


@pytest.mark.parametrize(("leak", "status"), [(0, 0), (2048, 1)])
def test_the_exit_status_is_1_if_anything_is_wrong(
    leak: int, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {OURS: a_run(leak=leak), STOCK: a_run(STOCK)}
    monkeypatch.setattr(command, "make_model", lambda _shape: tmp_path)
    monkeypatch.setattr(command, "run_arm", lambda arm, *_: runs[arm])
    out = tmp_path / "new" / "storm.json"
    assert command.main(["--requests", str(REQUESTS), "--json", str(out)]) == status
    written = json.loads(out.read_text())
    assert [server["name"] for server in written["servers"]] == [OURS, STOCK]
    verdicts = {finding["verdict"] for finding in written["findings"]}
    assert ("WRONG" in verdicts) == bool(status)


def test_a_server_that_does_not_start_leaves_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_arm(arm: str, *_: object) -> ArmRun:
        if arm == STOCK:
            raise ServerError("stock did not answer within 420 s\nits log")
        return a_run()

    monkeypatch.setattr(command, "make_model", lambda _shape: tmp_path)
    monkeypatch.setattr(command, "run_arm", run_arm)
    assert command.main([]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "start" in printed
    assert "closed, and nothing held once idle" in printed
