"""What the lab models, against numbers computed by hand; and the published workload."""

from __future__ import annotations

import pytest

from bench.common.plans import Span, TurnPlan
from bench.sim import validate
from bench.sim.hardware import machine, step_seconds
from bench.sim.load import prefill_seconds
from bench.sim.workloads.made_up import eight_turns
from bench.tests import lab_results
from continuum_connector.costs import Work

H100 = machine("H100")
FLOPS = 989e12 * 0.63  # per second that a prefill reaches


# --- steps ------------------------------------------------------------------------------
def test_a_long_prompt_takes_its_products_and_its_attention() -> None:
    """8192 tokens behind nothing: 8192 * 4096 pairs of 4 * 32 * 32 * 128 operations."""
    work = Work(num_new=8192, pairs=8192 * 4096)
    products, attention = 8192 * 13.96e9 / FLOPS, 8192 * 4096 * 524_288 / FLOPS
    assert products == pytest.approx(0.1835, rel=1e-3)
    assert attention == pytest.approx(0.0282, rel=1e-2)
    assert step_seconds(H100, work) == pytest.approx(0.004 + 20e-6 + products + attention)


def test_a_decode_takes_the_reading_of_the_weights_and_of_its_context() -> None:
    work = Work(num_decodes=10, decode_context=100_000)
    weights, context = 16.06e9 / 3350e9, 100_000 * 131_072 / 3350e9
    attention = 100_000 * 524_288 / FLOPS
    expected = 0.004 + 10 * 20e-6 + weights + attention + context
    assert step_seconds(H100, work) == pytest.approx(expected)


def test_fp8_doubles_the_rate_of_the_products_and_not_of_attention() -> None:
    work = Work(num_new=8192, pairs=8192 * 4096)
    products, attention = 8192 * 2 * 68.5e9 / (2 * FLOPS), 8192 * 4096 * 4 * 80 * 64 * 128 / FLOPS
    on = machine("H100", "llama-70b-fp8", kv_tokens=4096)
    assert step_seconds(on, work) == pytest.approx(0.004 + 20e-6 + products + attention)


def test_a_step_reads_the_experts_that_its_tokens_choose_and_its_states() -> None:
    """One of 80e9 bytes in all: what is no expert, a share of 77.3e9, a state read and written."""
    on = machine("H200", "qwen3-next-80b-fp8", kv_tokens=1 << 20)
    experts, states = 48 * 512 * 3 * 2048 * 512, 3 * 12 * 1_097_728
    few = 80e9 - experts * (1 - 10 / 512) ** 4
    work = Work(num_decodes=4)
    assert step_seconds(on, work) == pytest.approx(0.00408 + (few + 8 * states) / 4800e9)
    assert on.model.bytes_read(100_000) == pytest.approx(80e9)


def test_qwen3_next_takes_what_was_published_for_an_h200() -> None:
    """20.4 s to the first token of 256 K, which was fitted; 4.7 and 6.5 ms a token, which were
    not, at 1 K and 256 K."""
    on = machine("H200", "qwen3-next-80b-fp8")
    length = 262_144
    prompt = TurnPlan((Span(1, length),), Span(1, 1, length))
    assert prefill_seconds(on, prompt, 0) == pytest.approx(20.4, rel=0.02)
    for context, token_s in ((1024, 1 / 210.8), (length, 1 / 152.8)):
        step_s = step_seconds(on, Work(num_decodes=1, decode_context=context))
        assert step_s == pytest.approx(token_s, rel=0.06)


# --- machines ---------------------------------------------------------------------------
def test_the_published_gpus_have_the_published_room() -> None:
    assert H100.num_blocks == 434_000 // 64 + 1
    assert H100.block_bytes == 64 * 131_072


def test_a_model_without_a_published_count_gets_what_its_weights_leave() -> None:
    """0.9 * 141 GB less 4 GB of activations and the weights."""
    found = machine("H200", "llama-70b-fp8")
    assert found.kv_tokens == pytest.approx((126.9e9 - 4e9 - 70.6e9) / 327_680, abs=1)


def test_the_limits_of_a_step_are_the_gpu_s_or_what_is_said() -> None:
    def limits(**said: int) -> tuple[int, int]:
        gpu = machine("H100", **said).gpu
        return gpu.chunk, gpu.max_num_seqs

    assert limits() == (8192, 1024)
    assert limits(max_num_batched_tokens=2048) == (2048, 1024)
    assert limits(max_num_batched_tokens=512) == (512, 512)
    assert limits(max_num_seqs=8) == (8192, 8)
    with pytest.raises(ValueError, match="max_num_batched_tokens 4 is below max_num_seqs 8"):
        machine(max_num_batched_tokens=4, max_num_seqs=8)


def test_a_model_that_does_not_fit_is_refused_with_the_cure() -> None:
    with pytest.raises(ValueError, match="take a larger GPU"):
        machine("L40S", "llama-70b-fp8")


# --- the published workload and its tables ----------------------------------------------
def test_each_turn_continues_the_one_before_it_with_its_own_text() -> None:
    one, other = eight_turns(1).programs[:2]
    assert tuple(turn.num_prompt_tokens for turn in one.turns) == (
        *(92, 1840, 3449, 6025, 7454, 10299, 12333, 13193),
    )
    for before, after in zip(one.turns, one.turns[1:], strict=False):
        said = before.tokens() + list(before.answer.tokens())
        assert after.tokens()[: len(said)] == said
    shared = [a == b for a, b in zip(one.turns[-1].tokens(), other.turns[-1].tokens(), strict=True)]
    assert sum(shared) == 80 == shared.index(False)
    assert [turn.is_final for turn in one.turns] == [False] * 7 + [True]


def test_a_column_is_held_against_what_its_runs_say_of_single_turns() -> None:
    """Turn i + 1 of a program takes as long as any; so T8/T1 is 1 and T2 is the mean of 1 to 5."""
    records = {
        validate.job(arm, "H200", 10).key: lab_results.record(arm, turns=8)
        for arm in ("stock", *validate.FORK)
    }
    jct = validate.validation(records).splitlines()
    row = next(line for line in jct if line.startswith("| H200 10 |"))
    assert row == "| H200 10 | 417 / 24 / 0.06 |" + " 119 / 24 / 0.20 |" * 3 + " - |"
    of_turns = validate.validation(records, validate.OF_TURNS).splitlines()
    row = next(line for line in of_turns if line.startswith("| H200 10 |"))
    ends = " 4.55 / 1 / 0.22 |" + " 0.263 / 1 / 3.81 |" * 3
    assert row == f"| H200 10 |{ends}" + " 54.9 / 3 / 0.05 |" * 3
