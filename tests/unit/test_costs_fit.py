"""Costs are recovered from noisy steps, and no kind of step can spoil them."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import pytest

from continuum_connector.costs import (
    HALF_LIFE,
    MIN_STEPS,
    NUM_KINDS,
    PER_KIND,
    CopyModel,
    PrefillModel,
    RobustFit,
    Work,
)

# An 8B model on one H100, about: 6 ms a step, 40 us a token, 128K of context double that.
TRUE = (6e-3, 4e-5, 3e-10, 2e-5, 2e-9)
CHUNK = 8192


def work(source: random.Random) -> Work:
    """A step of a busy server: mostly decodes, some prompts of any length behind any prefix."""
    decodes = source.randrange(0, 128)
    context = decodes * source.randrange(500, 40_000)
    if source.random() < 0.5:
        return Work(0, 0.0, decodes + 1, context + 1000)
    new, cached = source.randrange(1, CHUNK), int(2 ** source.uniform(0, 17))
    return Work(new, new * (cached + new / 2), decodes, context)


def truth(step: Work) -> float:
    return sum(c * f for c, f in zip(TRUE, (1.0, *step), strict=True))


def steps(num: int, seed: int, noise: float = 0.05) -> Iterator[tuple[Work, float]]:
    source = random.Random(seed)
    for _ in range(num):
        step = work(source)
        yield step, truth(step) * source.gauss(1.0, noise)


def fed(num: int = 2000, seed: int = 0, noise: float = 0.05) -> PrefillModel:
    model = PrefillModel(CHUNK)
    for step, seconds in steps(num, seed, noise):
        model.add(step, seconds)
    return model


def assert_close(model: PrefillModel, tolerance: float = 0.05) -> None:
    """Every prefill anybody asks for, from 100 to 128K tokens, bare or behind a long prefix."""
    for new in (100, 1000, 8000, 32_000, 128_000):
        for cached in (0, 1000, 100_000):
            chunks = -(-new // CHUNK)
            base, token, pair = TRUE[:3]
            true = chunks * base + token * new + pair * new * (cached + new / 2)
            assert model.seconds(new, cached) == pytest.approx(true, rel=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_known_costs_are_recovered_from_noisy_steps(seed: int) -> None:
    model = fed(seed=seed)
    assert_close(model)
    assert model._fit.coefficients[:3] == pytest.approx(TRUE[:3], rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_took_ten_times_as_long_change_little(seed: int) -> None:
    """A compile, a pause of the machine: one step in twenty."""
    model, source = PrefillModel(CHUNK), random.Random(seed)
    for step, seconds in steps(2000, seed):
        model.add(step, seconds * (10.0 if source.random() < 0.05 else 1.0))
    assert_close(model, 0.08)


def test_one_outlier_among_the_first_steps_does_not_matter() -> None:
    model = PrefillModel(CHUNK)
    for number, (step, seconds) in enumerate(steps(64, 3, 0.01)):
        model.add(step, seconds * (50.0 if number == 2 else 1.0))
    assert_close(model, 0.1)


def test_an_hour_of_decoding_forgets_nothing_about_prompts() -> None:
    model = fed()
    before = model.seconds(50_000, 10_000)
    for number in range(20_000):
        step = Work(0, 0.0, 32, 32 * 4000 + number % 100)
        model.add(step, truth(step))
    assert model.seconds(50_000, 10_000) == pytest.approx(before, rel=0.05)
    assert_close(model, 0.08)


def test_steps_that_all_look_alike_predict_themselves_and_never_below_zero() -> None:
    model = PrefillModel(CHUNK)
    step = Work(512, 512 * 256.0, 0, 0)
    for _ in range(500):
        model.add(step, 0.05)
    assert model.seconds(512) == pytest.approx(0.05, rel=0.02)
    assert all(c >= 0.0 for c in model._fit.coefficients)


def test_a_faster_machine_is_followed() -> None:
    """A throttled clock that recovers: the kinds of steps that come are learned anew at once."""
    model = fed()
    for step, seconds in steps(1500, 9):
        model.add(step, seconds / 2)
    assert model.seconds(8000) == pytest.approx(truth(Work(8000, 32e6, 0, 0)) / 2, rel=0.08)


def test_what_was_seen_long_ago_gives_way_to_what_is_seen_now() -> None:
    """The machine became twice as fast, and since then only short prompts have come, alone."""
    model, source = fed(noise=0.02), random.Random(6)
    for _ in range(10 * HALF_LIFE):
        new = source.randrange(200, 1000)
        step = Work(new, new * new / 2, 0, 0)
        model.add(step, truth(step) / 2 * source.gauss(1.0, 0.02))
    for new in (250, 500, 1000):
        true = truth(Work(new, new * new / 2, 0, 0)) / 2
        assert model.seconds(new) == pytest.approx(true, rel=0.05)


def test_costs_are_never_negative_whatever_comes() -> None:
    source = random.Random(4)
    fit = RobustFit(3)
    for _ in range(3000):
        features = [1.0, source.choice([0, 1, 5, 1e9]), source.uniform(0, 1e-3)]
        fit.add(features, source.choice([0.0, -1.0, 1e-9, 1.0, 1e6, float("inf"), float("nan")]))
        assert all(0.0 <= c < float("inf") for c in fit.coefficients)


def test_nothing_is_known_before_enough_steps() -> None:
    model = PrefillModel(CHUNK)
    for _ in range(1000):
        model.add(Work(0, 0.0, 8, 8000), 0.01)  # decodes teach nothing about prompts
    assert not model.is_known
    assert model.seconds(1000) == 0.0
    for step, seconds in steps(200, 0):
        if step.num_new:
            model.add(step, seconds)
        if model.num_steps == MIN_STEPS:
            break
    assert model.is_known
    assert model.seconds(1000) > 0.0
    assert model.seconds(0) == 0.0


def test_the_base_is_counted_once_per_step() -> None:
    model = PrefillModel(1000)
    model.assume((1.0, 0.0, 0.0))
    assert [model.seconds(n) for n in (1, 1000, 1001, 5000)] == [1.0, 1.0, 2.0, 5.0]


def test_memory_is_bounded() -> None:
    fit, source = RobustFit(4), random.Random(0)
    for _ in range(5000):
        features = [2 ** source.uniform(0, 40) for _ in range(4)]
        fit.add(features, sum(features) * 1e-9)
    assert len(fit._kinds) == NUM_KINDS
    assert sorted(place for place, _ in fit._kinds.values()) == list(range(NUM_KINDS))
    assert fit._x.shape == (NUM_KINDS * PER_KIND, 4)
    assert fit.coefficients == pytest.approx([1e-9] * 4, rel=0.01)


def test_a_step_costs_a_few_calls_however_long_it_has_served() -> None:
    """Counted, for a busy machine takes any time: 20 are some 10 us on an idle core."""
    model, calls = PrefillModel(CHUNK), [0] * 30

    def count(frame: object, event: str, argument: object) -> None:
        calls[now] += event in ("call", "c_call")

    before = sys.getprofile()
    for number, (step, seconds) in enumerate(list(steps(3000, 0))):
        now = number // 100
        sys.setprofile(count)
        model.add(step, seconds)
        sys.setprofile(before)
    assert calls[0] < 6_000  # while little is known it is fitted often
    assert max(calls[1:]) < 2_500


def test_copies_have_a_latency_and_a_rate() -> None:
    """A load waits for the step that submits it, then for the bus; one in ten waits for others."""
    source, model = random.Random(1), CopyModel()
    assert not model.is_known
    assert model.seconds(100) == 0.0
    for _ in range(400):
        num = int(2 ** source.uniform(0, 13))
        seconds = (0.012 + num * 4e-5) * source.gauss(1.0, 0.05)
        model.add(num, seconds * (5.0 if source.random() < 0.1 else 1.0))
    assert model._fit.coefficients == pytest.approx((0.012, 4e-5), rel=0.05)
    assert model.seconds(1000) == pytest.approx(0.052, rel=0.05)
    assert model.seconds(0) == 0.0
