"""The only file that asks which vLLM this is, always by feature, never by version number.

touched.py lists every name; tests/versions runs all of it against the releases in SUPPORTED.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

from vllm.v1.request import RequestStatus

from continuum_connector.config import our_part
from continuum_connector.costs import Work
from continuum_connector.scheduler.turns import TurnEnd

# (release, what was run on it); tests/versions runs exactly these.
SUPPORTED = (
    ("0.26.0", "scheduler side"),
    ("0.27.1", "scheduler side"),
    ("0.29.0", "scheduler side"),
    ("0.30.0", "scheduler side"),
    ("0.32.0", "scheduler side, worker side and server on CPU"),
    ("0.33.0", "scheduler side"),
)

_BASE = "distributed.kv_transfer.kv_connector.v1.base"


def profiler_scope() -> Callable[[str], Any] | None:
    """Return what opens vLLM's own named ranges for a profiler, NVTX's or torch's, where vLLM's
    environment asks for them (VLLM_NVTX_SCOPES_FOR_PROFILING, VLLM_CUSTOM_SCOPES_FOR_PROFILING)."""
    scope = _find("v1.utils", "record_function_or_nullcontext")
    with contextlib.suppress(Exception):  # whatever a later vLLM has there: nobody profiles then
        return None if isinstance(scope(""), contextlib.nullcontext) else scope
    return None


# --- requests ---------------------------------------------------------------------------
def is_preempted(request: Any) -> bool:
    return bool(request.status == RequestStatus.PREEMPTED)


def holds_kv(request: Any) -> bool:
    """Whether a waiting request has blocks: it is loading, or has loaded and waits to run."""
    return is_loading(request) or bool(request.num_computed_tokens > 0)


def is_loading(request: Any) -> bool:
    return bool(request.status == RequestStatus.WAITING_FOR_REMOTE_KVS)


def is_waiting(request: Any) -> bool:
    """Whether the request asks for admission, not for one more block while it runs."""
    return bool(request.status != RequestStatus.RUNNING)


def turn_end(request: Any) -> TurnEnd:
    """How a finished request ended; the API server aborts for its stop strings too. One that never
    ran, because its grammar is wrong, leaves nothing, so it counts as aborted."""
    never_ran = request.status == RequestStatus.FINISHED_ERROR and not request.num_computed_tokens
    if never_ran or request.status == RequestStatus.FINISHED_ABORTED:
        return TurnEnd.ABORTED
    if request.status == RequestStatus.FINISHED_ERROR:
        return TurnEnd.FAILED
    is_cut = request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    return TurnEnd.LENGTH if is_cut else TurnEnd.STOP


def load_tokenizer(vllm_config: Any) -> Any:
    """Load the server's tokenizer, or return None where the server runs without one."""
    if vllm_config.model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(vllm_config.model_config)


# --- KV cache ---------------------------------------------------------------------------
def _find(module: str, name: str) -> Any:
    """What vLLM has under this name; None if it has none."""
    try:
        return getattr(importlib.import_module(f"vllm.{module}"), name, None)
    except ImportError:
        return None


def has_layouts() -> bool:
    """Whether there are KV cache layouts to ask for (vLLM >= 0.29)."""
    return _find("v1.kv_cache_layout", "KVCacheLayout") is not None


def maps_kernel_blocks() -> bool:
    """Whether blocks that no layout splits may be larger than a kernel's (not in vLLM 0.29)."""
    group = _find("v1.worker.utils", "AttentionGroup")
    return "kernel_block_table" in getattr(group, "__dataclass_fields__", ())


def can_fail_by_request() -> bool:
    """Whether a failed load can be reported per request (vLLM >= 0.30), not only per block."""
    return transfer_results() is not None


def mends_drafted_states() -> bool:
    """Whether this vLLM has the fixes for what drafts do to states (>= 0.32, docs/models.md)."""
    batch = _find("v1.worker.gpu.input_batch", "InputBatch")
    return "prefill_runs_as_decode_np" in getattr(batch, "__dataclass_fields__", ())


def key_of() -> Callable[[Any], bytes | None]:
    """What reads a block's key: the field behind vLLM's property if it has one, because a property
    is a Python call for each of a turn's thousands of blocks."""
    fields = getattr(_find("v1.core.kv_cache_utils", "KVCacheBlock"), "__dataclass_fields__", ())
    return operator.attrgetter("_block_hash" if "_block_hash" in fields else "block_hash")


