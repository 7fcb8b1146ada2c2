"""Lines on agents: can they call tools here, are they known, do they see what was cached?"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from continuum_connector.tools.checks.families import Family, family_of
from continuum_connector.tools.checks.line import Line, error, ok, warning
from continuum_connector.tools.checks.machine import VllmSeen
from continuum_connector.tools.checks.plan import Plan, normal

PAGE = "docs/agents-setup.md"
MIDDLEWARE = "continuum_connector.middleware.ProgramMiddleware"


def lines(plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """What the options say about agents; nothing where no options are given."""
    if not plan.words or plan.why_no_server:
        return
    options = vllm.options
    given = _read(plan.words) if options is None else argparse.Namespace(**options)
    family = family_of(plan.model or vllm.model)
    yield _parser_line(given, family, vllm)
    lacks = []
    if MIDDLEWARE not in plan.middleware:
        lacks.append((f"--middleware {MIDDLEWARE}", "agents are known by their prompts only"))
    if not given.enable_prompt_tokens_details:
        lacks.append(("--enable-prompt-tokens-details", "clients report 0 cached tokens"))
    if lacks:
        text = " and ".join(f"without {flag.split()[0]} {what}" for flag, what in lacks)
        yield warning("tools", text, f"add {' '.join(flag for flag, _ in lacks)}")


def _read(words: tuple[str, ...]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--enable-auto-tool-choice", "--enable-prompt-tokens-details"):
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=False)
    for option in ("--tool-call-parser", "--tool-parser-plugin"):
        parser.add_argument(option, nargs="?", const="", default="")
    return parser.parse_known_args(normal(words)[0])[0]


def _parser_line(given: argparse.Namespace, family: Family | None, vllm: VllmSeen) -> Line:
    """Whether vLLM finds the calls in what this model writes."""
    named, wanted = given.tool_call_parser, _flags(family)
    if not named and not given.enable_auto_tool_choice:
        text = "no tool parser is named: requests with tools get 400, or their calls stay text"
        return warning("tools", text, f"for agents add {wanted}")
    if not named:
        text = "--enable-auto-tool-choice without --tool-call-parser, so vLLM stops at start"
        return error("tools", text, f"add {wanted}")
    if not given.enable_auto_tool_choice:
        text = f"{named} is unused without --enable-auto-tool-choice: requests with tools get 400"
        return warning("tools", text, "add --enable-auto-tool-choice")
    if given.tool_parser_plugin:
        return ok("tools", f"calls are read by {named}, which may come from your plugin")
    if vllm.tool_parsers and named not in vllm.tool_parsers:
        text = (
            f"vLLM {vllm.version} has no tool parser {named[:100]!r}, so the server stops at start"
        )
        meant = family.tools[0] if family else f"NAME ({PAGE} has them by model)"
        return error("tools", text, f"--tool-call-parser {meant}")
    if family is None:
        return ok("tools", f"calls are read by {named}; whether this model writes so is not known")
    if named not in family.tools:
        text = f"{named} does not read what {family.name} write: calls stay text, and agents stop"
        return warning("tools", text, f"--tool-call-parser {family.tools[0]}")
    return ok("tools", f"calls are read by {named}, as {family.name} write them")


def _flags(family: Family | None) -> str:
    if family is None:
        return f"--enable-auto-tool-choice --tool-call-parser NAME ({PAGE} has them by model)"
    reasoning = f" --reasoning-parser {family.reasoning}" if family.reasoning else ""
    return f"--enable-auto-tool-choice --tool-call-parser {family.tools[0]}{reasoning}"
