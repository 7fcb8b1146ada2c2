"""Lines on --kv-transfer-config and our part of it."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.config import CONNECTOR_NAME
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import VllmSeen
from continuum_connector.tools.checks.plan import Plan

FLAG = f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR_NAME}","kv_role":"kv_both"}}\''
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def lines(plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Can it be read, does it name us, what does it ask for?"""
    if plan.why_no_server:
        cure = "paste all of `vllm serve MODEL ...`, or give --model and the other options here"
        yield error("command", plan.why_no_server, cure)
    if vllm.refused:
        cure = "mend it, or the server stops at start"
        yield error("options", f"this vLLM refuses them: {vllm.refused[:300]}", cure)
    elif vllm.unread:
        cure = "write options in full; or ask `vllm serve` itself"
        yield unseen("options", f"not all are understood here ({vllm.unread[:300]})", cure)
    if plan.options_file:
        cure = "give the options that matter on the command line as well"
        yield unseen("options", f"{plan.options_file} is not read here", cure)
    if plan.why_no_config:
        cure = "mend it, or the server stops at start; what follows takes the defaults"
        yield error("config", plan.why_no_config, cure)
    elif not plan.names_us:
        named = plan.transfer.get("kv_connector")
        yield error(
            "config", f"kv_connector is {named!r}, so we are not used", f"serve with {FLAG}"
        )
    else:
        yield _role(plan)
        if plan.is_stock:
            text = (
                "the command has none, so as it stands it serves as stock; it was looked at as if"
            )
            yield warning("connector", text, f"serve with {FLAG}")


def _role(plan: Plan) -> Line:
    role = plan.transfer.get("kv_role")
    if role is None:
        return error("config", "kv_role is missing, so vLLM stops at start", f"serve with {FLAG}")
    if role not in ROLES:
        text = f"kv_role is {str(role)[:100]!r}, so vLLM stops at start"
        return error("config", text, f"write one of {', '.join(ROLES)}; here kv_both")
    if role != "kv_both":
        text = f"kv_role is {role!r}: one server is both ends of what we store and load"
        return warning("config", text, 'write "kv_role": "kv_both"')
    config = plan.config
    if config.dram_bytes == 0:
        text = f"policy {config.policy}, pins in VRAM and no DRAM tier (dram_bytes = 0)"
        return ok("config", f"{text}; `continuum size` says how much one would need")
    below = f", below it a disk tier of {size(config.disk_bytes)}" if config.disk_path else ""
    return ok("config", f"policy {config.policy}, a DRAM tier of {size(config.dram_bytes)}{below}")
