"""bench/storm: what it fires, what it makes of what it saw, and that nothing bad passes."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from bench.serve.apis import APIS
from bench.serve.metrics import Metrics, open_accounts, parse_metrics, still_held
from bench.storm import census
from bench.storm.agents import Storm
from bench.storm.garbage import PLACES, VALUES, encode, put
from bench.storm.judge import ABORTED, RESET_REFUSED, Ended, Look, Run, Tally, Verdict, judge
from bench.storm.plan import WHO, draw_agent

# --- what it fires ---------------------------------------------------------------------------
FROM_NOBODY: Any = None  # a server that is never asked


def test_equal_seeds_fire_equal_agents_and_every_kind_of_them_comes() -> None:
    agents = [draw_agent(1, number) for number in range(400)]
    assert agents == [draw_agent(1, number) for number in range(400)]
    assert agents[0] != draw_agent(2, 0)
    assert {agent.api for agent in agents} == set(APIS)
    assert {agent.who for agent in agents} == set(WHO)
    turns = [turn for agent in agents for turn in agent.turns]
    for kind in ("forks", "compacts", "abort_s", "spoiled", "hints"):
        assert any(getattr(turn, kind) for turn in turns)
    for name in ("stream", "n", "stop", "prompt_logprobs"):
        assert any(name in turn.fields for turn in turns)
    assert all(0.02 <= turn.abort_s <= 0.5 for turn in turns if turn.abort_s)


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_any_value_can_be_put_into_any_place(place: tuple[str, ...]) -> None:
    for value in VALUES:
        body = {"model": "m", "kv_transfer_params": {"continuum": {"program": "p"}}}
        whole = json.dumps(body)
        changed = dict(body)
        put(changed, place, value)
        assert json.loads(encode(changed))["model"] == "m"
        assert json.dumps(body) == whole  # the agent's next turn is not spoiled


def test_resets_and_switches_fall_evenly_on_the_storms_quarters() -> None:
    storm = Storm(FROM_NOBODY, 400)
    halves = [sum(low <= at < low + 100 for at, _ in storm._events) for low in (0, 100, 200, 300)]
    assert len(set(halves)) == 1
    assert not [1 for at, _ in storm._events if at >= 400]


def test_a_fault_of_the_storms_own_is_raised_wherever_it_was() -> None:
    storm = Storm(FROM_NOBODY, 1)

    async def fault() -> None:
        raise ZeroDivisionError

    async def run() -> None:
        storm.sent = 1  # over before it began
        storm._start(fault())
        await asyncio.sleep(0)
        await storm.run()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run())


# --- what it makes of what it saw ------------------------------------------------------------
MIB = 2**20
REQUESTS = 20_000


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


def a_run(leak: float = 0.0, grows: int = 0, requests: int = REQUESTS) -> Run:
    """A storm in which all went well; the process grows by `leak` bytes per request, and one
    container by `grows` items per 1,000."""
    run = Run()
    run.tally.by_status.update({"200": requests - 100, "400": 60, ABORTED: 40})
    rng = random.Random(1)
    for done in range(0, requests + 1, requests // 50):
        warm = 60 * MIB * min(1.0, 4 * done / requests)
        size = 600 * MIB + warm + rng.gauss(0, 1) * MIB + leak * done
        tables = {"Table.items": 500 + grows * done // 1000, "Turns.now": 9}
        run.looks.append(Look(done, done, size, 700_000, metrics(done), tables))
    return run


def wrong(run: Run) -> list[str]:
    return [finding.what for finding in judge(run) if finding.verdict is Verdict.WRONG]


def retold(run: Run, **more: float) -> Run:
    """The same, whose last look has these numbers instead."""
    run.looks[-1] = replace(run.looks[-1], metrics=metrics(run.looks[-1].done, **more))
    return run


def test_a_storm_in_which_all_went_well_has_no_finding_against_it() -> None:
    assert {finding.verdict for finding in judge(a_run())} == {Verdict.OK}


@pytest.mark.parametrize("status", ["500", "422", "no answer within 180 s"])
def test_one_unexpected_status_is_enough(status: str) -> None:
    run = a_run()
    run.tally.add(Ended(RESET_REFUSED), "a reset")
    run.tally.add(Ended(status, "why"), "what was sent")
    assert wrong(run) == ["statuses"]
    assert run.tally.unexpected == [f"{status}: what was sent: why"]


def test_examples_of_what_was_unexpected_are_bounded() -> None:
    tally = Tally()
    for _ in range(1000):
        tally.add(Ended("500", "x" * 10**5), "hint")
    assert tally.num_unexpected == 1000
    assert len("".join(tally.unexpected)) < 10**4


def test_a_connector_that_does_nothing_is_found() -> None:
    assert "connector" in wrong(retold(a_run(), **{"continuum:loads_total": 0.0}))


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


def test_a_leak_and_a_container_that_grows_are_found_unless_the_storm_was_short() -> None:
    assert wrong(a_run(leak=2048)) == ["memory"]
    grown = a_run(grows=10)
    assert wrong(grown) == ["containers"]
    assert [f.text for f in judge(grown) if "Table.items" in f.text]
    short = {f.what: f.verdict for f in judge(a_run(leak=10**5, grows=10, requests=800))}
    assert {short[what] for what in ("containers", "memory", "hits")} == {Verdict.UNSEEN}


def test_of_a_process_that_wiggles_a_third_of_the_looks_may_be_anything() -> None:
    run = a_run()
    run.looks = [
        replace(look, num_bytes=9e9) if not n % 3 else look for n, look in enumerate(run.looks)
    ]
    assert not wrong(run)


def test_hits_that_decay_are_found_by_whichever_counter() -> None:
    for name in ("continuum:hit_tokens_total", "vllm:prefix_cache_hits_total"):
        run = a_run()
        most = 50 * REQUESTS * 0.6  # nothing is found after that
        run.looks = [
            replace(look, metrics=metrics(look.done, **{name: min(50.0 * look.done, most)}))
            for look in run.looks
        ]
        assert wrong(run) == ["hits"]
        assert "50% early, 0% late" in {each.what: each.text for each in judge(run)}["hits"]


def test_the_census_counts_what_lies_in_containers_of_containers_once() -> None:
    class Table:
        def __init__(self) -> None:
            self.rows = {"a": [1, 2, 3], "b": []}
            self.number = 7

    Table.__module__ = "continuum_connector.made_up"
    root = Table()
    root.other = root  # type: ignore[attr-defined]
    assert census.count(root) == {"Table.rows": 5}
