"""KvEventFactory: vLLM's KV events for blocks in DRAM and on disk."""

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
        return [
            self._stored(request, span, key, hash_size, extra_keys[span])
            for span, key in zip(spans, keys, strict=True)
        ]

    def _stored(
        self, request: Any, span: tuple[int, int], key: bytes, hash_size: int, extra_keys: Any
    ) -> Any:
        """One block's event; its tokens and parent are those of the request's chain."""
        start, end = span
        hashes = request.block_hashes
        lora = request.lora_request
        fields = {
            **self._named(self.medium, key),
            "parent_block_hash": self._convert(hashes[start // hash_size - 1]) if start else None,
            "token_ids": list(request.all_token_ids[start:end]),
            "block_size": end - start,
            "lora_id": lora.adapter_id if lora else None,
            "lora_name": lora.name if lora else None,
            # Salt and images: without them, a router that hashes tokens would see another block.
            "extra_keys": self._untag([extra_keys]),
            "session_id": getattr(request, "session_id", None),
        }
        return self._build(self._events.BlockStored, fields)

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
        return self._build(self._events.BlockRemoved, self._named(self.medium, key))

    def kept_below(self, keys: Sequence[bytes], block_size: int) -> list[Any]:
        """Return the event that these blocks came to disk; none if this vLLM has no medium for it.

        It carries no tokens, as in vLLM's own offloading (kv_connector/v1/offloading/events.py),
        because their turns are long over.
        """
        if self._storage is None or not keys:
            return []
        fields = {**self._named(self._storage, *keys), "block_size": block_size, "token_ids": []}
        fields |= dict.fromkeys(("parent_block_hash", "lora_id", "lora_name"))
        return [self._build(self._events.BlockStored, fields)]

    def left_below(self, keys: Sequence[bytes]) -> list[Any]:
        """Return the event that these blocks left the disk."""
        if self._storage is None or not keys:
            return []
        return [self._build(self._events.BlockRemoved, self._named(self._storage, *keys))]

    def _named(self, medium: Any, *keys: bytes) -> dict[str, Any]:
        """The fields of an event about blocks of one KV group: which they are, and where."""
        hashes = [self._convert(key[:-4]) for key in keys]
        group = int.from_bytes(keys[0][-4:], "big")
        return {"block_hashes": hashes, "medium": medium, "group_idx": group}

    @staticmethod
    def _build(kind: Any, fields: dict[str, Any]) -> Any:
        known = kind.__struct_fields__
        return kind(**{name: value for name, value in fields.items() if name in known})
