"""Pretend: makes vLLM in this process believe in a GPU that is not there, for `continuum check`.

Only a process that ends with its one answer may do this: names of torch and vLLM are replaced, and
not put back. Nothing is computed, no memory is allocated, and the network is closed.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import re
import socket
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

GPU_BYTES = 8 << 40  # so that nothing is refused for its size
MOST_GPUS = 1 << 16
UNITS, SHARED_BYTES, L2_BYTES = 132, 232_448, 50 << 20  # an H100's; no KV cache depends on them
# What a CUDA build has and its requirements bring; where it is missing, whoever imports it to look
# around gets a stand-in. vLLM's own modules, below `vllm`.
KERNELS = (
    *("_C_stable_libtorch", "_moe_C_stable_libtorch", "_C", "_moe_C", "_flashmla_C"),
    *("_flashmla_extension_C", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C"),
    "third_party.flashmla.flash_mla_interface",
)
PACKAGES = ("deep_gemm", "tilelang", "cutlass", "cuda", "quack", "torchvision")
_OURS = re.compile("_C|torchvision")  # namespaces of kernels in torch.ops


class _AnyType(type):
    """A class whose missing attributes are their own names."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _stand_in(_: object, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _AnyType(name, (Kernel,), {}) if name[:1].isupper() else Kernel()


class Kernel:
    """A function or class that this build lacks: it may be asked for, and is never run."""

    __getattr__ = _stand_in

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> Any:
        return Kernel()  # true, and a decorator


class Kernels(types.ModuleType):
    """A module full of kernels that this build lacks."""

    __getattr__ = _stand_in


class _Absent:
    """Finds the packages of PACKAGES that nobody else found."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        return Kernels(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class _Device:
    """The GPU that is played; `capability` may change until a config is made. What befell."""

    capability = (9, 0)
    trouble: Exception | None = None  # why a model's class cannot be looked at

    @property
    def name(self) -> str:
        return "sm_{}{}".format(*self.capability)


DEVICE = _Device()


def play_cuda() -> str:
    """Make this process's vLLM serve on CUDA devices like DEVICE, on a machine without a network,
    whatever is installed and plugged in; say what it would have served on. Before anything else of
    vLLM is imported, because modules keep what they see."""
    from vllm.platforms import current_platform

    real = str(getattr(current_platform, "device_name", ""))
    _close_network()
    _stand_in_for_kernels()
    _play_torch()
    _play_platform()
    return real


def _close_network() -> None:
    own = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise OSError("a check uses no network")
        own(self, address)

    socket.socket.connect = connect  # type: ignore[method-assign, assignment]


def _stand_in_for_kernels() -> None:
    spec = importlib.util.find_spec("vllm")
    root = Path(((spec and spec.submodule_search_locations) or [""])[0])
    for name in KERNELS:
        parent, _, stem = name.rpartition(".")
        if not list((root / parent.replace(".", "/")).glob(f"{stem}.*")):
            sys.modules[f"vllm.{name}"] = Kernels(f"vllm.{name}")
    with contextlib.suppress(ImportError):  # asked for what is really there, it remembers
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
    sys.meta_path.append(_Absent())
    if not {"vllm._C", "vllm._C_stable_libtorch"} & set(sys.modules):
        return
    namespace: Any = torch._ops._OpNamespace
    own_op, own_fake = namespace.__getattr__, torch.library.register_fake

    def op(self: Any, name: str) -> Any:
        try:
            return own_op(self, name)
        except AttributeError:
            if name.startswith("__") or not _OURS.search(self.name):
                raise
            return Kernel()

    def register_fake(name: Any, *args: Any, **kwargs: Any) -> Any:
        if _OURS.search(str(name).partition("::")[0]):
            return lambda function: function
        return own_fake(name, *args, **kwargs)

    namespace.__getattr__, torch.library.register_fake = op, register_fake


def _play_torch() -> None:
    cuda: Any = torch.cuda
    cuda.get_device_properties = _properties
    cuda.get_device_capability = lambda *_, **__: DEVICE.capability
    cuda.device_count = lambda: MOST_GPUS
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.set_device = lambda *_: None
    cuda.Stream = cuda.Event = Kernel
    cuda.current_stream = cuda.default_stream = lambda *_: Kernel()
    if accelerator := getattr(torch, "accelerator", None):
        accelerator.device_count = lambda: MOST_GPUS
        accelerator.set_device_index = lambda *_: None
        accelerator.current_device_index = lambda: 0
    with contextlib.suppress(ImportError):
        from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
        from triton.runtime import driver  # type: ignore[import-untyped]

        class Driver(Kernel):
            def get_current_target(self) -> Any:
                return GPUTarget("cuda", DEVICE.capability[0] * 10 + DEVICE.capability[1], 32)

            def get_current_device(self) -> int:
                return 0

        driver.set_active(Driver())


def _properties(*_: Any, **__: Any) -> Any:
    major, minor = DEVICE.capability
    return types.SimpleNamespace(
        name=DEVICE.name,
        major=major,
        minor=minor,
        total_memory=GPU_BYTES,
        multi_processor_count=UNITS,
        shared_memory_per_block_optin=SHARED_BYTES,
        warp_size=32,
        L2_cache_size=L2_BYTES,
    )


def _play_platform() -> None:
    import vllm.platforms as platforms

    platforms.vllm_version_matches_substr = lambda _name: False  # no CPU build: Triton is used
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Played(NonNvmlCudaPlatform):  # type: ignore[misc]
        """The answers that vLLM would get from the driver."""

        get_device_capability = classmethod(lambda *_, **__: DeviceCapability(*DEVICE.capability))
        get_device_name = classmethod(lambda *_, **__: DEVICE.name)
        get_device_total_memory = classmethod(lambda *_, **__: GPU_BYTES)
        get_device_uuid = classmethod(lambda *_, **__: DEVICE.name)
        device_count = classmethod(lambda *_, **__: MOST_GPUS)
        num_compute_units = classmethod(lambda *_, **__: UNITS)
        set_device = classmethod(lambda *_, **__: None)
        is_pin_memory_available = classmethod(lambda *_, **__: False)
        is_integrated_gpu = classmethod(lambda *_, **__: False)
        get_cuda_runtime_major = classmethod(lambda *_, **__: 13)
        get_current_memory_usage = classmethod(lambda *_, **__: 0)
        import_kernels = classmethod(lambda *_, **__: None)
        opaque_attention_op = classmethod(lambda *_, **__: True)

    platforms._current_platform = Played()
    from vllm.model_executor.models import registry

    def here(function: Any) -> Any:  # a child would not pretend
        try:
            return function()
        except Exception as error:
            DEVICE.trouble = error  # vLLM only logs it
            raise

    registry._run_in_subprocess = here


class OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """Whatever asks for a GPU's memory gets none, but a tensor of the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = "meta"
        if name in ("cuda", "pin_memory"):
            return args[0]
        if name == "to":
            args = args[:1] + tuple("meta" if _is_gpu(each) else each for each in args[1:])
        return function(*args, **kwargs)


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


