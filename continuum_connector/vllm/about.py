"""About: what the installed vLLM is, can do and reads, for `continuum check`. Like compat.py, it
goes by feature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from continuum_connector.vllm import probe
from continuum_connector.vllm.compat import (
    SUPPORTED,
    asks_by_priority,
    can_fail_by_request,
    has_layouts,
    mends_drafted_states,
)


def about_vllm() -> dict[str, Any]:
    """What this vLLM is and can do, as the fields of tools/checks/machine.py VllmSeen."""
    import vllm
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.tool_parsers import ToolParserManager

    generate = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
    return {
        "version": vllm.__version__,
        "tested": [release for release, _ in SUPPORTED],
        "platform": str(getattr(current_platform, "device_name", "")),
        "has_layouts": has_layouts(),
        "fails_by_request": can_fail_by_request(),
        "mends_drafted_states": mends_drafted_states(),
        "may_starve": asks_by_priority(),
        **_lacks(),
        "architectures": [a for name in generate for a in getattr(registry, name, ())],
        "tool_parsers": ToolParserManager.list_registered(),
    }


def _lacks() -> dict[str, Any]:
    """What the probe says of this vLLM, as a server's log would."""
    for_all = probe.why_not_loaded() or probe.why_aside(False, False)
    ranked, hybrid = probe.why_aside(True, False), probe.why_aside(False, True)
    some = (
        ("", probe.why_less()),
        ("with --scheduling-policy priority, ", ranked),
        ("for models with windows, chunks or states, and with drafts, ", hybrid),
        ("no DRAM tier: ", probe.why_no_copies()),
    )
    return {"lacks_all": for_all, "lacks": [who + why for who, why in some if why]}


def read_by_vllm(words: Sequence[str]) -> dict[str, str]:
    """What vLLM's parser makes of these options: why they are "refused", or else the "model" and,
    as "unread", the complaint about abbreviated names."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    serve, top = ServeSubcommand(), Parser()
    below = serve.subparser_init(top.add_subparsers())
    try:
        serve.validate(options := top.parse_args(["serve", *words]))
    except SystemExit:
        return {"refused": "they only print"}
    except Exception as error:  # from argparse, YAML or pydantic; it would end the server, too
        return {"refused": " ".join(str(error).split()) or type(error).__name__}
    found = {"model": options.model_tag or options.model}
    below.allow_abbrev = False
    try:
        top.parse_args(["serve", *words])
    except ValueError as error:
        found["unread"] = str(error)  # abbreviated names of options
    return found