def leaves_right_states(vllm_config: Any) -> bool:
    """Whether, with drafts, states are right where a prompt's chunks end. With async scheduling,
    runner V1 may take another request's accepted count (gpu_model_runner.py, _prepare_inputs)."""
    is_async = vllm_config.scheduler_config.async_scheduling
    is_v2 = getattr(vllm_config, "use_v2_model_runner", False)
    return mends_drafted_states() and bool(is_v2 or not is_async)


def transfer_results() -> Any:
    """What vLLM >= 0.30 is told the ends of loads with (KVConnectorTransferResults), or None."""
    return _find(_BASE, "KVConnectorTransferResults")


def cache_hit_source() -> Any:
    """How vLLM labels our hits (>= 0.32), or None."""
    source = _find("v1.metrics.cache_hit_source", "CacheHitSource")
    return getattr(source, "HOST", None) or getattr(source, "EXTERNAL_UNSPECIFIED", None)


def step_work(scheduler_output: Any, skips_decodes: bool = False) -> Work | None:
    """What a step computes (v1/core/sched/output.py); None if it only decodes and `skips_decodes`,
    which saves a sum over its requests."""
    scheduled = scheduler_output.num_scheduled_tokens
    drafts = scheduler_output.scheduled_spec_decode_tokens
    known, new = scheduler_output.scheduled_cached_reqs, scheduler_output.scheduled_new_reqs
    num_drafted = sum(map(len, drafts.values()))
    if not new and scheduler_output.total_num_scheduled_tokens == len(scheduled) + num_drafted:
        if skips_decodes:
            return None
        return Work(num_decodes=len(scheduled), decode_context=sum(known.num_computed_tokens))
    of_new = {each.req_id: each.num_computed_tokens for each in new}
    some = {request: scheduled[request] for request in of_new}
    num_more = scheduler_output.total_num_scheduled_tokens - len(scheduled)
    if sum(some.values()) - len(some) != num_more:  # somebody else gets more than one token, too
        some = scheduled

    def computed(request: str) -> int:
        if request in of_new:
            return int(of_new[request])
        return int(known.num_computed_tokens[known.req_ids.index(request)])

    context = sum(known.num_computed_tokens) + sum(of_new.values())
    return Work.of(some, len(scheduled), computed, context, drafts)


def preempted_ids(scheduler_output: Any) -> Collection[str]:
    """Requests put back in this step."""
    return getattr(scheduler_output, "preempted_req_ids", None) or ()


