"""LmcacheModel: what LMCache 0.3 to 0.5 does behind LMCacheConnectorV1, as a connector of ours.

A model, not LMCache: its engine needs a GPU. Taken from its vllm_v1_adapter.py and LocalCPUBackend:

- text is kept in chunks of 256 tokens; what is left of a prompt behind the last one is not kept;
- `get_num_new_matched_tokens` looks up how many leading chunks are in DRAM, and what VRAM lacks of
  them is loaded before the step's forward pass, which waits for it;
- every chunk of a prompt that a step completes is stored after the forward pass, and the step
  waits for that too (`wait_for_save`); answers are not stored (`save_decode_cache` is off);
- DRAM is one LRU list of chunks; to find or store a chunk is to use it.

Not modelled: its gather kernels, its page-locked allocator, its eviction's own time.
"""

from __future__ import annotations

from collections import OrderedDict
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
    """A request in the engine. `num_kept`: leading chunks that it need not store."""

    request: Any
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
        self._capacity = extra["num_tokens"] // CHUNK
        self._blocks = CHUNK // block_size
        self._chunks: OrderedDict[bytes, None] = OrderedDict()  # least recently used first
        self._tracked: dict[str, _Tracked] = {}
        self._num_loaded = 0

    # --- lookup and load ----------------------------------------------------------------
    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Tokens of the prompt that DRAM has beyond `num_computed`; all but the last at most."""
        num_found = self._find(request) * CHUNK
        return max(min(num_found, request.num_tokens - 1) - num_computed, 0), False

    def _find(self, request: Any) -> int:
        """Leading chunks that DRAM has, each of them used by being found."""
        num_found = 0
        for i in range(request.num_tokens // CHUNK):
            key = self._key(request, i)
            if key not in self._chunks:
                break
            self._chunks.move_to_end(key)
            num_found += 1
        return num_found

    def _key(self, request: Any, chunk: int) -> bytes:
        """Hashes are chained: that of a chunk's last block names all text up to its end."""
        key: bytes = request.block_hashes[(chunk + 1) * self._blocks - 1]
        return key

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        self._num_loaded += num_external
        self._tracked[request.request_id] = _Tracked(request, self._find(request))

    # --- store --------------------------------------------------------------------------
    def build_connector_meta(self, scheduler_output: Any) -> LmcacheStep:
        num_stored = 0
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                num_stored += self._store(tracked, num_tokens)
        step = LmcacheStep(num_loaded=self._num_loaded, num_stored=num_stored * CHUNK)
        self._num_loaded = 0
        return step

    def _store(self, tracked: _Tracked, num_tokens: int) -> int:
        """Keep the chunks of the prompt that this step completes; return how many are new."""
        request, num_new = tracked.request, 0
        computed = min(request.num_computed_tokens + num_tokens, request.num_prompt_tokens)
        for i in range(tracked.num_kept, computed // CHUNK):
            key = self._key(request, i)
            num_new += key not in self._chunks
            self._chunks[key] = None
            self._chunks.move_to_end(key)
        tracked.num_kept = max(tracked.num_kept, computed // CHUNK)
        while len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)
        return num_new

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._tracked.pop(request.request_id, None)
        return False, None

    # --- worker's side: modelled elsewhere ------------------------------------------------
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
