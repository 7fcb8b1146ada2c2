"""Adaptive: the best alternative by brute force, what moves it, and what is never kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from continuum_connector.forecast import EDGES, Forecast
from continuum_connector.policy import adaptive
from continuum_connector.policy.adaptive import (
    FORESEEN,
    HOLD_S,
    MIN_P_BACK,
    MIN_P_READ,
    Adaptive,
    Stake,
)
from continuum_connector.policy.base import (
    After,
    Choice,
    FinishedTurn,
    Free,
    Offload,
    Pin,
    Snapshot,
    stores,
)
from continuum_connector.programs.program import Hints
from tests.unit.deciding import curve, finished, forecasts, world

ADAPTIVE = Adaptive(60.0)
BACK_IN_2_S = Forecast.known(2.0)
SECONDS = st.one_of(st.just(0.0), st.floats(0.001, 100.0))


def decide(turn: FinishedTurn, snapshot: Snapshot) -> Choice:
    return ADAPTIVE.decide(turn, snapshot)


def ttl(choice: Choice) -> float:
    return choice.decision.ttl_s if isinstance(choice.decision, Pin) else 0.0


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is known of a turn, and of the world."""
    has_tier = draw(st.booleans())
    turn = {
        "num_blocks": draw(st.integers(1, 1000)),
        "gap": draw(forecasts()),
        "prefill_s": draw(SECONDS),
        "load_s": draw(SECONDS) if has_tier else math.inf,
        "bus_s": draw(SECONDS) if has_tier else 0.0,
    }
    snapshot = {
        "has_tier": has_tier,
        "num_waiting": draw(st.integers(0, 30)),
        "num_running": draw(st.integers(0, 30)),
        "mean_blocks": draw(st.floats(1, 1000)),
        "price": draw(st.one_of(st.just(0.0), st.floats(1e-6, 10))),
        "residence_s": draw(st.one_of(st.just(math.inf), st.floats(0.1, 1e4))),
        "num_at_bus": draw(st.one_of(st.just(0.0), st.floats(0.0, 100.0))),
    }
    return turn, snapshot


def stake_of(turn: FinishedTurn, snapshot: Snapshot) -> Stake:
    p_read = turn.gap.within(snapshot.residence_s) if snapshot.has_tier else 0.0
    return adaptive._stake(turn, snapshot, adaptive._stored_s(turn, snapshot, p_read), p_read)


def brute_force(turn: FinishedTurn, snapshot: Snapshot) -> dict[str, float]:
    """Each alternative's best value, straight from the definitions: saved minus paid."""
    k, gap = turn.num_blocks / snapshot.mean_blocks, turn.gap
    prefill_s = (1 + snapshot.num_waiting + snapshot.num_running) * turn.prefill_s
    ttls = [0.0, *(edge for edge in EDGES if edge <= 60.0)]
    cost = max(snapshot.price * turn.num_blocks, FORESEEN * k)
    residence_s = min(snapshot.residence_s, EDGES[-1])

    def pin(ttl_s: float, from_dram_s: float) -> float:
        in_time = gap.within(ttl_s)
        later = max(0.0, gap.within(residence_s) - in_time)
        saved = in_time * prefill_s + later * from_dram_s
        return k * saved - cost * gap.held(ttl_s)

    values = {"free": 0.0, "pin": max(pin(ttl_s, 0.0) for ttl_s in ttls)}
    if snapshot.has_tier:
        is_refused = snapshot.residence_s < math.inf and gap.within(residence_s) < MIN_P_READ
        from_dram_s = (
            0.0
            if is_refused
            else max(0.0, prefill_s - turn.load_s - turn.bus_s * snapshot.num_at_bus)
        )
        values["offload"] = k * gap.within(residence_s) * from_dram_s
        values["pin_store"] = max(pin(ttl_s, from_dram_s) for ttl_s in ttls)
    return values


