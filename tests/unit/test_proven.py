"""The sentences for servers of which something is not proven: their KV groups, DRAM, disk."""

from __future__ import annotations

import pytest

from continuum_connector.errors import ConfigError
from continuum_connector.vllm.proven import (
    Group,
    Server,
    check_groups,
    why_no_disk,
    why_no_tier,
)

FULL, STATE = "FullAttentionSpec", "MambaSpec"
DRAFTED = Server(kinds=(STATE, FULL), has_drafts=True)


@pytest.mark.parametrize(
    "server",
    [
        Server(),
        Server(kv_cache_dtype="fp8"),
        Server(has_drafts=True),
        Server(kinds=(STATE, FULL)),
        DRAFTED,
        Server(kinds=(STATE,), state_mode="all", finds_answers=True, leaves_right_states=False),
        Server(has_drafts=True, finds_answers=True, leaves_right_states=False),
        Server(kinds=(FULL, "SlidingWindowSpec"), has_drafts=True),
        Server(kinds=("MLAAttentionSpec", "SlidingWindowMLASpec")),
        Server(pipeline_parallel=4),
        Server(executor="ray"),
        Server(fails_by_request=False),
    ],
)
def test_a_tier_is_there_where_all_of_it_is_proven(server: Server) -> None:
    assert why_no_tier(server) == ""


@pytest.mark.parametrize(
    ("server", "part"),
    [
        (Server(kv_cache_dtype="nvfp4"), "where its scales lie"),
        (Server(pipeline_parallel=2, executor="ray"), "--distributed-executor-backend mp"),
        (Server(kinds=(FULL, FULL), fails_by_request=False), "vLLM 0.30 can"),
        (DRAFTED._replace(leaves_right_states=False), "vLLM 0.32 with its model runner V2"),
        (DRAFTED._replace(state_mode="all"), "--mamba-cache-mode all"),
        (DRAFTED._replace(finds_answers=True), "--prefix-cache-retention-interval"),
    ],
)
def test_what_is_not_proven_gets_one_sentence(server: Server, part: str) -> None:
    said = why_no_tier(server)
    assert part in said
    assert said.startswith("no DRAM tier")
    assert "\n" not in said


@pytest.mark.parametrize("kind", [FULL, "MLAAttentionSpec"])
def test_a_disk_is_there_where_a_hit_is_a_chain_of_blocks(kind: str) -> None:
    assert why_no_disk(Server(kinds=(kind,))) == ""


@pytest.mark.parametrize(
    ("server", "part"),
    [
        (Server(kinds=(FULL, FULL)), "windows, chunks or states"),
        (Server(kinds=("SlidingWindowSpec",)), "windows, chunks or states"),
        (Server(kinds=(STATE,)), "windows, chunks or states"),
        (Server(has_drafts=True), "speculative decoding"),
        (Server(has_lora=True), "--enable-lora: an adapter that is trained again"),
        (Server(pipeline_parallel=2), "pipeline parallelism"),
    ],
)
def test_a_disk_that_is_not_proven_gets_one_sentence(server: Server, part: str) -> None:
    said = why_no_disk(server)
    assert part in said
    assert said.startswith(("no disk tier with ", "no disk tier for "))


@pytest.mark.parametrize(
    ("group", "part"),
    [
        (Group("SlidingWindowMLASpec", 64, is_scratch=True), "that no hit reads"),  # V4.1, GLM-5.3
        (Group("FullAttentionSpec in the role host", 64), "in the role host"),
        (Group("RSWASpec", 64), "KV group 0 is RSWASpec"),
        (Group("MambaSpec", 64, mode="none"), "mamba_cache_mode none"),
        (Group("FullAttentionSpec", 48), r"block sizes \[48\] with hashes of 32"),
    ],
)
def test_groups_that_are_not_proven_are_left_to_stock_vllm(group: Group, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        check_groups([group], 32, 1)


def test_what_pins_know_is_served() -> None:
    check_groups([Group("FullAttentionSpec", 64), Group("MambaSpec", 64, mode="align")], 32, 1)
    with pytest.raises(ConfigError, match="no KV cache"):
        check_groups([], 32, 1)
    with pytest.raises(ConfigError, match="decode context parallelism"):
        check_groups([Group("FullAttentionSpec", 64)], 32, 2)
