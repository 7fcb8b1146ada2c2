"""Rungs of the ladder (`python -m tests.server.ladder` climbs all of it) for the families whose
turns need more than full blocks: what the next turn hits, and that its answer is a cold cache's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.conftest import ServerFactory
from tests.server.helpers import last
from tests.server.ladder.compare import Difference, compare
from tests.server.ladder.families import FAMILIES, connector_options, model_of
from tests.server.ladder.player import Asked, Player, ask_cold
from tests.server.ladder.probes import PROBES, corrupt

RUNGS = {
    "gpt_oss": ("pinned", "loaded", "partly_in_vram", "failed_load"),
    "mamba2": ("pinned", "long_answer_loaded", "turn_ends_at_a_boundary"),
    "qwen3_next": ("pinned_then_loaded",),
}


@pytest.fixture(params=RUNGS)
def player(request: pytest.FixtureRequest, server_factory: ServerFactory, tmp_path: Path) -> Player:
    """On a server of little VRAM and DRAM that checks nothing it loads."""
    family = FAMILIES[request.param]
    options = connector_options(family, tmp_path, checksum_every=0)
    server_factory.stop()
    server = server_factory(request.param, model=model_of(family), **options)
    return Player(server, family, tmp_path, name=request.param)


def test_every_turn_hits_what_it_can_and_answers_as_from_a_cold_cache(player: Player) -> None:
    for name in RUNGS[player.name]:
        player.begin(f"main:{name}")
        PROBES[name](player)  # which asserts what is hit
    if not player.family.is_exact:
        return  # bfloat16 parts from itself when a prompt is computed in other pieces
    assert [each.why for each in differences(player, player.asked)] == [""] * len(player.asked)
    # What is compared is worth it: one byte of any group, wrong in DRAM, is seen in the answer.
    for group in range(player.family.num_groups):
        player.begin(f"main:flip {group}")
        (found,) = differences(player, corrupt(player, group))
        assert found.why, f"a byte of group {group} changed nothing"


def differences(player: Player, asked: list[Asked]) -> list[Difference]:
    """From what the same server answers where no cache has anything."""
    found = []
    for i, each in enumerate(asked):
        cold = ask_cold(player.server, each.body | last(), f"{each.probe} {i}")
        found.append(compare(each, cold, player.family.is_exact))
    return found