@given(situations())
def test_the_best_alternative_by_brute_force_is_chosen(
    situation: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    turn, snapshot = finished(**situation[0]), world(**situation[1])
    choice, expected = decide(turn, snapshot), brute_force(turn, snapshot)
    assert choice.values == pytest.approx(expected, rel=1e-6, abs=1e-6)
    match choice.decision:
        case Pin(then=After.STORE):
            name = "pin_store"
        case Pin():
            name = "pin"
        case Offload():
            name = "offload"
        case _:
            name = "free"
    # What is left on the table is at most what the making of a pin costs.
    if turn.gap.within(60.0) < MIN_P_BACK:
        assert "pin" not in name
        expected = {n: value for n, value in expected.items() if "pin" not in n}
    lost = max(expected.values()) - expected[name]
    assert lost <= HOLD_S * turn.num_blocks + 1e-6 * max(1.0, *expected.values())
    assert name in choice.values
    assert ttl(choice) <= 60.0


@given(situations(), st.floats(0, 10))
def test_a_higher_price_never_makes_a_pin_longer(
    situation: tuple[dict[str, Any], dict[str, Any]], more: float
) -> None:
    turn, snapshot = finished(**situation[0]), situation[1]
    dearer = world(**snapshot | {"price": snapshot["price"] + more})
    assert ttl(decide(turn, dearer)) <= ttl(decide(turn, world(**snapshot)))


@given(situations(), st.integers(0, 100), st.sampled_from(["num_waiting", "num_running"]))
def test_more_turns_that_a_prefill_would_delay_never_make_a_pin_shorter(
    situation: tuple[dict[str, Any], dict[str, Any]], more: int, which: str
) -> None:
    turn, snapshot = finished(**situation[0]), situation[1]
    busier = world(**snapshot | {which: snapshot[which] + more})
    assert ttl(decide(turn, world(**snapshot))) <= ttl(decide(turn, busier))


@given(situations(), st.floats(0, 100))
def test_more_prefill_saved_never_makes_a_pin_shorter(
    situation: tuple[dict[str, Any], dict[str, Any]], more: float
) -> None:
    known, snapshot = situation[0], world(**situation[1])
    dearer = finished(**known | {"prefill_s": known["prefill_s"] + more})
    assert ttl(decide(finished(**known), snapshot)) <= ttl(decide(dearer, snapshot))


@given(situations(), st.floats(0, 100))
def test_a_slower_bus_never_makes_a_pin_shorter(
    situation: tuple[dict[str, Any], dict[str, Any]], more: float
) -> None:
    known, snapshot = situation[0], world(**situation[1])
    slower = finished(**known | {"load_s": known["load_s"] + more})
    assert ttl(decide(finished(**known), snapshot)) <= ttl(decide(slower, snapshot))


@given(situations(), st.booleans())
def test_a_pin_is_made_where_its_value_is_above_the_price(
    situation: tuple[dict[str, Any], dict[str, Any]], is_above: bool
) -> None:
    """Pin.value is the break-even price: just below it a pin pays, just above none does."""
    turn = finished(**situation[0])
    free = decide(turn, world(**situation[1] | {"price": 0.0}))
    if not isinstance(free.decision, Pin) or free.decision.value < 1e-6:
        return
    price = free.decision.value * (1.01 if is_above else 0.8)
    if price <= FORESEEN / situation[1]["mean_blocks"]:
        return  # that much is charged in any case
    snapshot = world(**situation[1] | {"price": price})
    values = decide(turn, snapshot).values
    gain = values.get("pin_store", values["pin"]) - values.get("offload", 0.0)
    assert gain == 0.0 if is_above else gain > 0.0


def test_with_the_price_of_one_waiting_turn_it_is_equation_2_but_for_the_time_held() -> None:
    """60 % are back after 1 s, 30 % after 4 s; R = 5 s, T = 0. Paper: 3 - 1 = 2 against
    4.5 - 4 = 0.5. A pin of 4 s is held 0.6 * 1 + 0.4 * 4 = 2.2 s only: its gain is 2.3."""
    one, four = (next(i for i, e in enumerate(EDGES) if e >= t) for t in (1.0, 4.0))
    cdf = [0.0] * one + [0.6] * (four - one) + [0.9] * (len(EDGES) - four)
    turn = finished(gap=Forecast(cdf), prefill_s=5.0)
    choice = decide(turn, world(price=1 / 10))
    assert ttl(choice) == EDGES[four] == pytest.approx(4.3, abs=0.5)
    held = 0.6 * EDGES[one] + 0.4 * EDGES[four]
    assert choice.values["pin"] == pytest.approx(4.5 - held, abs=0.2)


@pytest.mark.parametrize("hints", [Hints(final=True), Hints(final=True, ttl_s=9.0)])
def test_the_last_turn_is_freed_at_once(hints: Hints) -> None:
    turn = finished(hints=hints, gap=BACK_IN_2_S, prefill_s=9.0)
    assert decide(turn, world()) == Choice(Free(), "last turn of its program")


def test_what_went_away_or_was_condensed_or_has_no_block_is_freed() -> None:
    known = {"gap": BACK_IN_2_S, "prefill_s": 9.0, "load_s": 1.0}
    assert decide(finished(aborted=True, **known), world(True)).decision == Free()
    assert decide(finished(0, **known), world(True)).decision == Free()
    condensed = decide(finished(hints=Hints(compaction=True), **known), world(True))
    assert condensed.decision == Free()
    assert "extends an older prefix" in condensed.why


@given(situations())
def test_where_nothing_is_saved_nothing_is_kept(
    situation: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    turn = finished(**situation[0] | {"prefill_s": 0.0})
    choice = decide(turn, world(**situation[1]))
    assert choice.decision == Free()
    assert not any(choice.values.values())


@given(situations())
def test_nothing_goes_to_dram_without_a_tier(
    situation: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    choice = decide(finished(**situation[0]), world(**situation[1] | {"has_tier": False}))
    assert set(choice.values) == {"free", "pin"}
    decision = choice.decision
    assert isinstance(decision, Free) or (isinstance(decision, Pin) and decision.then is After.DROP)


def test_a_place_in_the_queue_is_worth_nothing_for_another_loses_it() -> None:
    turn = finished(gap=BACK_IN_2_S, prefill_s=5.0)
    short, long = (world(price=0.1, queueing_s=q, eta=1.0) for q in (0.0, 900.0))
    one, other = decide(turn, short), decide(turn, long)
    assert isinstance(one.decision, Pin)
    assert (other.decision, other.why, other.values) == (one.decision, one.why, one.values)


def test_a_decision_is_put_into_words_and_prices_for_who_asks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn, asked = finished(gap=BACK_IN_2_S, prefill_s=5.0), []
    monkeypatch.setattr(adaptive, "_why_pin", lambda *_: asked.append("why") or "so")
    monkeypatch.setattr(Adaptive, "_values", lambda *_: asked.append("values") or {"pin": 1.0})
    choice = decide(turn, world(price=0.1))
    assert isinstance(choice.decision, Pin)
    assert not asked
    assert (choice.why, choice.values, asked) == ("so", {"pin": 1.0}, ["why", "values"])


def test_a_prefill_delays_everybody_and_a_load_only_its_own_turn() -> None:
    """0.2 s to compute, 1 s to load: alone it is computed again, beside five others stored."""
    turn = finished(gap=BACK_IN_2_S, prefill_s=0.2, load_s=1.0)
    assert decide(turn, world(True, price=1.0)).decision == Free()
    busy = world(True, price=1.0, num_running=3, num_waiting=2)
    choice = decide(turn, busy)
    assert choice.decision == Offload()
    assert choice.values["offload"] == pytest.approx(6 * 0.2 - 1.0)


def test_beside_a_copy_a_pin_saves_what_the_turns_behind_its_load_would_lose() -> None:
    """Of 5 s to compute a load saves 4.5: 0.5 s are left for the pin, and what others lose."""
    turn = finished(gap=BACK_IN_2_S, prefill_s=5.0, load_s=0.5, bus_s=0.5)
    for num_turns, is_kept in ((0.0, False), (4.0, True), (900.0, True)):
        choice = decide(turn, world(True, price=0.1, num_at_bus=num_turns))
        assert isinstance(choice.decision, Pin) is is_kept
        assert stores(choice.decision)  # the bus may be idle by then
        assert choice.values["offload"] == pytest.approx(max(0.0, 4.5 - 0.5 * num_turns))
    assert (
        choice.values["pin_store"] == choice.values["pin"]
    )  # at most what it saves without a copy


def test_a_pin_that_saves_less_than_its_making_takes_is_not_made() -> None:
    """1,000 blocks of an average turn of 1,000: 0.25 ms to hold them and to let them go."""
    for prefill_s, is_kept in ((0.00024, False), (0.00027, True)):
        turn = finished(1000, gap=Forecast.known(0.01), prefill_s=prefill_s)
        assert isinstance(decide(turn, world(mean_blocks=1000.0)).decision, Pin) is is_kept


def test_without_pressure_a_pin_must_still_be_worth_the_little_that_is_to_be_expected() -> None:
    """1 s saved is worth 1,000 s of room that nobody waits for, and no more."""
    for prefill_s, is_kept in ((0.0018, False), (0.0025, True)):  # the grid says 2 to 2.3 s
        turn = finished(gap=BACK_IN_2_S, prefill_s=prefill_s)
        assert isinstance(decide(turn, world()).decision, Pin) is is_kept


@pytest.mark.parametrize("has_tier", [False, True])
def test_nine_in_ten_pins_in_vain_are_too_many_whatever_the_tenth_saves(has_tier: bool) -> None:
    for p_back, is_kept in ((0.01, False), (0.09, False), (0.11, True)):
        turn = finished(gap=curve([(20.0, p_back)]), prefill_s=1e3, load_s=1.0)
        choice = decide(turn, world(has_tier))
        assert isinstance(choice.decision, Pin) is is_kept
        assert isinstance(choice.decision, Offload) is (has_tier and not is_kept)
        if not has_tier and not is_kept:
            assert choice.why == (
                f"no pin pays: {p_back:.0%} of such pauses end within 60 s, "
                "1e+03 s to compute again"
            )


def test_dram_that_loads_no_faster_than_prefill_is_not_written() -> None:
    turn = finished(gap=BACK_IN_2_S, prefill_s=0.2, load_s=0.2)
    assert decide(turn, world(True)).decision == Pin(
        ttl(decide(turn, world(True))), After.DROP, pytest.approx(0.01, rel=0.2)
    )
    choice = decide(turn, world(True, price=1.0))
    assert choice.decision == Free()
    assert choice.why == "no pin pays; 0.2 s to compute, 0.2 s to load"


@pytest.mark.parametrize("prefill_s", [2.0, 1e-9])
@pytest.mark.parametrize("price", [0.0, 1.0])
@pytest.mark.parametrize("has_tier", [False, True])
def test_before_a_prefill_was_measured_it_says_that_its_cost_is_from_a_prior(
    has_tier: bool, price: float, prefill_s: float
) -> None:
    known = finished(gap=BACK_IN_2_S, prefill_s=prefill_s, load_s=0.1)
    measured = decide(known, world(has_tier, price=price))
    choice = decide(replace(known, is_prior=True), world(has_tier, price=price))
    assert choice.decision == measured.decision
    assert choice.why == f"{measured.why}, from a prior"


def test_what_would_be_gone_before_it_is_read_is_not_written() -> None:
    turn = finished(gap=curve([(100.0, 0.05), (1000.0, 1.0)]), prefill_s=5.0, load_s=0.5)
    assert decide(turn, world(True, price=1.0)).decision == Offload()
    assert decide(turn, world(True, price=1.0, residence_s=200.0)).decision == Offload()  # 16 %
    assert decide(turn, world(True, price=1.0, residence_s=120.0)).decision == Free()  # 7 %
    choice = decide(turn, world(True, price=1.0, residence_s=100.0))
    assert choice.decision == Free()
    assert (
        choice.why
        == "no pin pays; only 5% of such pauses end within the 100 s that DRAM would keep it"
    )


def test_what_dram_has_refused_is_pinned_or_let_go() -> None:
    """Beside its copy a pin saves the load only; without it, the prefill."""
    turn = finished(gap=BACK_IN_2_S, prefill_s=5.0, load_s=0.5)
    assert decide(turn, world(True, price=0.1)).decision == Offload()
    assert isinstance(decide(turn, world(True, price=0.1, takes_store=False)).decision, Pin)
    choice = decide(turn, world(True, price=1.0, takes_store=False))
    assert choice.decision == Free()
    assert choice.why == "no pin pays, and DRAM has no room for it now"


def test_a_client_gets_the_ttl_it_asks_for_while_that_costs_nobody_anything() -> None:
    turn = finished(hints=Hints(ttl_s=30.0), gap=BACK_IN_2_S, prefill_s=1.0)
    choice = decide(turn, world())
    assert ttl(choice) == 30.0
    assert choice.why.startswith("client asked for 30 s; 100% of such pauses end within 30 s")
    assert ttl(decide(finished(hints=Hints(ttl_s=1e6), gap=BACK_IN_2_S), world())) == 60.0
    assert (
        ttl(decide(finished(hints=Hints(ttl_s=0.5), gap=BACK_IN_2_S, prefill_s=1.0), world())) > 2
    )


def test_a_client_that_asks_for_more_than_its_turn_is_worth_gets_what_that_is() -> None:
    """Half are back after 2 s, the rest never: up to T, 5 s are saved and 1 + T/2 s are held."""
    two = next(i for i, e in enumerate(EDGES) if e >= 2.0)
    gap = Forecast([0.0] * two + [0.5] * (len(EDGES) - two))
    turn = finished(hints=Hints(ttl_s=50.0), gap=gap, prefill_s=10.0)
    assert ttl(decide(finished(gap=gap, prefill_s=10.0), world(price=0.1))) == EDGES[two]
    assert 6.0 < ttl(decide(turn, world(price=0.1))) < 8.0
    assert ttl(decide(turn, world(price=1.0))) == 0.0


@given(situations(), st.floats(0.01, 100))
def test_a_client_gets_the_longest_ttl_that_costs_no_more_than_it_saves(
    situation: tuple[dict[str, Any], dict[str, Any]], hint_s: float
) -> None:
    known, snapshot = situation[0], world(**situation[1])
    own_s = ttl(decide(finished(**known), snapshot))
    turn = finished(hints=Hints(ttl_s=hint_s), **known)
    stake = replace(stake_of(turn, snapshot), cost=snapshot.price * turn.num_blocks)
    limit = min(hint_s, 60.0)
    pays = [t for t in (*EDGES, limit) if t <= limit and stake.gain(turn.gap, t) >= 0.0]
    assert ttl(decide(turn, snapshot)) == pytest.approx(max([own_s, *pays]))


def test_a_hint_asks_the_forecast_for_no_more_than_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each costs microseconds, and the scheduler's step waits: not one for each of 47 edges."""
    asked = []
    within = Forecast.within
    monkeypatch.setattr(Forecast, "within", lambda *args: asked.append(1) or within(*args))
    never = finished(hints=Hints(ttl_s=60.0), gap=Forecast([1e-3] * len(EDGES)), prefill_s=1.0)
    assert ttl(decide(never, world(price=1.0))) == 0.0
    assert len(asked) < 6


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_client_that_asks_for_no_time_gets_no_pin(has_tier: bool) -> None:
    turn = finished(hints=Hints(ttl_s=0.0), gap=BACK_IN_2_S, prefill_s=9.0, load_s=1.0)
    decision = decide(turn, world(has_tier)).decision
    assert decision == (Offload() if has_tier else Free())


def test_who_is_known_to_be_back_in_time_is_pinned_and_nobody_else() -> None:
    def known(gap: Forecast) -> Choice:
        return decide(finished(prefill_s=9.0, gap=gap), world(price=0.1))

    assert 5.0 <= ttl(known(Forecast.known(5.0))) < 6.0
    for never_in_time in (9.0, 61.0):
        assert known(Forecast.known(never_in_time)).decision == Free()
    assert known(Forecast.never()).why == "nobody expects it back"


@given(st.floats(0.03, 1000))
def test_no_pin_of_a_known_gap_expires(gap_s: float) -> None:
    choice = decide(finished(prefill_s=9.0, gap=Forecast.known(gap_s)), world())
    assert not isinstance(choice.decision, Pin) or choice.decision.ttl_s >= gap_s


@pytest.mark.parametrize("has_tier", [False, True])
def test_nothing_is_pinned_while_stock_would_find_more(has_tier: bool) -> None:
    """Not for a hint either; what is worth a copy still goes to DRAM."""
    for hints in (Hints(), Hints(ttl_s=30.0)):
        turn = finished(hints=hints, gap=BACK_IN_2_S, prefill_s=9.0, load_s=1.0)
        assert isinstance(decide(turn, world(has_tier)).decision, Pin)
        choice = decide(turn, world(has_tier, pins_lose=True))
        assert choice.decision == (Offload() if has_tier else Free())
        assert has_tier or "stock vLLM would have found more" in choice.why
