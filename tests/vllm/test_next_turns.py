"""What docs/models.md says that the second, third and fourth turn hit, held to vLLM's scheduler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.sim import versions
from continuum_connector.scheduler.kv_groups import CHUNKED, STATE, WINDOW, KvGroup
from continuum_connector.vllm import compat
from tests.vllm.agents import AgentEngine
from tests.vllm.drafts import HAS_FLAGS
from tests.vllm.harness import prompt
from tests.vllm.tiering import NO_HYBRID_TIER, SLOT_BYTES, answers_as_without_a_tier

MODELS = Path(__file__).parents[2] / "docs" / "models.md"
OTHERS: dict[str, tuple[Any, ...]] = {  # two groups beside one of full attention
    "full attention": (),
    "states": (STATE,),
    "windows of 64 tokens": (WINDOW, 64),
    "chunks of 64 tokens": (CHUNKED, 64),
}
COLUMNS: dict[str, tuple[dict[str, Any], bool]] = {  # keys, and whether drafts read attention's KV
    "stock vLLM": ({"policy": "stock"}, False),
    "pins": ({"policy": "fixed_ttl", "ttl_s": 60}, False),
    "DRAM alone": ({"policy": "lru_offload", "dram_bytes": 400 * SLOT_BYTES}, False),
    "pins, with speculative decoding": ({"policy": "fixed_ttl", "ttl_s": 60}, True),
    "DRAM, with speculative decoding": (
        {"policy": "lru_offload", "dram_bytes": 400 * SLOT_BYTES},
        True,
    ),
}


def read_table() -> dict[tuple[str, str], list[int]]:
    """The table whose columns are these; cells with `-` are left out."""
    text = MODELS.read_text()
    lines = text[text.index("| groups | stock vLLM |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["groups", *COLUMNS]
    assert [row[0] for row in rows[2:]] == list(OTHERS)
    return {
        (row[0], column): [int(each.replace(",", "")) for each in re.split(r",\s", cell)]
        for row in rows[2:]
        for column, cell in zip(COLUMNS, row[1:], strict=True)
        if cell != "-"
    }


@pytest.mark.parametrize(("groups", "column"), sorted(read_table()))
def test_the_next_turns_hit_what_the_table_says(groups: str, column: str) -> None:
    """400 blocks of 16 tokens; a program of 1000 tokens, each answer 100, each result 200; between
    its turns four others of 1500 tokens, one after the other."""
    keys, has_drafts = COLUMNS[column]
    kind = OTHERS[groups]
    if "dram_bytes" in keys and kind and not versions.CAN_FAIL_REQUESTS:
        pytest.skip(NO_HYBRID_TIER)
    if has_drafts and not HAS_FLAGS:
        pytest.skip("this vLLM does not say whose groups drafts read")
    is_drafted = has_drafts and groups == "states"
    others = [KvGroup(index, 16, *kind) for index in (1, 2)] if kind else []
    if is_drafted and not versions.CAN_FAIL_REQUESTS:
        pytest.skip("before vLLM 0.30 no state is left where such a lookup ends")
    if "dram_bytes" in keys and is_drafted and not compat.mends_drafted_states():
        pytest.skip("no DRAM tier for states beside drafts before vLLM 0.32")
    engine = AgentEngine(
        400,
        groups=(KvGroup(0, 16), *others),
        num_drafts=2 if has_drafts else 0,
        max_num_batched_tokens=2048,
        extra_config=keys,
    )
    tokens, hits = prompt(1000), []
    for turn in range(4):
        engine.run_turn(f"a{turn}", tokens, max_tokens=100, program="p")
        hits.append(sum(engine.cached[f"a{turn}"]))
        for number in range(10 * turn, 10 * turn + 4):
            engine.run_turn(f"x{number}", 1500, program=f"x{number}", seed=90 + number, final=True)
        tokens = engine.next_prompt(f"a{turn}", 200, seed=turn)
    assert hits == [0, *read_table()[groups, column]]
    assert answers_as_without_a_tier(engine)
