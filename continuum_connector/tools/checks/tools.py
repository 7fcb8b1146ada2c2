"""Lines on agents: can they call tools here, are they known, do they see what was cached?

docs/agents-setup.md shows the table of families; a test compares. Another test finds each name in
the installed vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from continuum_connector.tools.checks.line import Line, error, ok, warning
from continuum_connector.tools.checks.machine import VllmSeen
from continuum_connector.tools.checks.plan import Plan

PAGE = "docs/agents-setup.md"
MIDDLEWARE = "continuum_connector.middleware.ProgramMiddleware"


class Family(NamedTuple):
    """Which parsers of vLLM read what a model writes. `pattern`: of its name in lower case.
    `tools`: for --tool-call-parser; the first is meant, the others read the same. `reasoning`: for
    --reasoning-parser, if it thinks."""

    name: str
    pattern: str
    tools: tuple[str, ...]
    reasoning: str = ""


# The first match counts, so what is narrower stands first.
FAMILIES = (
    Family("Qwen3-Coder, Qwen3-Coder-Next", r"qwen3-coder", ("qwen3_xml", "qwen3_coder")),
    Family("Qwen3.5, Qwen3.6", r"qwen3\.\d", ("qwen3_xml", "qwen3_coder"), "qwen3"),
    Family("Qwen3, Qwen3-Next", r"qwen3", ("hermes", "qwen3_json"), "qwen3"),
    Family("QwQ", r"qwq", ("hermes", "qwen3_json"), "deepseek_r1"),
    Family("Qwen2.5", r"qwen2\.5", ("hermes", "qwen3_json")),
    Family("Hermes 2 Pro, 3, 4", r"hermes-[234]", ("hermes",)),
    Family("gpt-oss", r"gpt-oss", ("openai",), "openai_gptoss"),
    Family("GLM-4.7, GLM-5", r"glm-(4\.7|5)", ("glm47", "glm45"), "glm47"),
    Family("GLM-4.5, GLM-4.6", r"glm-4\.[56]", ("glm45", "glm47"), "glm45"),
    Family("Kimi K2", r"kimi-k2", ("kimi_k2",), "kimi_k2"),
    Family("MiniMax M2", r"minimax-m2", ("minimax_m2",), "minimax_m2"),
    Family("DeepSeek V4", r"deepseek-v4", ("deepseek_v4",), "deepseek_v4"),
    Family("DeepSeek V3.2", r"deepseek-v3\.2", ("deepseek_v32",), "deepseek_v3"),
    Family("DeepSeek V3.1", r"deepseek-v3\.1", ("deepseek_v31",), "deepseek_v3"),
    Family("DeepSeek R1", r"deepseek-r1(?!-distill|.*qwen)", ("deepseek_v3",), "deepseek_r1"),
    Family("DeepSeek V3", r"deepseek-v3", ("deepseek_v3",)),
    Family(
        "Mistral, Mixtral, Ministral, Devstral",
        r"(devstral|ministral|mistral|mixtral)",
        ("mistral",),
    ),
    Family("Llama 4", r"llama-4", ("llama4_pythonic", "llama4_json")),
    Family("Llama 3.1, 3.2, 3.3", r"llama-3\.[123]", ("llama3_json", "llama4_json")),
    Family("Gemma 4", r"gemma-4", ("gemma4",), "gemma4"),
    Family("Granite 4", r"granite-4", ("granite4",)),
    Family("Granite 3", r"granite-3", ("granite",), "granite"),
    Family("Nemotron 3", r"nemotron-3", ("qwen3_coder", "qwen3_xml"), "nemotron_v3"),
    Family("Seed-OSS", r"seed-oss", ("seed_oss",), "seed_oss"),
    Family("Olmo 3", r"olmo-3", ("olmo3",), "olmo3"),
    Family("Phi-4-mini", r"phi-4-mini", ("phi4_mini_json",)),
)


def family_of(model: str) -> Family | None:
    """The family of this model's name or folder; None if the name tells of none."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    return next((each for each in FAMILIES if re.search(each.pattern, name)), None)


def lines(plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """What the options say about agents; nothing where no options are given."""
    if not plan.words or plan.why_no_server:
        return
    yield _parser_line(plan, family_of(plan.model or vllm.model), vllm)
    lacks = []
    if MIDDLEWARE not in plan.middleware:
        lacks.append((f"--middleware {MIDDLEWARE}", "agents are known by their prompts only"))
    if not plan.enable_prompt_tokens_details:
        lacks.append(("--enable-prompt-tokens-details", "clients report 0 cached tokens"))
    if lacks:
        text = " and ".join(f"without {flag.split()[0]} {what}" for flag, what in lacks)
        yield warning("tools", text, f"add {' '.join(flag for flag, _ in lacks)}")


def _parser_line(plan: Plan, family: Family | None, vllm: VllmSeen) -> Line:
    """Whether vLLM finds the calls in what this model writes."""
    named = plan.tool_call_parser
    meant = family.tools[0] if family else f"NAME ({PAGE} has them by model)"
    wanted = f"--enable-auto-tool-choice --tool-call-parser {meant}"
    if family and family.reasoning:
        wanted += f" --reasoning-parser {family.reasoning}"
    if not named and not plan.enable_auto_tool_choice:
        text = "no tool parser is named: requests with tools get 400, or their calls stay text"
        return warning("tools", text, f"for agents add {wanted}")
    if not named:
        text = "--enable-auto-tool-choice without --tool-call-parser, so vLLM stops at start"
        return error("tools", text, f"add {wanted}")
    if not plan.enable_auto_tool_choice:
        text = f"{named} is unused without --enable-auto-tool-choice: requests with tools get 400"
        return warning("tools", text, "add --enable-auto-tool-choice")
    if plan.tool_parser_plugin:
        return ok("tools", f"calls are read by {named}, which may come from your plugin")
    if vllm.tool_parsers and named not in vllm.tool_parsers:
        text = f"vLLM {vllm.version} has no tool parser {named[:100]!r}"
        return error(
            "tools", f"{text}, so the server stops at start", f"--tool-call-parser {meant}"
        )
    if family is None:
        return ok("tools", f"calls are read by {named}; whether this model writes so is not known")
    if named not in family.tools:
        text = f"{named} does not read what {family.name} write: calls stay text, and agents stop"
        return warning("tools", text, f"--tool-call-parser {meant}")
    return ok("tools", f"calls are read by {named}, as {family.name} write them")
