"""Lines on the server: its vLLM, our plugin, our config, the flags that it is given, and whether
agents can call tools there, are known, and see what was cached.

docs/agents-setup.md shows the table of families; a test compares. Another test finds each name in
the installed vLLM.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from continuum_connector.config import CONNECTOR_NAME
from continuum_connector.epoch_endpoint import EpochEndpoint
from continuum_connector.memory import size
from continuum_connector.program_endpoint import ProgramEndpoint
from continuum_connector.switch_endpoint import SwitchEndpoint
from continuum_connector.tools.checks import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import Machine, VllmSeen
from continuum_connector.tools.checks.plan import Plan
from continuum_connector.vllm.proven import why_aside, why_not_attached

ENTRY_POINT, OURS = "continuum", "continuum_connector.scheduler_cls"
FLAG = f'--kv-transfer-config \'{{"kv_connector":"{CONNECTOR_NAME}"}}\''
FOREIGN_VARIABLES = ("LMCACHE_", "VLLM_USE_SIMPLE_KV_OFFLOAD")
ALLOCATOR, EXPANDS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
PAGE = "docs/agents-setup.md"
MIDDLEWARE = "continuum_connector.middleware.ProgramMiddleware"
ENDPOINTS = (SwitchEndpoint, EpochEndpoint, ProgramEndpoint)
MIDDLEWARES = (MIDDLEWARE, *(each.name() for each in ENDPOINTS))


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """Which vLLM is it, does it find us, what does its config ask for, what do its flags mean to us
    and to agents?"""
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
        if name.startswith("continuum_connector") and name not in MIDDLEWARES:
            text = f"{name[:100]} does not exist in our package, so the server stops at start"
            yield error("middleware", text, f"one of {', '.join(MIDDLEWARES)}")
    yield from agent_lines(plan, vllm)


def _version(vllm: VllmSeen) -> Line:
    if vllm.trouble:
        cure = "reinstall vLLM and the torch it asks for"
        return error("vLLM", f"cannot be imported ({vllm.trouble})", cure)
    if not vllm.is_installed:
        cure = "run this check with the Python that runs the server, or install vLLM there"
        return error("vLLM", f"not installed in {sys.executable}, so nothing serves", cure)
    # (0, 32) for "0.32.0+cpu"; a development build counts as the release that it precedes.
    here, least, most = (
        [int(each) for each in re.findall(r"\d+", version)[:2]]
        for version in (vllm.version, vllm.tested[0], vllm.tested[-1])
    )
    span, cure = f"{vllm.tested[0]} to {vllm.tested[-1]}", "a tested release"
    if here < least:
        return error("vLLM", f"{vllm.version} is older than what is tested, {span}", "upgrade vLLM")
    if vllm.lacks_all:
        return error("vLLM", f"{vllm.lacks_all} (tested: {span})", cure)
    if vllm.lacks:
        return warning("vLLM", f"{'; '.join(vllm.lacks)} (tested: {span})", cure)
    if here > most:
        text = f"{vllm.version} is newer than what is tested, {span}; it has every name that we "
        return warning("vLLM", f"{text}touch", "look at the log for `ContinuumConnector attached`")
    return ok("vLLM", f"{vllm.version}, within what is tested, {span}")


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
    if plan.only_vllm_reads and vllm.options is None:
        cure = "give the options that matter on the command line as well, the config as JSON"
        yield unseen("options", f"{plan.only_vllm_reads} is not read here", cure)


def _config(plan: Plan) -> Line:
    """Can --kv-transfer-config be read, does it name us, and what does it ask for?"""
    named, role = plan.transfer.get("kv_connector"), plan.transfer.get("kv_role")
    if plan.why_no_config:
        cure = "mend it, or the server stops at start; what follows takes the defaults"
        return error("config", plan.why_no_config, cure)
    if not plan.names_us:
        text = f"kv_connector is {named!r}, so we are not used"
        return error("config", text, f"serve with {FLAG}")
    # A connector around ours. vLLM refuses one without a role, and `why_no_config` has ours.
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


def _aside(subject: str, why: str) -> Line:
    """`why`: what the server would say, with its cure behind the last semicolon."""
    return error(subject, *f"the connector steps aside: {why}".rsplit("; ", 1))


def _prefix_caching(plan: Plan, vllm: VllmSeen) -> Line:
    is_on = vllm.kv.prefix_caching if vllm.kv else plan.enable_prefix_caching is not False
    why = why_aside(is_on, "")
    return _aside("prefix caching", why) if why else ok("prefix caching", "on")


def _scheduler(plan: Plan) -> Line:
    """Whether our scheduler is attached."""
    if why := why_not_attached("" if plan.scheduler_cls == OURS else plan.scheduler_cls):
        return _aside("scheduler", why)
    order = "program order" if plan.config.max_head_start_s else "vLLM's own order"
    return ok("scheduler", f"ours, a subclass of vLLM's: pins yield, turns wait in {order}")


def _layout(machine: Machine, plan: Plan, vllm: VllmSeen) -> Line:
    """The KV cache layout that is requested. Only the attention backend knows whether it can."""
    config, named = plan.config, machine.environ.get("VLLM_KV_CACHE_LAYOUT")
    if config.dram_bytes == 0 or config.kv_layout == "stock" or vllm.platform == "cpu":
        return ok("KV layout", "vLLM's own")
    if not vllm.version:
        text = "without vLLM here, nobody knows whether it can be asked for one"
        return unseen("KV layout", text)
    if not vllm.has_layouts:
        text = "vLLM before 0.29 has one tensor per layer: a block is one copy per layer"
        return warning("KV layout", text, "VLLM_USE_V2_MODEL_RUNNER=0, or vLLM 0.29 or later")
    wanted = "BLHNC" if config.kv_layout == "auto" else config.kv_layout
    if named is not None and named != wanted:
        text = f"VLLM_KV_CACHE_LAYOUT={named} wins over {wanted}, which makes a block one copy"
        return warning("KV layout", text, "unset VLLM_KV_CACHE_LAYOUT")
    text = f"{wanted} is asked for, except with states: a block is one copy, if attention has it"
    return ok("KV layout", text)


# --- agents -----------------------------------------------------------------------------------
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
    Family("Mistral, Mixtral, Ministral, Devstral", r"(dev|mini|mi)stral|mixtral", ("mistral",)),
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


def agent_lines(plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """What the options say about agents; nothing where no options are given."""
    if not plan.words or plan.why_no_server:
        return
    yield _parser_line(plan, family_of(plan.model or vllm.model), vllm)
    lacks = []
    if MIDDLEWARE not in plan.middleware:
        what = "agents are known by their prompts only"
        what += ", and id_headers have no effect" if plan.config.id_headers else ""
        lacks.append((f"--middleware {MIDDLEWARE}", what))
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
    if not named:  # with --enable-auto-tool-choice vLLM itself refuses it
        text = "no tool parser is named: requests with tools get 400, or their calls stay text"
        return warning("tools", text, f"for agents add {wanted}")
    if not plan.enable_auto_tool_choice:
        text = f"{named} is unused without --enable-auto-tool-choice: requests with tools get 400"
        return warning("tools", text, "add --enable-auto-tool-choice")
    if plan.tool_parser_plugin:
        return ok("tools", f"calls are read by {named}, which may come from your plugin")
    if vllm.tool_parsers and named not in vllm.tool_parsers:
        text = f"vLLM {vllm.version} has no tool parser {named[:100]!r}: the server stops at start"
        return error("tools", text, f"--tool-call-parser {meant}")
    if family is None:
        return ok("tools", f"calls are read by {named}; whether this model writes so is not known")
    if named not in family.tools:
        text = f"{named} does not read what {family.name} write: calls stay text, and agents stop"
        return warning("tools", text, f"--tool-call-parser {meant}")
    return ok("tools", f"calls are read by {named}, as {family.name} write them")
