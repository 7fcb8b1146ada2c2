"""Lines on the server: its vLLM, our plugin, our config, and the flags that it is given."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from continuum_connector.config import CONNECTOR_NAME
from continuum_connector.epoch_endpoint import EpochEndpoint
from continuum_connector.program_endpoint import ProgramEndpoint
from continuum_connector.switch_endpoint import SwitchEndpoint
from continuum_connector.tools.checks.line import Line, error, ok, size, unseen, warning
from continuum_connector.tools.checks.machine import Machine, VllmSeen
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.vllm.proven import why_aside, why_not_attached

ENTRY_POINT, OURS = "continuum", "continuum_connector.scheduler_cls"
FLAG = f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR_NAME}"}}\''
FOREIGN_VARIABLES = ("LMCACHE_", "VLLM_USE_SIMPLE_KV_OFFLOAD")
ALLOCATOR, EXPANDS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
MIDDLEWARE = (
    "continuum_connector.middleware.ProgramMiddleware",
    SwitchEndpoint.name(),
    EpochEndpoint.name(),
    ProgramEndpoint.name(),
)


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Which vLLM is it, does it find us, what does its config ask for, what do its flags mean to
    us?"""
    yield _version(vllm)
    yield _plugin(machine, vllm)
    if plan.why_no_server:
        cure = "paste all of `vllm serve MODEL ...`, or give --model and the other options here"
        yield error("command", plan.why_no_server, cure)
    yield from _options(plan, vllm)
    yield _config(plan)
    if plan.is_stock and plan.names_us and not plan.why_no_config:
        text = "the command has none, so as it stands it serves as stock; all here is as if it had"
        yield warning("connector", text, f"serve with {FLAG}")
    yield from _environment(machine, plan)
    yield _prefix_caching(plan, vllm)
    yield _scheduler(plan)
    yield _layout(machine, plan, vllm)
    for name in plan.middleware:
        if name.startswith("continuum_connector") and name not in MIDDLEWARE:
            text = f"{name[:100]} does not exist in our package, so the server stops at start"
            yield error("middleware", text, f"one of {', '.join(MIDDLEWARE)}")


def _version(vllm: VllmSeen) -> Line:
    if not vllm.is_installed and not vllm.trouble:
        cure = "run this check with the Python that runs the server, or install vLLM there"
        return error("vLLM", f"not installed in {sys.executable}, so nothing serves", cure)
    if vllm.trouble:
        cure = "reinstall vLLM and the torch it asks for"
        return error("vLLM", f"cannot be imported ({vllm.trouble})", cure)
    here, tested = _release(vllm.version), [_release(each) for each in vllm.tested]
    span = f"{vllm.tested[0]} to {vllm.tested[-1]}"
    if here < tested[0]:
        return error("vLLM", f"{vllm.version} is older than what is tested, {span}", "upgrade vLLM")
    if vllm.lacks_all:
        return error("vLLM", f"{vllm.lacks_all} (tested: {span})", "a tested release")
    if vllm.lacks:
        return warning("vLLM", f"{'; '.join(vllm.lacks)} (tested: {span})", "a tested release")
    if here > tested[-1]:
        text = f"{vllm.version} is newer than what is tested, {span}; it has every name that we "
        return warning("vLLM", f"{text}touch", "look at the log for `ContinuumConnector attached`")
    return ok("vLLM", f"{vllm.version}, within what is tested, {span}")


def _release(version: str) -> tuple[int, ...]:
    """(0, 32) for "0.32.0+cpu". A development build counts as the release that it precedes."""
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def _plugin(machine: Machine, vllm: VllmSeen) -> Line:
    """Whether a server started here registers the connector."""
    if ENTRY_POINT not in machine.plugins:
        text = "our entry point is not installed, so vLLM would not know the connector's name"
        return error("plugin", text, "pip install . in a clone of ContinuumConnector, beside vLLM")
    allowed = machine.environ.get("VLLM_PLUGINS")
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        text = f"VLLM_PLUGINS={allowed} keeps ours from being loaded"
        wanted = ",".join(filter(None, [allowed, ENTRY_POINT]))
        return error("plugin", text, f"unset VLLM_PLUGINS, or set VLLM_PLUGINS={wanted}")
    if vllm.plugin_trouble:
        text = f"this vLLM lacks what it needs, so {vllm.plugin_trouble}"
        return error("plugin", text, "report it with the version of vLLM")
    if not vllm.is_installed or vllm.trouble:
        return unseen("plugin", "its entry point is installed; no vLLM here to load it")
    return ok("plugin", "loads and registers ContinuumConnector")


