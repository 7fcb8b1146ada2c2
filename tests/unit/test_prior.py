"""What a prefill is expected to take before one was measured, and what takes its place."""

from __future__ import annotations

import pytest

from bench.sim.hardware import GPUS, MODELS, machine, step_seconds
from continuum_connector.costs import (
    GENERATIONS,
    KNOWN,
    MIN_STEPS,
    UNKNOWN,
    Costs,
    Shape,
    Work,
    cpu,
    device_named,
    prefill_prior,
)

PRIOR = (0.01, 1e-4, 1e-9)


@pytest.mark.parametrize(
    ("name", "generation", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 9, "H100"),
        ("NVIDIA A100-SXM4-80GB", 8, "A100"),
        ("NVIDIA GeForce RTX 5090", 12, "5090"),
        ("NVIDIA L40S", 8, "L40S"),
        ("Tesla V100-SXM2-16GB", 7, "V100"),
        ("AMD_Instinct_MI300X", None, "MI300X"),
        ("NVIDIA GH200 480GB", 9, "GH200"),
    ],
)
def test_a_device_is_known_by_a_word_of_its_name(
    name: str, generation: int | None, known: str
) -> None:
    assert device_named(name, generation) is KNOWN[known]


def test_a_device_that_is_not_listed_is_a_slow_one_of_its_generation() -> None:
    assert device_named("NVIDIA RTX A4500", 8) is GENERATIONS[8]
    assert device_named("NVIDIA GPU of the future", 99) is UNKNOWN
    assert device_named("") is UNKNOWN
    assert UNKNOWN.flops == min(device.flops for device in KNOWN.values())


def test_more_cores_take_less() -> None:
    shape = Shape(2e7, 1e4, 4e7)
    one, eight = (prefill_prior(shape, cpu(number)) for number in (1, 8))
    assert all(slow > fast for slow, fast in zip(one, eight, strict=True))


@pytest.mark.parametrize(
    ("gpu", "model"),
    [
        ("H100", "llama-8b"),
        ("L40S", "llama-8b"),
        ("A100-40", "llama-8b"),
        ("H200", "llama-70b-fp8"),
        ("H200", "qwen3-next-80b-fp8"),
    ],
)
@pytest.mark.parametrize("num_new", [500, 2000, 8000])
def test_it_is_right_to_a_factor_of_three_where_the_lab_was_fitted_to_published_times(
    gpu: str, model: str, num_new: int
) -> None:
    one = MODELS[model]
    shape = Shape(one.token_flops, one.pair_flops, one.weight_bytes)
    base, per_token, per_pair = prefill_prior(shape, device_named(GPUS[gpu].name))
    work = Work(num_new, num_new * num_new / 2)
    expected = base + per_token * work.num_new + per_pair * work.pairs
    measured = step_seconds(machine(gpu, model, kv_tokens=1 << 20), work)
    assert measured / 3 < expected < measured * 3


def test_a_prompt_costs_what_the_prior_says_until_two_steps_were_seen() -> None:
    costs = Costs(512)
    assert costs.has_prior_prefill
    costs.assume(prefill=PRIOR)
    assert costs.prefill_s(1000, 500) == pytest.approx(2 * 0.01 + 0.1 + 1e-9 * 1000 * 1000)
    for _ in range(2):
        assert costs.has_prior_prefill
        costs.step(Work(num_new=256, pairs=256 * 128.0), 0.3)
    assert not costs.has_prior_prefill
    assert not costs.knows_prefill
    assert costs.prefill_s(1000) == pytest.approx(1000 * 0.3 / 256)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_a_wrong_prior_is_gone_once_prefills_are_known(factor: float) -> None:
    costs, unbiased = Costs(512), Costs(512)
    wrong = tuple(each * factor for each in PRIOR)
    costs.assume(prefill=(wrong[0], wrong[1], wrong[2]))
    for number in range(MIN_STEPS):  # too short for a first rate, as turns behind a prefix are
        assert costs.has_prior_prefill
        for each in (costs, unbiased):
            each.step(Work(20 + number, (20 + number) * 300.0), 0.01 + number * 1e-4)
    assert not costs.has_prior_prefill
    assert costs.prefill_s(512) == unbiased.prefill_s(512) > 0.0


def test_a_prior_does_not_count_as_known() -> None:
    costs = Costs(512)
    costs.assume(prefill=PRIOR)
    gauges = list(costs.gauges(0.0))
    assert ("costs_known", 0.0, "prefill") in gauges
    [per_token] = [value for name, value, label in gauges if label == "0"]
    assert per_token == pytest.approx((0.02 + 0.1 + 1e-9 * 1000 * 500) / 1000)
