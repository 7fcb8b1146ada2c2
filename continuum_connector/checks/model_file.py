"""Where a model's config.json is: in a folder, or in the cache of downloads. Never downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoModelError(ValueError):
    """There is no config.json to read; the text says where it was looked for."""


def read_model_config(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The model's config.json. `model`: a folder, its config.json, or a name on the Hub."""
    path = Path(model).expanduser()
    path = path if path.suffix == ".json" else path / "config.json"
    found = path if path.is_file() else _cached(model, environ)
    try:
        config = json.loads(found.read_text())
    except (OSError, ValueError) as error:
        raise NoModelError(f"{found} cannot be read ({error})") from None
    if not isinstance(config, dict):
        raise NoModelError(f"{found} is no JSON object")
    return config


def _cached(model: str, environ: Mapping[str, str]) -> Path:
    if Path(model).expanduser().exists() or model.startswith(("/", ".", "~")):
        raise NoModelError(f"there is no config.json in {model}")
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise NoModelError(f"{model} is no folder, and huggingface_hub is not installed") from None
    try:
        found = try_to_load_from_cache(
            model, "config.json", cache_dir=environ.get("HF_HUB_CACHE") or None
        )
    except HFValidationError:
        raise NoModelError(f"{model!r} is neither a folder nor a name on the Hub") from None
    if not isinstance(found, str):
        raise NoModelError(f"{model} is no folder, and is not downloaded here")
    return Path(found)