# --- KV events --------------------------------------------------------------------------
class KvEventFactory:
    """Builds vLLM KV events for DRAM blocks, with the fields that this vLLM knows."""

    medium = "CPU"

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        self._events = kv_events
        self._storage = getattr(kv_events, "MEDIUM_STORAGE", None)
        self._convert = kv_cache_utils.maybe_convert_block_hash
        self._extra_keys = kv_cache_utils.generate_block_hash_extra_keys
        # Since 0.32 vLLM tags the extra keys of hashes, but still not those of events.
        self._untag = getattr(kv_cache_utils, "to_event_extra_keys", list)

    def stored(
        self,
        request: Any,
        spans: Sequence[tuple[int, int]],
        keys: Sequence[bytes],
        hash_size: int,
    ) -> list[Any]:
        """Return one event for each block of `request` that comes to DRAM. `spans`: its first token
        and the one after its last; `keys`: its key."""
        extra_keys = self._extra_keys_of(set(spans), request)
        hashes, lora = request.block_hashes, request.lora_request
        return [
            self._event(
                self._events.BlockStored,
                self.medium,
                [key],
                parent_block_hash=self._convert(hashes[start // hash_size - 1]) if start else None,
                token_ids=list(request.all_token_ids[start:end]),
                block_size=end - start,
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                # Salt and images: without them, a router that hashes tokens sees another block.
                extra_keys=self._untag([extra_keys[start, end]]),
                session_id=getattr(request, "session_id", None),
            )
            for (start, end), key in zip(spans, keys, strict=True)
        ]

    def _extra_keys_of(
        self, spans: Iterable[tuple[int, int]], request: Any
    ) -> dict[tuple[int, int], Any]:
        """What the hash of each of these blocks covers beside its tokens.

        Blocks of one size are taken in order, each from the image where the one before ended
        (block_pool.py, `curr_mm_idx`), so that the cost grows with blocks plus images, not with
        their product.
        """
        keys: dict[tuple[int, int], Any] = {}
        size = image = 0
        for start, end in sorted(spans, key=lambda span: (span[1] - span[0], span)):
            if end - start != size:
                size, image = end - start, 0
            keys[start, end], image = self._extra_keys(request, start, end, image)
        return keys

    def removed(self, key: bytes) -> Any:
        """Return the event that one block left DRAM."""
        return self._event(self._events.BlockRemoved, self.medium, [key])

    def kept_below(self, keys: Sequence[bytes], block_size: int) -> list[Any]:
        """Return the event that these blocks came to disk; none if this vLLM has no medium for it.

        It carries no tokens, as in vLLM's own offloading (kv_connector/v1/offloading/events.py),
        because their turns are long over.
        """
        if self._storage is None or not keys:
            return []
        unknown = dict.fromkeys(("parent_block_hash", "lora_id", "lora_name"))
        known = {"block_size": block_size, "token_ids": []}
        return [self._event(self._events.BlockStored, self._storage, keys, **known, **unknown)]

    def left_below(self, keys: Sequence[bytes]) -> list[Any]:
        """Return the event that these blocks left the disk."""
        if self._storage is None or not keys:
            return []
        return [self._event(self._events.BlockRemoved, self._storage, keys)]

    def _event(self, kind: Any, medium: Any, keys: Sequence[bytes], **fields: Any) -> Any:
        """An event about blocks of one KV group, with those of its fields that this vLLM knows."""
        fields["block_hashes"] = [self._convert(key[:-4]) for key in keys]
        fields |= {"medium": medium, "group_idx": int.from_bytes(keys[0][-4:], "big")}
        return kind(**{name: fields[name] for name in fields if name in kind.__struct_fields__})


# --- scheduler --------------------------------------------------------------------------
def schedulers() -> tuple[type, ...]:
    """The classes among which vLLM chooses by itself (config/scheduler.py, get_scheduler_cls)."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler, AsyncScheduler


def count_no_backlog(scheduler: Any, held: Iterable[Any]) -> None:
    """Call after a step: do not count the turns `held` back as prompts that it had no room for.

    Servers that throttle prefills (between data-parallel ranks, or by an interval) stop doing so
    while there are such prompts. vLLM <= 0.30 asks our queue whether anybody may be admitted; later
    ones count all that wait, less those that they have deferred themselves.
    """
    deferred = getattr(scheduler, "deferred_waiting", None)
    if deferred is not None and getattr(scheduler, "prefill_capacity_bound", False):
        _, num_waiting = scheduler.get_request_counts()
        num_held = sum(each not in deferred for each in held)
        scheduler.prefill_capacity_bound = num_waiting - num_held > len(deferred)


def longest_chunk(scheduler: Any) -> int:
    """How many tokens of one prompt a step computes at most, as long as others are there; 0: all.
    Since vLLM 0.32 it may grow with the share of the step that each request has."""
    config = scheduler.scheduler_config
    longest = int(config.long_prefill_token_threshold)
    if longest and getattr(config, "long_prefill_token_threshold_adaptive", False):
        num_requests: int = max(1, sum(scheduler.get_request_counts()))
        return max(longest, int(config.max_num_batched_tokens) // num_requests)
    return longest


def max_running(vllm_config: Any) -> int:
    """How many requests may run at once; since vLLM 0.32 perhaps fewer than the runner has room
    for."""
    names = ("max_num_active_seqs", "max_num_seqs")
    limits = (getattr(vllm_config.scheduler_config, name, None) for name in names)
    return next(filter(None, limits), sys.maxsize)


def forget_uncomputed(scheduler: Any, request: Any) -> None:
    """Call before vLLM preempts `request`: forget the hashes of its blocks that nobody computed.

    The priority policy also preempts what it has scheduled in this very step. allocate_slots
    has hashed those blocks already, so they would come free with hashes that can be found, and
    whoever hit them would read what is not there. Costs nothing for any other victim.
    """
    manager = scheduler.kv_cache_manager
    uncomputed: set[int] = set()
    for group in manager.get_block_ids(request.request_id):
        first = request.num_computed_tokens // scheduler.block_size
        uncomputed.update(block_id for block_id in group[first:] if block_id)
    manager.evict_blocks(uncomputed)


def reserve_nothing(scheduler: Any, request: Any) -> None:
    """The request's prefill is no longer under way, so no load has to leave room for its rest."""
    scheduler._inflight_prefills.discard(request)


def lost_loads(scheduler: Any) -> list[Any]:
    """Turns whose load is over and has brought nothing, which vLLM has not noticed yet."""
    if not scheduler.failed_recving_kv_req_ids:  # as in nearly every step
        return []
    lost = scheduler.finished_recving_kv_req_ids & scheduler.failed_recving_kv_req_ids
    requests = [scheduler.requests[each] for each in sorted(lost) if each in scheduler.requests]
    return [each for each in requests if is_loading(each) and not each.num_computed_tokens]


def end_load(scheduler: Any, request: Any) -> None:
    """Do what vLLM does once it sees that a turn's load is over (v1/core/sched/scheduler.py)."""
    scheduler._update_waiting_for_remote_kv(request)
    preempted, waiting = RequestStatus.PREEMPTED, RequestStatus.WAITING
    request.status = preempted if request.num_preemptions else waiting


def wait_without_kv(scheduler: Any, request: Any) -> None:
    """Move a request that has lost its KV to the queue of the requests that have none."""
    reserve_nothing(scheduler, request)
    for name in ("kv_holding_waiting", "skipped_waiting"):  # vLLM >= 0.31, <= 0.30
        queue: Any = getattr(scheduler, name, ())
        if request in queue:
            queue.remove_request(request)
            scheduler.waiting.prepend_request(request)


def ask_to_recompute(vllm_config: Any) -> None:
    """Make a failed load a miss (law 4): by default it answers HTTP 500. The scheduler reads this
    after it has created the connector (v1/core/sched/scheduler.py, __init__)."""
    vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"


def free_blocks_at_once(scheduler: Any) -> None:
    """Undo `defer_block_free`: blocks that a victim frees return a step late, so up to vLLM 0.31
    one failed allocation preempts everybody, and since then the rest of the batch sits a step out.
    It guards against loads not ordered behind the step in flight; ours wait for the compute stream.
    """
    scheduler.defer_block_free = False


def takes_longest_hit() -> bool:
    """Whether the scheduler asks each group for its hit as soon as there is a connector, and takes
    the longest (vLLM 0.26, for models with states)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "find_longest_cache_hit_per_group" in Scheduler.schedule.__code__.co_names


def look_up_as_without_connector(scheduler: Any) -> None:
    """That scheduler also reads the cache for requests that may not, as with prompt_logprobs. Once
    it is built, only that lookup asks for this attribute."""
    if takes_longest_hit():
        scheduler.has_mamba_layers = False


def find_wake() -> Callable[[], None] | None:
    """Return what makes an idle engine step, or None where nothing waits (offline LLM).

    EngineCoreProc blocks in `input_queue.get`; a WAKEUP message is a no-op that ends the
    wait. The queue is reachable only from its constructor, which is on the call stack while
    the connector is built: create_connector <- Scheduler.__init__ <- EngineCoreProc.__init__.
    """
    wakeup = getattr(_find("v1.engine", "EngineCoreRequestType"), "WAKEUP", None)
    queues = (getattr(each, "input_queue", None) for each in callers())
    queue: Any = next((each for each in queues if each is not None), None)
    return None if queue is None or wakeup is None else lambda: queue.put_nowait((wakeup, None))


def callers() -> Iterator[Any]:
    """Each `self` on the call stack, the innermost first. What vLLM does not hand us is there while
    it builds what it calls us from."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back


def find_ours(connector: Any, kind: type) -> Any:
    """Return our connector: the engine's own, or one inside a MultiConnector, or None."""
    found: Sequence[Any] = (connector, *getattr(connector, "_connectors", ()))
    return next((each for each in found if isinstance(each, kind)), None)


def our_extra_config(transfer: Any) -> dict[str, Any]:
    """Return our part of the extra config, also when we are inside a MultiConnector."""
    return our_part(transfer.kv_connector, transfer.kv_connector_extra_config) or {}
