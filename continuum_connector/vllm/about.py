"""About: what the installed vLLM is, can do and reads, for `continuum check`. Like compat.py, it
goes by feature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from continuum_connector.vllm import probe
from continuum_connector.vllm.compat import (
    SUPPORTED,
    can_fail_by_request,
    has_layouts,
    mends_drafted_states,
)

TRANSFER = ("kv_connector", "kv_role", "kv_connector_extra_config")
_MOST = 400  # characters of an answer of vLLM's


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


def told(options: Any, names: Iterable[str]) -> dict[str, Any]:
    """The options of these names, as JSON; those that this vLLM lacks are left out."""
    found = {name: getattr(options, name) for name in names if hasattr(options, name)}
    transfer = options.kv_transfer_config
    if transfer is not None:
        found["kv_transfer_config"] = {name: getattr(transfer, name) for name in TRANSFER}
    return found


def parse(words: Sequence[str]) -> Any:
    """The options as `vllm serve` reads them, from --config too. ValueError is vLLM's complaint."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    serve, top = ServeSubcommand(), Parser()
    serve.subparser_init(top.add_subparsers())
    options = top.parse_args(["serve", *words])
    serve.validate(options)
    options.model = getattr(options, "model_tag", None) or options.model
    return options


def read_by_vllm(words: Sequence[str], names: Iterable[str]) -> tuple[Any, dict[str, Any]]:
    """The options that vLLM's parser makes of these words, None if it refuses them; and what to say
    of them: why they are "refused", or else the "model" and the named "options" as JSON."""
    try:
        options = parse(words)
    except SystemExit:
        return None, {"refused": "they only print"}
    except Exception as error:  # from argparse, YAML or pydantic; it would end the server, too
        return None, {"refused": sentence(error)}
    return options, {"model": options.model, "options": told(options, names)}


def sentence(error: BaseException) -> str:
    """What an exception says, on one line, without what pydantic puts around it."""
    text = " ".join(str(error).split())
    text = text.partition("Value error, ")[2] or text
    text = text.partition(" [type=")[0]
    return (text or type(error).__name__)[:_MOST]
