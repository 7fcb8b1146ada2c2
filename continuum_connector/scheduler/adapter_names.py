"""AdapterNames: what LoRA adapters' names mean, so that no turn gets KV of another adapter that had
the name of its own."""

from __future__ import annotations

from typing import Any

_MAX_NAMES = 4096
_MAX_IDS = 64  # of a name; a trainer may number its steps, and API servers are a few


class AdapterNames:
    """Each name's path, and the ids that it had there."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[str, set[int]]] = {}

    def arrived(self, request: Any) -> bool:
        """A turn has arrived, and nobody has looked for its KV yet. Return whether its adapter's
        name may have meant another adapter until now: it has another path, or an id that it never
        had there. vLLM's hashes have the name alone, from 0.32 on the path too.

        A second API server counts ids of its own, so an id that was there before is no news.
        """
        lora = request.lora_request
        if not lora:
            return False
        known = self._named.get(lora.name)
        is_full = known is None and len(self._named) >= _MAX_NAMES
        if is_full:  # safe: our answer begins an epoch, and KV of all these names is forgotten
            self._named.clear()
        path, ids = known or (lora.path, set())
        if path == lora.path and lora.adapter_id in ids:
            return False
        if path != lora.path or len(ids) >= _MAX_IDS:
            ids = set()
        self._named[lora.name] = lora.path, ids
        ids.add(lora.adapter_id)
        return is_full or known is not None
