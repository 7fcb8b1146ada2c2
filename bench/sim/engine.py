"""Engine: vLLM's own scheduler, stepped in virtual time around a model that follows a script.

Real: Scheduler with whatever connector and subclass the config chooses, both queues,
KVCacheManager, BlockPool, Request with chained block hashes. Modelled: how long a step takes
(hardware.py), how long copies take (workers.py), what the model says (plan.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench.sim import versions
from bench.sim.bus import Disk
from bench.sim.clock import Clock
from bench.sim.hardware import Machine, step_seconds
from bench.sim.workers import Worker
from continuum_connector.vllm import compat


def hash_block(value: Any) -> bytes:
    """Eight bytes for (parent hash, token ids, extra keys): the same in every process.

    vLLM's SHA-256 of a pickle takes ten times as long, which is most of a simulated step.
    """
    if not isinstance(value, tuple):
        return bytes(8)
    parent, tokens, extra = value
    number = hash((int.from_bytes(parent, "little"), tokens))
    if extra is not None:  # the hash of a string differs from process to process
        number = hash((number, zlib.crc32(repr(extra).encode())))
    return (number & (2**64 - 1)).to_bytes(8, "little")


@dataclass
class Progress:
    """One request as the engine sees it. `script`: the answer, token by token. Times in virtual
    seconds."""

    request_id: str
    request: Request
    script: Sequence[int]
    first_token: float = 0.0
    num_local: int = 0  # prompt tokens found in VRAM
    num_external: int = 0  # brought by the connector
    num_said: int = 0
    finished: float = 0.0


class Engine:
    """`step` runs one iteration of EngineCore's loop and moves the clock by what it takes."""

    def __init__(
        self,
        machine: Machine,
        clock: Clock,
        max_model_len: int,
        transfer: KVTransferConfig | None,
        policy: str = "fcfs",
    ) -> None:
        self.machine, self.clock = machine, clock
        self.vllm_config = versions.vllm_config(
            block_size=machine.block_size,
            transfer=transfer,
            max_model_len=max_model_len,
            has_states=machine.model.states is not None,
            num_drafts=machine.model.num_drafts,
            max_num_seqs=machine.gpu.max_num_seqs,
            max_num_batched_tokens=machine.gpu.chunk,
            policy=policy,
            scheduler_reserve_full_isl=machine.reserve_full_isl,
        )
        self.vllm_config.scheduler_config.async_scheduling = False
        self.scheduler = self._build_scheduler()
        self.connector = self.scheduler.connector
        self.worker: Worker  # the arm's: it must know the connector
        self.disk: Disk | None = None  # the machine's, for that worker
        self.num_steps = self.num_preemptions = self.num_computed_tokens = 0
        self.busy_s = 0.0
        self._progress: dict[str, Progress] = {}

    def _build_scheduler(self) -> Any:
        scheduler, hash_block_size = versions.scheduler(self.vllm_config, self.layout())
        init_none_hash(hash_block)
        self._hasher = get_request_block_hasher(hash_block_size, hash_block)
        return scheduler

    def layout(self) -> Any:
        """The KV cache, as vLLM would lay it out on this machine."""
        machine = self.machine
        model, pool = machine.model, (machine.num_blocks, machine.block_size)
        if model.states is None:
            return versions.kv_cache_config(*pool, token_bytes=model.token_bytes)
        return versions.hybrid_cache(
            *pool, model.token_bytes, model.states.num_groups, model.num_drafts
        )

    # -- requests ----------------------------------------------------------------------
    def send(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        script: Sequence[int],
        **fields: Any,
    ) -> Progress:
        """Queue a request that is answered with `script`; `fields` are more of vLLM's Request."""
        request = Request(request_id, tokens, params, None, block_hasher=self._hasher, **fields)
        progress = self._progress[request_id] = Progress(request_id, request, script)
        self.scheduler.add_request(request)
        return progress

    def abort(self, request_id: str) -> None:
        """Its client went away before it was answered."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        del self._progress[request_id]

    @property
    def has_requests(self) -> bool:
        """Whether a step could do anything."""
        return bool(self.scheduler.has_requests())

    # -- steps -------------------------------------------------------------------------
    def step(self, wake: Callable[[], float]) -> Iterator[Progress]:
        """Schedule, compute, update; yield what is answered. `wake` says when an idle engine has
        news at the latest."""
        now = self.clock.now
        step = self.scheduler.schedule()
        work = compat.step_work(step)
        seconds = step_seconds(self.machine, work) if work else 0.0
        seconds += self.worker.start(step, now, now + seconds)
        if seconds:
            self.busy_s += seconds
        else:  # nothing to compute: until a copy settles or a turn arrives
            seconds = max(wake() - now, self.machine.gpu.step_s)
        self.clock.now = now + seconds
        self.num_steps += 1
        self.num_preemptions += len(compat.preempted_ids(step))
        self.num_computed_tokens += work.num_new
        output = self._runner_output(step)
        for batch in self.scheduler.update_from_output(step, output).values():
            for each in batch.outputs:
                yield from self._record(each)

    def _runner_output(self, step: Any) -> ModelRunnerOutput:
        """One token of its script for each request whose prompt is complete by this step."""
        sampled: dict[str, list[int]] = {}
        for request_id in step.num_scheduled_tokens:
            progress = self._progress[request_id]
            request = progress.request
            # schedule() has counted this step's tokens as computed already
            is_done = request.num_computed_tokens >= request.num_tokens
            sampled[request_id] = [progress.script[progress.num_said]] if is_done else []
        settled = self.worker.output(self.clock.now) if self.connector is not None else {}
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=KVConnectorOutput(**settled) if settled else None,
        )

    def _record(self, output: Any) -> Iterator[Progress]:
        progress = self._progress[output.request_id]
        cached = versions.cached_tokens(output)
        if cached is not None:
            progress.num_local, progress.num_external = cached
        if output.new_token_ids and not progress.num_said:
            progress.first_token = self.clock.now
        progress.num_said += len(output.new_token_ids)
        if output.finish_reason is not None:
            del self._progress[output.request_id]
            progress.finished = self.clock.now
            yield progress
