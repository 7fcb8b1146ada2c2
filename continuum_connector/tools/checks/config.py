"""Lines on --kv-transfer-config and our part of it."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.config import CONNECTOR_NAME
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.plan import Plan

FLAG = f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR_NAME}","kv_role":"kv_both"}}\''


def lines(plan: Plan) -> Iterator[Line]:
    """Can it be read, does it name us, what does it ask for?"""
    if plan.why_no_server:
        cure = "paste all of `vllm serve MODEL ...`, or give --model and the other options here"
        yield error("command", plan.why_no_server, cure)
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


def _role(plan: Plan) -> Line:
    role = plan.transfer.get("kv_role")
    if role is None:
        return error("config", "kv_role is missing, so vLLM stops at start", f"serve with {FLAG}")
    if role != "kv_both":
        text = f"kv_role is {role!r}: one server is both ends of what we store and load"
        return warning("config", text, 'write "kv_role": "kv_both"')
    config = plan.config
    if config.dram_bytes == 0:
        text = f"policy {config.policy}, pins in VRAM and no DRAM tier (dram_bytes = 0)"
        return ok("config", f"{text}; `continuum size` says how much one would need")
    return ok("config", f"policy {config.policy}, a DRAM tier of {size(config.dram_bytes)}")
