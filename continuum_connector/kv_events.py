"""KvEventFactory: vLLM's KV events for DRAM blocks, with the fields that this vLLM knows."""

from __future__ import annotations

from typing import Any


class KvEventFactory:
    """Builds vLLM KV events for DRAM blocks, with the fields that this vLLM knows."""

    medium = "CPU"

    def __init__(self) -> None:
        from vllm.distributed import kv_events
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

        self._events = kv_events
        self._convert = maybe_convert_block_hash

    def stored(self, request: Any, index: int, group: int, key: bytes, block_size: int) -> Any:
        """One block came to DRAM; its tokens and parent are those of the request's chain."""
        hashes = request.block_hashes
        lora = request.lora_request
        fields = {
            "block_hashes": [self._convert(key[:-4])],
            "parent_block_hash": self._convert(hashes[index - 1]) if index else None,
            "token_ids": list(request.all_token_ids[index * block_size : (index + 1) * block_size]),
            "block_size": block_size,
            "lora_id": lora.adapter_id if lora else None,
            "medium": self.medium,
            "lora_name": lora.name if lora else None,
            "group_idx": group,
            "session_id": getattr(request, "session_id", None),
        }
        return self._build(self._events.BlockStored, fields)

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