def _options(plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """What vLLM refuses, and what nobody here can read."""
    if plan.others:
        text = f"it starts {len(plan.others) + 1} servers; all here is about the first"
        cure = f"check the others one by one: {', '.join(plan.others)[:200]}"
        yield unseen("command", text, cure)
    if plan.unknown:
        shown = ", ".join(plan.unknown)[:200]
        text = f"{shown}: only who runs it knows; a default was taken, or none was given"
        yield unseen("options", text, "paste it with the values")
    if vllm.refused and plan.is_inside and "No such file" in vllm.refused:
        text = f"{vllm.refused[:300]}, which may be there in the container"
        yield unseen("options", text, "run this inside the container")
    elif vllm.refused:
        cure = "mend it, or the server stops at start"
        yield error("options", f"this vLLM refuses them: {vllm.refused[:300]}", cure)
    elif vllm.unread:
        cure = "write options in full; or ask `vllm serve` itself"
        yield unseen("options", f"not all are understood here ({vllm.unread[:300]})", cure)
    if any(word.startswith("--config=") for word in plan.words):
        text = "vLLM reads the file behind `--config FILE`, but not one behind `--config=`"
        yield warning("options", text, "write it with a space")
    if plan.options_file and vllm.options is None:
        cure = "give the options that matter on the command line as well"
        yield unseen("options", f"{plan.options_file} is not read here", cure)


def _config(plan: Plan) -> Line:
    """Can --kv-transfer-config be read, does it name us, and what does it ask for?"""
    named, role = plan.transfer.get("kv_connector"), plan.transfer.get("kv_role")
    if plan.why_no_config:
        cure = "mend it, or the server stops at start; what follows takes the defaults"
        return error("config", plan.why_no_config, cure)
    if not plan.names_us:
        text = f"kv_connector is {named!r}, so we are not used"
        return error("config", text, f"serve with {FLAG}")
    # A connector around ours: vLLM has no default for its role. Ours is in `why_no_config`.
    if named != CONNECTOR_NAME and role not in ROLES:
        text = f"{named}'s kv_role is {str(role)[:100]!r}" if role else f"{named} has no kv_role"
        return error("config", f"{text}, so vLLM stops at start", 'write "kv_role": "kv_both"')
    if named != CONNECTOR_NAME and role != "kv_both":
        text = f"kv_role is {role!r}: one server is both ends of what we store and load"
        return warning("config", text, 'write "kv_role": "kv_both"')
    config, num_bytes = plan.config, plan.config.dram_bytes
    if num_bytes == 0:
        text = f"policy {config.policy}, pins in VRAM and no DRAM tier (dram_bytes = 0)"
        return ok("config", f"{text}; `continuum size` says how much one would need")
    sized = "of a share of the node" if num_bytes is None else f"of {size(num_bytes)}"
    below = f", below it a disk tier of {size(config.disk_bytes)}" if config.disk_path else ""
    return ok("config", f"policy {config.policy}, a DRAM tier {sized}{below}")


def _environment(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Variables of the connector that ours may have replaced, if none here reads them; and what
    vLLM 0.26 to 0.33 refuses with any KV connector (config/vllm.py)."""
    found = sorted(name for name in machine.environ if name.startswith(FOREIGN_VARIABLES))
    if found and "LMCache" not in str(plan.transfer):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        text = f"{found[0][:60]}{more} set another KV connector, which is not named here"
        cure = "unset them (docs/alternatives.md: what they are here), or put it behind ours"
        yield warning("environment", text, cure)
    if EXPANDS in machine.environ.get(ALLOCATOR, "") and not (
        plan.enable_cumem_allocator or plan.enable_sleep_mode
    ):
        text = f"{ALLOCATOR} has {EXPANDS}: with any KV connector vLLM stops at start"
        yield error("environment", text, "take it out, or serve with --enable-cumem-allocator")


def _prefix_caching(plan: Plan, vllm: VllmSeen) -> Line:
    is_on = vllm.kv.prefix_caching if vllm.kv else plan.enable_prefix_caching is not False
    if why := why_aside(is_on, ""):
        text, _, cure = f"the connector steps aside: {why}".rpartition("; ")
        return error("prefix caching", text, cure)
    if not vllm.kv and plan.enable_prefix_caching is None and vllm.version and not vllm.has_layouts:
        return ok("prefix caching", "on, unless the model has states")
    return ok("prefix caching", "on")


def _scheduler(plan: Plan) -> Line:
    """Whether our scheduler is attached."""
    if why := why_not_attached("" if plan.scheduler_cls == OURS else plan.scheduler_cls):
        text, _, cure = f"the connector steps aside: {why}".rpartition("; ")
        return error("scheduler", text, cure)
    order = "program order" if plan.config.max_head_start_s else "vLLM's own order"
    return ok("scheduler", f"ours, a subclass of vLLM's: pins yield, turns wait in {order}")


def _layout(machine: Machine, plan: Plan, vllm: VllmSeen) -> Line:
    """The KV cache layout that is requested. Only the attention backend knows whether it can."""
    config, named = plan.config, machine.environ.get("VLLM_KV_CACHE_LAYOUT")
    if config.dram_bytes == 0:
        return ok("KV layout", "vLLM's own: without a DRAM tier nothing is copied")
    if config.kv_layout == "stock":
        text = "vLLM's own, as kv_layout = stock says: one copy per layer and block"
        return ok("KV layout", text)
    if not vllm.version:
        text = "without vLLM here, nobody knows whether it can be asked for one"
        return unseen("KV layout", text)
    if vllm.platform == "cpu":
        return ok("KV layout", "vLLM's own: CPU attention has no other")
    if not vllm.has_layouts:
        text = "vLLM before 0.29 has one tensor per layer: a block is one copy per layer"
        return warning("KV layout", text, "VLLM_USE_V2_MODEL_RUNNER=0, or vLLM 0.29 or later")
    wanted = "BLHNC" if config.kv_layout == "auto" else config.kv_layout
    if named is not None and named != wanted:
        text = f"VLLM_KV_CACHE_LAYOUT={named} wins over {wanted}, which makes a block one copy"
        return warning("KV layout", text, "unset VLLM_KV_CACHE_LAYOUT")
    text = f"{wanted} is asked for, except with states: a block is one copy, if attention has it"
    return ok("KV layout", text)
