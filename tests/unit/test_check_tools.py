"""The lines "tools" of `continuum check`, and the table that they share with the docs."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.tools.checks import Line, Verdict
from continuum_connector.tools.checks.machine import VllmSeen
from continuum_connector.tools.checks.plan import read_plan
from continuum_connector.tools.checks.serving import FAMILIES, MIDDLEWARE, agent_lines, family_of

SETUP = Path(__file__).resolve().parents[2] / "docs" / "agents-setup.md"
VLLM = VllmSeen(version="0.32.0", tool_parsers=("hermes", "mistral", "qwen3_json", "qwen3_xml"))
AUTO, NAMED = "--enable-auto-tool-choice", "--tool-call-parser"
SEEN = ("--enable-prompt-tokens-details", "--middleware", MIDDLEWARE)
WARNING, ERROR, OK = Verdict.WARNING, Verdict.ERROR, Verdict.OK


def lines(*words: str, vllm: VllmSeen = VLLM, **extra: Any) -> list[Line]:
    plan = replace(read_plan(words, {}), words=words, **extra)
    return list(agent_lines(plan, vllm))


def test_a_server_that_is_set_up_for_agents_has_one_ok_line() -> None:
    (line,) = lines("Qwen/Qwen3-8B", AUTO, NAMED, "hermes", *SEEN)
    assert line == Line("tools", OK, "calls are read by hermes, as Qwen3, Qwen3-Next write them")


def test_the_short_line_is_told_all_that_agents_lack() -> None:
    parser, rest = lines("Qwen/Qwen3-8B")
    assert parser.verdict is rest.verdict is WARNING
    assert "get 400" in parser.text
    assert parser.cure == (
        "for agents add --enable-auto-tool-choice --tool-call-parser hermes "
        "--reasoning-parser qwen3"
    )
    assert rest.cure == (
        "add --middleware continuum_connector.middleware.ProgramMiddleware "
        "--enable-prompt-tokens-details"
    )


@pytest.mark.parametrize(
    ("words", "verdict", "part", "cure"),
    [
        (("m", NAMED, "hermes"), WARNING, "get 400", "add --enable-auto-tool-choice"),
        (("m", AUTO, NAMED, "hermes"), OK, "is not known", ""),
        (("Qwen/Qwen3-8B", AUTO, NAMED, "hermse"), ERROR, "no tool parser 'hermse'", "hermes"),
        (("Qwen/Qwen3-8B", AUTO, NAMED, "mistral"), WARNING, "does not read", f"{NAMED} hermes"),
        (("Qwen/Qwen3-8B", AUTO, NAMED, "qwen3_json"), OK, "Qwen3", ""),
        (("Qwen/Qwen3-Coder-30B-A3B-Instruct", AUTO, NAMED, "hermes"), WARNING, "", "qwen3_xml"),
        (("m", AUTO, NAMED, "mine", "--tool-parser-plugin", "mine.py"), OK, "your plugin", ""),
        (("/models/Qwen3-8B/", "--enable_auto_tool_choice", f"{NAMED}=hermes"), OK, "Qwen3", ""),
        (("m", "--no-enable-auto-tool-choice"), WARNING, "get 400", "NAME"),
    ],
)
def test_the_parser(words: tuple[str, ...], verdict: Verdict, part: str, cure: str) -> None:
    (line,) = lines(*words, *SEEN)
    assert line.verdict is verdict
    assert part in line.text
    assert cure in line.cure


@pytest.mark.parametrize(
    ("given", "part", "cure"),
    [
        (SEEN[:1], "known by their prompts only", SEEN[2]),
        (SEEN[1:], "report 0 cached tokens", SEEN[0]),
    ],
)
def test_what_agents_are_and_see(given: tuple[str, ...], part: str, cure: str) -> None:
    _, line = lines("Qwen/Qwen3-8B", AUTO, NAMED, "hermes", *given)
    assert line.verdict is WARNING
    assert part in line.text
    assert line.cure.endswith(cure)


def test_headers_that_nobody_reads_are_told() -> None:
    extra = {"kv_connector_extra_config": {"id_headers": "X-Run-Id"}}
    config = json.dumps({"kv_connector": "ContinuumConnector"} | extra)
    words = ("Qwen/Qwen3-8B", AUTO, NAMED, "hermes", "--kv-transfer-config", config)
    told = [lines(*words, *given)[-1].text for given in (SEEN, SEEN[:1])]
    assert ["id_headers have no effect" in text for text in told] == [False, True]


def test_without_vllm_no_name_is_called_wrong() -> None:
    (line,) = lines("Qwen/Qwen3-8B", AUTO, NAMED, "hermes", *SEEN, vllm=VllmSeen())
    assert line.verdict is OK


def test_nothing_is_said_of_a_command_that_starts_no_server_or_has_no_options() -> None:
    assert lines("m", why_no_server="it does not") == []
    assert lines() == []


def test_the_docs_have_the_same_table() -> None:
    rows = re.findall(r"^\| (.*?) \| (`.*`) \| (.*?) \|$", SETUP.read_text(), re.MULTILINE)
    found = {name: (re.findall(r"\w+", named), thinks.strip("`-")) for name, named, thinks in rows}
    found.pop("Models")
    assert found == {each.name: ([*each.tools], each.reasoning) for each in FAMILIES}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-Coder-Next", "Qwen3-Coder, Qwen3-Coder-Next"),
        ("Qwen/Qwen3.5-35B-A3B", "Qwen3.5, Qwen3.6"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3, Qwen3-Next"),
        ("NousResearch/Hermes-3-Llama-3.1-8B", "Hermes 2 Pro, 3, 4"),
        ("deepseek-ai/DeepSeek-V3.1", "DeepSeek V3.1"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek V3"),
        ("meta-llama/Llama-3.1-8B-Instruct", "Llama 3.1, 3.2, 3.3"),
        ("mistralai/Devstral-Small-2507", "Mistral, Mixtral, Ministral, Devstral"),
        ("openai/gpt-oss-20b", "gpt-oss"),
        ("/models/zai-org/GLM-4.7-Flash/", "GLM-4.7, GLM-5"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("facebook/opt-125m", None),
    ],
)
def test_a_model_belongs_to_the_narrowest_family(model: str, name: str | None) -> None:
    family = family_of(model)
    assert (family.name if family else None) == name
