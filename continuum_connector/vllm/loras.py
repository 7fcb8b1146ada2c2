"""AdapterNames: whether an adapter that vLLM reads is another than its name meant before.

A block's hash has the name of its adapter, and from vLLM 0.32 on the path, but never the weights.
vLLM reads an adapter when a trainer adds it, and in the forward pass whenever a turn of the step
has one that is not in memory: the first time, or again after others took its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MAX_NAMES = 4096
_Files = tuple[tuple[Any, ...], ...]


class AdapterNames:
    """What each name meant when its adapter was last read: id, path, and the files there."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str, _Files]] = {}

    def read(self, lora_request: Any, before: _Files) -> bool:
        """The adapter has been read; return whether its name may have meant another until now.
        `before`: what `files` said before it was read.

        The same id, path and files are the same adapter. One without files, as of tensors that a
        trainer sends, is never known to be the same.
        """
        name, path = str(lora_request.lora_name), str(lora_request.lora_path)
        after = files(path)
        is_whole = before in ((), after)  # not there before: vLLM has fetched it
        found = int(lora_request.lora_int_id), path, after if is_whole else ()
        is_full = name not in self._known and len(self._known) >= _MAX_NAMES
        if is_full:  # an epoch begins, so nothing is left that an older name could mean
            self._known.clear()
        known = self._known.get(name)
        self._known[name] = found
        if is_full or getattr(lora_request, "load_inplace", False):
            return True
        return known is not None and (known != found or not found[2] or before != after)


def files(path: str) -> _Files:
    """What changes whenever a file of the adapter does; empty if there is none on this node."""
    try:
        seen = [(each.name, each.stat()) for each in Path(_folder(path)).iterdir()]
    except OSError:
        return ()
    return tuple(
        (name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        for name, at in sorted(seen, key=lambda each: each[0])
    )


def _folder(path: str) -> str:
    """Where vLLM reads it (lora/utils.py, get_adapter_absolute_path), without asking a network.
    OSError if it is not on this node."""
    local = Path(path).expanduser()
    if local.is_absolute() or local.exists():
        return str(local)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except HFValidationError as error:
        raise FileNotFoundError(path) from error
