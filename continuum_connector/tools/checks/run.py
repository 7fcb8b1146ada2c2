"""All the checks, in the order in which a server would meet them."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.tools.checks import disk, gpu, memory, model, serving, tools
from continuum_connector.tools.checks.ask import KV
from continuum_connector.tools.checks.line import Line
from continuum_connector.tools.checks.machine import CudaSeen, Machine, VllmSeen
from continuum_connector.tools.checks.plan import Plan, as_vllm_reads


def check(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Run every check. Takes seconds, because another process imports vLLM."""
    vllm = machine.see("vllm", VllmSeen, *((KV, *plan.words) if plan.words else ()))
    cuda = machine.see("cuda", CudaSeen)
    plan = as_vllm_reads(plan, vllm.options, machine.environ)
    yield from serving.lines(machine, plan, vllm)
    yield from tools.lines(plan, vllm)
    yield from model.lines(machine, plan, vllm)
    yield from gpu.lines(machine, plan, vllm, cuda)
    yield from memory.lines(machine, plan, vllm, cuda)
    yield from disk.lines(machine, plan)
