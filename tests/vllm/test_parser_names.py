"""The parsers that `continuum check` and docs/agents-setup.md name are vLLM's."""

from __future__ import annotations

from itertools import chain

import pytest

from continuum_connector.tools.checks.families import FAMILIES, Family
from continuum_connector.vllm.about import about_vllm


def test_vllm_has_every_tool_parser() -> None:
    named = set(chain.from_iterable(family.tools for family in FAMILIES))
    assert named <= set(about_vllm()["tool_parsers"])


def test_vllm_has_every_reasoning_parser() -> None:
    from vllm.reasoning import ReasoningParserManager

    named = {family.reasoning for family in FAMILIES} - {""}
    assert named <= set(ReasoningParserManager.list_registered())


SAME = [family for family in FAMILIES if len(family.tools) > 1 and family.name != "Llama 4"]


@pytest.mark.parametrize("family", SAME, ids=lambda family: family.name)
def test_a_familys_other_parsers_are_the_same_one(family: Family) -> None:
    from vllm.tool_parsers import ToolParserManager

    assert len({ToolParserManager.get_tool_parser(name) for name in family.tools}) == 1
