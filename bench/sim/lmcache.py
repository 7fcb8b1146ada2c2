"""LmcacheModel: what LMCache 0.3.7 does behind LMCacheConnectorV1, as a connector of ours.

A model, not LMCache: its engine needs a GPU. It is off by up to 1.7 against what was measured
(FINDINGS.md), so no claim rests on it. From vllm_v1_adapter.py, cache_engine.py,
local_cpu_backend.py and gpu_connector.py of that release:

- text is kept in chunks of 256 tokens; what is left of a prompt behind the last one is kept too
  (`save_unfull_chunk`), and only the same prompt finds it;
- `get_num_new_matched_tokens` looks up how many leading chunks are in DRAM, and what VRAM lacks of
  them is loaded, whole chunks, before the step's forward pass, which waits (`load_stream`);
- what a step completes of a prompt is stored after the forward pass, and the step waits for that
  too (`wait_for_save`, a `store_stream.synchronize` a chunk); answers are not stored;
- DRAM is one LRU list of chunks: to be found is to be used, a prompt's last chunk first, so its
  tail leaves before its head; what is stored again keeps its place;
- a turn that resumes after a preemption is not loaded, though vLLM counts it as computed.

Not modelled: its gather kernels, its allocator's gaps, its eviction's own time. Its server of
today (LMCacheMPConnector, copies in another process) is none of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

CHUNK = 256  # tokens


@dataclass
class LmcacheStep(KVConnectorMetadata):
    """Tokens to load before the step computes, and to store after it."""

    num_loaded: int = 0
    num_stored: int = 0


@dataclass
class _Tracked:
    """A request in the engine, LMCache's RequestTracker. `num_seen`: tokens that have been
    scheduled; `num_kept`: leading ones that it need not store."""

    request: Any
    num_seen: int
    num_kept: int


class LmcacheModel(KVConnectorBase_V1):
    """The scheduler's side; the worker's is rival_workers.LmcacheWorker."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if CHUNK % block_size:
            raise ValueError(
                f"a chunk of {CHUNK} tokens is no whole number of blocks of {block_size}, so no "
                "chunk would have a hash; choose a block size that divides it"
            )
        self._room = extra["num_tokens"]  # that is free
        self._blocks = CHUNK // block_size
        self._chunks: OrderedDict[Any, int] = OrderedDict()  # key -> tokens; evicted in this order
        self._tracked: dict[str, _Tracked] = {}
        self._found: dict[str, tuple[int, int]] = {}  # request -> tokens in DRAM, in VRAM
        self._num_loaded = 0

    # --- lookup and load ----------------------------------------------------------------
    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Tokens of the prompt that DRAM has beyond `num_computed`; all but the last at most."""
        num_found = self._find(request)
        self._found[request.request_id] = num_found, num_computed
        return max(min(num_found, request.num_tokens - 1) - num_computed, 0), False

    def _find(self, request: Any) -> int:
        """Tokens of the leading chunks that DRAM has. To be found is to be used, the last chunk
        first (`touch_cache`): of one prompt the tail is evicted before the head."""
        found = []
        for key, _ in self._keys(request, 0, request.num_prompt_tokens):
            if key not in self._chunks:
                break
            found.append(key)
        for key in reversed(found):
            self._chunks.move_to_end(key)
        return sum(self._chunks[key] for key in found)

    def _keys(self, request: Any, start: int, end: int) -> Iterator[tuple[Any, int]]:
        """Name and length of the chunks of the text from `start`, where one begins, to `end`.

        Hashes are chained: that of a chunk's last block names all text up to its end. Of a partial
        chunk nothing is asked but whether it is the same prompt's.
        """
        for first in range(start, end, CHUNK):
            if first + CHUNK <= end:
                yield request.block_hashes[first // CHUNK * self._blocks + self._blocks - 1], CHUNK
            else:
                yield (request.request_id, end), end - first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        num_found, num_computed = self._found.pop(request.request_id)
        if request.request_id in self._tracked:
            return  # it was preempted: what it is to load is counted as computed, and not loaded
        if num_external:
            self._num_loaded += num_found - num_computed // CHUNK * CHUNK
        self._tracked[request.request_id] = _Tracked(
            request, num_computed + num_external, num_found
        )

    # --- store --------------------------------------------------------------------------
    def build_connector_meta(self, scheduler_output: Any) -> LmcacheStep:
        num_stored = 0
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                num_stored += self._store(tracked, num_tokens)
        step = LmcacheStep(num_loaded=self._num_loaded, num_stored=num_stored)
        self._num_loaded = 0
        return step

    def _store(self, tracked: _Tracked, num_tokens: int) -> int:
        """Keep the chunks of the prompt that this step completes; return their tokens."""
        request = tracked.request
        tracked.num_seen = min(tracked.num_seen + num_tokens, request.num_prompt_tokens)
        end = tracked.num_seen
        if end < request.num_prompt_tokens:
            end = end // CHUNK * CHUNK
        if tracked.num_kept >= end:
            return 0
        new = list(self._keys(request, tracked.num_kept // CHUNK * CHUNK, end))
        tracked.num_kept = end
        for _, num_tokens in new:  # room for all of them first, also for those that are there
            while self._chunks and self._room < num_tokens:
                self._room += self._chunks.popitem(last=False)[1]
            self._room -= num_tokens
        for key, num_tokens in new:
            if key in self._chunks:
                self._room += num_tokens
            else:
                self._chunks[key] = num_tokens
        return sum(num_tokens for _, num_tokens in new)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._tracked.pop(request.request_id, None)
        return False, None

    # --- worker's side: modelled elsewhere ------------------------------------------------
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
