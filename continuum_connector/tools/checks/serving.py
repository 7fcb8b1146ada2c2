"""Lines on how vLLM is told to serve: prefix caching, scheduler, KV layout."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector import epoch_endpoint, switch_endpoint
from continuum_connector.tools.checks.line import Line, error, ok, unseen, warning
from continuum_connector.tools.checks.machine import Machine, VllmSeen
from continuum_connector.tools.checks.plan import OURS, Plan
from continuum_connector.vllm.proven import why_aside, why_unattached

MIDDLEWARE = (
    "continuum_connector.middleware.ProgramMiddleware",
    switch_endpoint.MIDDLEWARE,
    epoch_endpoint.MIDDLEWARE,
)


def lines(machine: Machine, plan: Plan, vllm: VllmSeen) -> Iterator[Line]:
    """What the flags mean for us."""
    yield _prefix_caching(plan, vllm)
    yield _scheduler(plan)
    yield _layout(machine, plan, vllm)
    for name in plan.middleware:
        if name.startswith("continuum_connector") and name not in MIDDLEWARE:
            text = f"{name[:100]} does not exist in our package, so the server stops at start"
            yield error("middleware", text, f"one of {', '.join(MIDDLEWARE)}")


def _prefix_caching(plan: Plan, vllm: VllmSeen) -> Line:
    if why := why_aside(plan.prefix_caching is not False, ""):
        text, _, cure = f"the connector steps aside: {why}".rpartition("; ")
        return error("prefix caching", text, cure)
    if plan.prefix_caching is None and vllm.version and not vllm.has_layouts:
        return ok("prefix caching", "on, unless the model has states")
    return ok("prefix caching", "on")


def _scheduler(plan: Plan) -> Line:
    """Attached, or what that costs."""
    if plan.is_attached:
        order = "program order" if plan.config.order else "vLLM's own order (order = 0)"
        return ok("scheduler", f"ours, a subclass of vLLM's: pins yield, turns wait in {order}")
    named = plan.scheduler_cls if plan.scheduler_cls != OURS else None
    text, _, cure = why_unattached(plan.config, named).rpartition("; ")
    return warning("scheduler", text, cure.removesuffix(" to change that"))


def _layout(machine: Machine, plan: Plan, vllm: VllmSeen) -> Line:
    """The KV cache layout that is asked for; only the attention backend knows whether it has it."""
    config, named = plan.config, machine.environ.get("VLLM_KV_CACHE_LAYOUT")
    if not config.dram_bytes:
        return ok("KV layout", "vLLM's own: without a DRAM tier nothing is copied")
    if config.kv_layout == "stock":
        return ok(
            "KV layout", "vLLM's own, as kv_layout = stock says: one copy per layer and block"
        )
    if not vllm.version:
        return unseen(
            "KV layout", "without vLLM here, nobody knows whether it can be asked for one"
        )
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
