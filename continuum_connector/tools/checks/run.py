"""All the checks, in the order in which a server would meet them."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.tools.checks import disk, gpu, memory, model, serving, tools
from continuum_connector.tools.checks.ask import KV
from continuum_connector.tools.checks.line import Line
from continuum_connector.tools.checks.machine import Facts, Machine
from continuum_connector.tools.checks.plan import Plan, as_vllm_reads


def check(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Run every check. Takes seconds, because another process imports vLLM."""
    seen = Facts(machine, (KV, *plan.words) if plan.words else ())
    plan = as_vllm_reads(plan, seen.vllm.options, machine.environ)
    yield from serving.lines(machine, plan, seen.vllm)
    yield from tools.lines(plan, seen.vllm)
    yield from model.lines(machine, plan, seen.vllm)
    yield from gpu.lines(machine, plan, seen)
    yield from memory.lines(machine, plan, seen)
    yield from disk.lines(machine, plan)
