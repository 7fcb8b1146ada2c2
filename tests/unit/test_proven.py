"""The sentences for servers whose pins work and whose DRAM tier cannot."""

from __future__ import annotations

import pytest

from continuum_connector.vllm.proven import Server, why_no_disk, why_no_tier

FULL, STATE = "FullAttentionSpec", "MambaSpec"


@pytest.mark.parametrize(
    "server",
    [
        Server(),
        Server(kv_cache_dtype="fp8"),
        Server(has_drafts=True),
        Server(kinds=(STATE, FULL)),
        Server(kinds=(FULL, "SlidingWindowSpec"), has_drafts=True),
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
        (Server(kinds=(STATE, FULL), has_drafts=True), "has not run on a GPU"),
        (Server(kinds=("MLAAttentionSpec", "SlidingWindowMLASpec")), "DeepSeek V4"),
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
