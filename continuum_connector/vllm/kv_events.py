"""KvEventFactory: vLLM's KV events for DRAM blocks, with the fields that this vLLM knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class KvEventFactory:
    """Builds vLLM KV events for DRAM blocks, with the fields that this vLLM knows."""

    medium = "CPU"

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core import kv_cache_utils

        self._events = kv_events
        self._convert = kv_cache_utils.maybe_convert_block_hash
        self._extra_keys = kv_cache_utils.generate_block_hash_extra_keys
        # Since 0.32 the keys of hashes are tagged, and those of events still are not.
        self._untag = getattr(kv_cache_utils, "to_event_extra_keys", list)

    def stored(
        self, request: Any, indexes: Sequence[int], keys: Sequence[bytes], block_size: int
    ) -> list[Any]:
        """One event for each block of `request` that comes to DRAM, by its place and its key."""
        extra_keys = self._extra_keys_at(set(indexes), request, block_size)
        return [
            self._stored(request, index, key, block_size, extra_keys[index])
            for index, key in zip(indexes, keys, strict=True)
        ]

    def _stored(self, request: Any, index: int, key: bytes, size: int, extra_keys: Any) -> Any:
        """One block's event; its tokens and parent are those of the request's chain."""
        hashes = request.block_hashes
        lora = request.lora_request
        fields = {
            "block_hashes": [self._convert(key[:-4])],
            "parent_block_hash": self._convert(hashes[index - 1]) if index else None,
            "token_ids": list(request.all_token_ids[index * size : (index + 1) * size]),
            "block_size": size,
            "lora_id": lora.adapter_id if lora else None,
            "medium": self.medium,
            "lora_name": lora.name if lora else None,
            # Salt and images; without them a router that hashes tokens takes it for another block.
            "extra_keys": self._untag([extra_keys]),
            "group_idx": int.from_bytes(key[-4:], "big"),
            "session_id": getattr(request, "session_id", None),
        }
        return self._build(self._events.BlockStored, fields)

    def _extra_keys_at(self, indices: Iterable[int], request: Any, size: int) -> dict[int, Any]:
        """What the hash of each of these blocks has beside its tokens.

        Upwards, from the image where the last block ended (block_pool.py, `curr_mm_idx`): the
        cost grows with blocks plus images, not with their product.
        """
        keys: dict[int, Any] = {}
        image = 0
        for index in sorted(indices):
            start = index * size
            keys[index], image = self._extra_keys(request, start, start + size, image)
        return keys

    def removed(self, key: bytes) -> Any:
        """One block left DRAM."""
        fields = {
            "block_hashes": [self._convert(key[:-4])],
            "medium": self.medium,
            "group_idx": int.from_bytes(key[-4:], "big"),
        }
        return self._build(self._events.BlockRemoved, fields)

    def cleared(self) -> Any:
        """All blocks left DRAM."""
        return self._events.AllBlocksCleared()

    @staticmethod
    def _build(kind: Any, fields: dict[str, Any]) -> Any:
        known = kind.__struct_fields__
        return kind(**{name: value for name, value in fields.items() if name in known})
