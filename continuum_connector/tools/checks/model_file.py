"""Finds a model's config.json in a folder or in the cache of downloads. It downloads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20  # the largest are a few hundred KB


class NoModelError(ValueError):
    """No config.json can be read here; the message says where we looked."""


class BrokenModelError(NoModelError):
    """The model is here, but its config.json is missing or broken, so no server starts with it."""


def read_model_config(model: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the model's config.json. `model`: a folder, its config.json, or a name on the Hub."""
    found = _find(model, environ)
    try:
        with found.open("rb") as file:
            config = json.loads(file.read(MAX_BYTES))
    except OSError as error:
        raise BrokenModelError(f"{found} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else error
        raise BrokenModelError(f"{found} is no JSON ({why})") from None
    if not isinstance(config, dict):
        raise BrokenModelError(f"{found} is no JSON object")
    return config


def _find(model: str, environ: Mapping[str, str]) -> Path:
    try:
        path = Path(model).expanduser()
        file = path if path.suffix == ".json" else path / "config.json"
        if file.is_file():
            return file
        exists, is_other = path.exists(), path.is_file() or (path / "params.json").is_file()
    except (OSError, RuntimeError) as error:  # the name is too long, or `~` names no user
        raise BrokenModelError(f"{model} is no folder ({error})") from None
    if is_other:
        raise NoModelError(f"{model} has no config.json, and other formats are not read here")
    if exists:
        raise BrokenModelError(f"there is no config.json in {model}, so no server starts with it")
    if model.startswith(("/", ".", "~")):
        raise BrokenModelError(f"there is no folder {model}, so no server starts with it")
    return _cached(model, environ)


def _cached(model: str, environ: Mapping[str, str]) -> Path:
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
        raise BrokenModelError(f"{model!r} is neither a folder nor a name on the Hub") from None
    except OSError as error:
        raise NoModelError(f"{model} cannot be looked up ({error.strerror})") from None
    if not isinstance(found, str):
        raise NoModelError(f"{model} is no folder, and is not downloaded here")
    return Path(found)
