"""The parsers that `continuum check` and docs/agents-setup.md name are vLLM's."""

from __future__ import annotations

from itertools import chain

import pytest
import vllm

from continuum_connector.tools.checks.serving import FAMILIES, Family
from continuum_connector.vllm.planned import about_vllm

HERE = set(about_vllm()["tool_parsers"])
OLDER = "0.32"  # releases before it lack some of a family's other parsers


def test_every_release_has_the_parser_that_check_asks_for() -> None:
    assert {family.tools[0] for family in FAMILIES} <= HERE


@pytest.mark.skipif(vllm.__version__ < OLDER, reason="it has fewer parsers")
def test_vllm_has_every_tool_parser() -> None:
    assert set(chain.from_iterable(family.tools for family in FAMILIES)) <= HERE


def test_vllm_has_every_reasoning_parser() -> None:
    from vllm.reasoning import ReasoningParserManager

    named = {family.reasoning for family in FAMILIES} - {""}
    assert named <= set(ReasoningParserManager.list_registered())


SAME = [family for family in FAMILIES if len(family.tools) > 1 and family.name != "Llama 4"]


@pytest.mark.parametrize("family", SAME, ids=lambda family: family.name)
def test_a_familys_other_parsers_are_the_same_one(family: Family) -> None:
    from vllm.tool_parsers import ToolParserManager

    assert (
        len({ToolParserManager.get_tool_parser(name) for name in HERE.intersection(family.tools)})
        == 1
    )