@contextlib.contextmanager
def no_memory() -> Iterator[None]:
    """Layers that are built meanwhile have no weights."""
    import torch.fx.experimental._config as tracing

    assume = mock.patch.object(tracing, "meta_nonzero_assume_all_nonzero", True)
    with torch.device("meta"), OnMeta(), assume:
        yield


@contextlib.contextmanager
def world_of(config: Any, rank: int) -> Iterator[None]:
    """This process is one rank of the config's world, whose other ranks do not exist."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.distributed import parallel_state as state

    parallel = config.parallel_config
    size = parallel.world_size * parallel.data_parallel_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(state.GroupCoordinator, "__init__", _group):
            state.init_distributed_environment(size, rank, "fake", 0, "fake")
            state.initialize_model_parallel(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
                backend="fake",
            )
        yield
    finally:
        for name in ("_WORLD", "_TP", "_ETP", "_PP", "_DP", "_EP", "_EPLB", "_PCP", "_DCP"):
            setattr(state, name, None)
        dist.destroy_process_group()


def _group(self: Any, group_ranks: Any, *_: Any, group_name: Any = None, **__: Any) -> None:
    """GroupCoordinator.__init__ without a way to speak to the others of the group."""
    import torch.distributed as dist

    self.unique_name = group_name or "anonymous"
    self.rank = self.local_rank = dist.get_rank()
    self.device = torch.device("meta")
    self.device_communicator = self.mq_broadcaster = None
    self.use_custom_op_call = self.use_cpu_custom_send_recv = False
    self.use_device_communicator = False
    for ranks in group_ranks:
        if self.rank in ranks:
            self.ranks, self.world_size = ranks, len(ranks)
            self.rank_in_group = ranks.index(self.rank)
    self.cpu_group = self.device_group = dist.group.WORLD
