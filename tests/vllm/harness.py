"""Engine: vLLM's real scheduler side around a fake model runner, in one thread.

Real: the Scheduler or AsyncScheduler that the config chooses, KVCacheManager, BlockPool,
Request with block hashes, KVConnectorFactory, KVOutputAggregator. Fake: the model and the
copies (`FakeWorker`). No GPU, no model files, no processes. Built as `EngineCore.__init__`
builds it, stepped as `EngineCore.step` and `step_with_batch_queue` step it.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from vllm.config import KVEventsConfig, KVTransferConfig, LoRAConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from bench.sim import versions
from continuum_connector.scheduler.kv_groups import CHUNKED, FULL, STATE, WINDOW, KvGroup
from tests.vllm.fake_worker import FakeWorker, OracleError

__all__ = ["Engine", "FakeClock", "OracleError", "prompt"]


class FakeClock:
    """Time that moves when a test says so; `engine.step` adds `engine.step_s`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return `length` token ids; a longer prompt of the same seed starts with a shorter one."""
    source = random.Random(seed)
    return [source.randrange(100, 30_000) for _ in range(length)]


def adapter_named(name: str) -> LoRARequest:
    return LoRARequest(name, 1 + sum(name.encode()), f"/adapters/{name}")


def groups_named(name: str, block_size: int, span: int) -> tuple[KvGroup, ...]:
    """One group of full attention; and two of windows ("hybrid"), of chunks or of states; or one of
    windows, whose blocks are of half the size while the full ones are of twice that ("mixed")."""
    if name == "mixed":
        full, window = KvGroup(0, 2 * block_size), KvGroup(1, block_size // 2, WINDOW, span)
        return full, window
    kind = {"hybrid": WINDOW, "chunked": CHUNKED, "state": STATE, "full": FULL}[name]
    others = range(1, 1 if kind == FULL else 3)
    span_of = None if kind == STATE else span
    return KvGroup(0, block_size), *(KvGroup(i, block_size, kind, span_of) for i in others)


class Engine:
    """See the module. `scheduler`, `pool`, `workers`, `clock` are there to be used by tests.

    `groups`: of the KV cache, or their name (groups_named); `window`: tokens of windows and chunks.
    `cache` and what else is given are vLLM's options, of its CacheConfig and SchedulerConfig.
    `ready_slots`: host slots that a rank has at start, None: all of them. `num_drafts`: tokens that
    an MTP layer in `draft_group` guesses in each step, of which some are right.
    """

    def __init__(
        self,
        num_blocks: int = 100,
        *,
        block_size: int = 16,
        async_scheduling: bool = False,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        groups: str | Sequence[KvGroup] = "full",
        window: int = 64,
        policy: str = "fcfs",
        connector: str | None = "ContinuumConnector",
        connector_module: str | None = None,
        extra_config: dict[str, Any] | None = None,
        load_failure_policy: str = "recompute",
        enable_prefix_caching: bool = True,
        world_size: int = 1,
        num_stages: int = 1,
        num_drafts: int = 0,
        draft_group: int = 0,
        max_loras: int = 0,
        publishes: bool = False,
        hold_transfers: bool = False,
        ready_slots: int | None = None,
        wrap_report: Callable[[Any], Any] | None = None,
        clock: FakeClock | None = None,
        step_s: float = 0.01,
        **scheduler_config: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.step_s = step_s
        named = isinstance(groups, str)
        self.groups = groups_named(groups, block_size, window) if named else tuple(groups)
        block_size = max(group.block_size for group in self.groups)
        if connector == "ContinuumConnector" and not connector_module:
            _register_plugin()
        self.vllm_config = versions.vllm_config(
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            world_size=world_size,
            num_stages=num_stages,
            has_states=num_drafts > 0,
            num_drafts=num_drafts,
            transfer=_transfer(connector, connector_module, extra_config, load_failure_policy),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            policy=policy,
            **scheduler_config,
        )
        if publishes:
            events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
            self.vllm_config.kv_events_config = events
        if max_loras:
            self.vllm_config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=max_loras)
        # The CPU platform turns async scheduling off, for the sake of its own model runner.
        self.vllm_config.scheduler_config.async_scheduling = async_scheduling
        self.num_drafts, self.draft_group = num_drafts, draft_group
        self.prefill_every = 1.0  # steps; in those between, prompts wait while others decode
        self._build_scheduler(num_blocks)
        self.workers = [
            FakeWorker(self.groups, wrap_report, hold_transfers, rank) for rank in range(world_size)
        ]
        for worker in self.workers:
            worker.num_drafts = num_drafts
        self._report_ready(ready_slots)
        self._start_records()

    def _build_scheduler(self, num_blocks: int) -> None:
        config = self.vllm_config
        self.scheduler: Any
        self.scheduler, hash_block_size = versions.scheduler(config, self._cache(num_blocks))
        self.connector = self.scheduler.connector
        if hasattr(self.connector, "set_clock"):
            self.connector.set_clock(self.clock)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._hasher = None
        if config.cache_config.enable_prefix_caching or self.connector is not None:
            hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_fn)
            self._hasher = get_request_block_hasher(hash_block_size, hash_fn)

    def _cache(self, num_blocks: int) -> Any:
        built = versions.cache_of(num_blocks, self.groups)
        if self.num_drafts:
            versions.with_drafts(built, self.draft_group, self.num_drafts)
        return built

    def _report_ready(self, num_slots: int | None) -> None:
        """Every rank has its host memory, or `num_slots` of it, before the first step."""
        side = getattr(self.connector, "side", None)
        if side is not None and side.tier.is_up:
            for worker in self.workers:
                wanted = side.tier.num_wanted_slots
                worker.report_ready(wanted if num_slots is None else num_slots)

    def _start_records(self) -> None:
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, str] = {}
        self.kv_transfer_params: dict[str, Any] = {}  # as answered to the client
        self.cached: dict[str, tuple[int, int]] = {}  # prompt tokens hit: in VRAM, loaded
        self.admissions: list[str] = []  # first scheduled, in order; again when resumed
        self.num_steps = 0
        self.num_prefill_tokens = 0  # prompt tokens computed, recomputed ones included
        self.stats: list[Any] = []  # SchedulerStats per step
        self._aggregator = KVOutputAggregator(len(self.workers))
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._queue_size = self.vllm_config.max_concurrent_batches

    # -- requests --------------------------------------------------------------------------

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    def add(
        self,
        request_id: str,
        tokens: list[int] | int,
        max_tokens: int = 16,
        *,
        seed: int = 0,
        program: str | None = None,
        final: bool | None = None,
        stop: list[str] | None = None,
        extra_args: dict[str, Any] | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        prompt_logprobs: int | None = None,
        structured_outputs: StructuredOutputsParams | None = None,
        **request_fields: Any,
    ) -> Request:
        """Queue a request; `tokens` is the prompt or its length (with `seed`).

        `program` and `final` become the job_id and is_last_step of `vllm_xargs`;
        `request_fields` are Request's own: priority, cache_salt, arrival_time, session_id.
        """
        args = dict(extra_args or {})
        args |= {} if program is None else {"job_id": program}
        args |= {} if final is None else {"is_last_step": int(final)}
        args |= {} if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        params = SamplingParams(
            max_tokens=max_tokens,
            stop=stop,
            ignore_eos=True,
            extra_args=args or None,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs,
        )
        request_fields.setdefault("arrival_time", self.clock())
        request = Request(
            request_id,
            prompt(tokens, seed) if isinstance(tokens, int) else list(tokens),
            params,
            None,
            block_hasher=self._hasher,
            **request_fields,
        )
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request as a client's disconnect does, and as a stop string does."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def next_prompt(self, request_id: str, num_new: int, seed: int = 1) -> list[int]:
        """Return the prompt of the next turn: everything so far plus `num_new` tokens."""
        return list(self.requests[request_id].all_token_ids) + prompt(num_new, seed)

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one iteration of EngineCore's loop; False when there was nothing to do."""
        has_work = self.scheduler.has_requests()
        if not has_work and not self._queue:
            return False
        self.clock.advance(self.step_s)
        self.num_steps += 1
        if has_work:
            executed = self._schedule()
            has_room = len(self._queue) < self._queue_size
            if has_room and (executed or self.scheduler.has_requests()):
                return True  # a batch is in flight and there is room for one more
        self._update()
        self.check()
        return True

    def run_until_idle(self, max_steps: int = 2000, until: Callable[[], bool] | None = None) -> int:
        """Step until nothing is left to do, or `until()`; return the steps taken."""
        for taken in range(max_steps):
            if (until is not None and until()) or not self.step():
                return taken
        raise AssertionError(f"not idle after {max_steps} steps: {self.describe()}")

    def idle(self, seconds: float) -> None:
        """Let time pass with no request, as long as the connector asks for no step."""
        end = self.clock() + seconds
        while self.clock() < end:
            if not self.step() or not self.step_s:
                self.clock.advance(min(self.step_s or 0.01, end - self.clock()))

    def _schedule(self) -> bool:
        """Put one batch in flight; True if it computes tokens."""
        step = self.scheduler.schedule(throttle_prefills=self.num_steps % self.prefill_every > 0)
        resumed = step.scheduled_cached_reqs.resumed_req_ids
        self.admissions += [new.req_id for new in step.scheduled_new_reqs]
        self.admissions += [each for each in step.scheduled_cached_reqs.req_ids if each in resumed]
        outputs = []
        last = len(self.workers) - self.vllm_config.parallel_config.tensor_parallel_size
        for rank, worker in enumerate(self.workers):
            sampled = worker.execute(step)
            # Only a pipeline's last stage has tokens (v1/executor/multiproc_executor.py).
            told = sampled if rank >= last else {}
            outputs.append(runner_output(told, worker.take_connector_output()))
        output = self._aggregator.aggregate(outputs, last) if self.connector else outputs[last]
        self.num_prefill_tokens += sum(n for n in step.num_scheduled_tokens.values() if n > 1)
        self._queue.appendleft((step, output))
        return bool(step.total_num_scheduled_tokens)

    def _update(self) -> None:
        for batch in self.scheduler.update_from_output(*self._queue.pop()).values():
            if batch.scheduler_stats is not None:
                self.stats.append(batch.scheduler_stats)
            for output in batch.outputs:
                self._record(output)
        if self.num_drafts and not self.vllm_config.scheduler_config.async_scheduling:
            drafts = self.workers[-1].take_drafts()  # as EngineCore.post_step does
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(list(drafts), list(drafts.values()))
            )

    def _record(self, output: Any) -> None:
        request_id = output.request_id
        self.outputs[request_id] += output.new_token_ids
        cached = versions.cached_tokens(output)
        if cached is not None:
            self.cached[request_id] = cached
        if output.finish_reason is not None:
            self.finish_reasons[request_id] = str(output.finish_reason)
        if output.kv_transfer_params is not None:
            self.kv_transfer_params[request_id] = output.kv_transfer_params

    # -- copies in flight, on every rank ---------------------------------------------------

    def settle(self, transfer_id: int | None = None) -> None:
        for worker in self.workers:
            worker.settle(transfer_id)

    def fail(self, transfer_id: int | None = None, reason: str = "driver") -> None:
        for worker in self.workers:
            worker.fail(transfer_id, reason)

    # -- what is held ----------------------------------------------------------------------

    def reset_prefix_cache(self, **how: bool) -> bool:
        """`how`: as vLLM has it, reset_running_requests and reset_connector."""
        return bool(self.scheduler.reset_prefix_cache(**how))

    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def usage(self) -> float:
        """Return what vllm:kv_cache_usage_perc shows."""
        return float(self.scheduler.kv_cache_manager.usage)

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())

    def foreign_refs(self) -> dict[int, int]:
        """Return block id -> references that no request accounts for: the connector's holds."""
        manager = self.scheduler.kv_cache_manager
        owned: Counter[int] = Counter()
        for single in manager.coordinator.single_type_managers:
            for blocks in single.req_to_blocks.values():
                owned.update(block.block_id for block in blocks if not block.is_null)
        for _, blocks in getattr(self.scheduler, "deferred_frees", ()):
            owned.update(block.block_id for block in blocks if not block.is_null)
        held = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt and not b.is_null}
        assert owned.keys() <= held.keys(), (
            f"freed, and requests have it: {owned.keys() - held.keys()}"
        )
        refs = {block: count - owned[block] for block, count in held.items()}
        assert min(refs.values(), default=0) >= 0, f"a request's block was freed: {refs}"
        return {block: count for block, count in refs.items() if count}

    def check(self) -> dict[int, int]:
        """Assert that every block is either held or free, whoever holds it. Returns what
        `foreign_refs` does."""
        held = sum(1 for block in self.pool.blocks if block.ref_cnt > 0 and not block.is_null)
        total = len(self.pool.blocks) - 1  # the null block is neither
        assert held + self.free_blocks() == total, f"{held} held, {self.free_blocks()} free"
        return self.foreign_refs()

    def describe(self) -> str:
        """Say in one line what is unfinished: for the message of a failed test."""
        states = {i: r.status.name for i, r in self.scheduler.requests.items()}
        pending = [sorted(worker.pending) for worker in self.workers]
        return f"{states}, {self.free_blocks()} blocks free, transfers in flight: {pending}"


def runner_output(sampled: dict[str, list[int]], connector: dict[str, Any]) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=list(sampled),
        req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
        sampled_token_ids=list(sampled.values()),
        kv_connector_output=KVConnectorOutput(**connector) if connector else None,
    )


def _transfer(
    connector: str | None, module: str | None, extra: dict[str, Any] | None, on_failure: str
) -> KVTransferConfig | None:
    if connector is None:
        return None
    if connector == "ContinuumConnector" and module is None:
        # Pins of a known length, unless a test is about what decides them; no tier of a size that
        # this machine can spare.
        extra = {"policy": "fixed_ttl", "dram_bytes": 0, **(extra or {})}
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=module,
        kv_role="kv_both",
        kv_connector_extra_config=extra,
        kv_load_failure_policy=on_failure,
    )


def _register_plugin() -> None:
    """Do what vLLM does with our entry point; needs no installed package."""
    from continuum_connector.vllm.plugin import register

    register()
