"""How long a step takes: what it computes, reads and launches, added up or overlapped."""

from __future__ import annotations

from bench.sim.hardware import Machine
from continuum_connector.costs import Work

SEQUENCE_S = 20e-6  # of a step for each of its requests: sampling, input preparation


def step_seconds(machine: Machine, work: Work) -> float:
    """Seconds of a step that computes `work`: a roofline with a fitted share of the peak.

    Matrix products overlap with reading the weights; attention over prompts and the KV reads of
    decodes come on top.
    """
    gpu, model = machine.gpu, machine.model
    flops, memory = gpu.flops * gpu.mfu * machine.tp, gpu.memory_rate * machine.tp
    num_tokens = work.num_new + work.num_decodes
    product_s = num_tokens * model.token_flops / (flops * model.flops_factor)
    products = max(product_s, model.bytes_read(num_tokens) / memory)
    attention = (work.pairs + work.decode_context) * model.pair_flops / flops
    reads = (work.decode_context * model.token_bytes + _state_bytes(machine, work)) / memory
    num_requests = work.num_decodes + (1 if work.num_new else 0)
    return gpu.step_s + SEQUENCE_S * num_requests + products + attention + reads


def _state_bytes(machine: Machine, work: Work) -> int:
    """Bytes of states that decodes read and write; a prefill's are few beside its products."""
    states = machine.model.states
    return 2 * work.num_decodes * states.num_groups * states.num_bytes if states else 0
