"""A real device, through torch: VRAM buffers, streams, events and a decode-like load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bench.copy_engine.machine import Buffer

WIDTH, ROWS, MATMULS = 8192, 64, 4  # 128 MiB of weights per product: more than an L2 holds


def find_machine(device: int) -> TorchMachine | str:
    """The device, or why there is none."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if device >= torch.cuda.device_count():
        return f"device {device} is not in 0..{torch.cuda.device_count() - 1}"
    return TorchMachine(device)


class TorchMachine:
    """torch provides memory and streams, the engine copies."""

    driver = "cuda"

    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.set_device(device)
        self.device = device
        self.where = f"cuda:{device}"
        self.name = str(torch.cuda.get_device_name(device))

    def vram(self, num_bytes: int) -> TorchBuffer:
        import torch

        return TorchBuffer(torch.ones(num_bytes, dtype=torch.uint8, device=self.where))

    def host(self, num_bytes: int) -> TorchBuffer:
        import torch

        return TorchBuffer(torch.ones(num_bytes, dtype=torch.uint8).pin_memory())

    def stream(self) -> TorchStream:
        import torch

        torch.cuda.synchronize(self.device)  # buffers were filled on another stream
        return TorchStream(torch.cuda.Stream(self.device), self.where)

    def pages(self, num_blocks: int, layers: int, piece: int, block_first: bool) -> TorchPages:
        return TorchPages(self.where, num_blocks, layers, piece, block_first)


class TorchBuffer:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.address = int(tensor.data_ptr())
        self.num_bytes = int(tensor.numel())


class TorchPages:
    """A tensor of layers, blocks, bytes, whichever lies outermost."""

    def __init__(
        self, where: str, num_blocks: int, layers: int, piece: int, block_first: bool
    ) -> None:
        import torch

        shape = (num_blocks, layers) if block_first else (layers, num_blocks)
        tensor = torch.ones((*shape, piece // 8), dtype=torch.int64, device=where)
        self.layers = tensor.transpose(0, 1) if block_first else tensor

    def reader(self, stream: TorchStream, order: Any) -> Callable[[int], None]:
        import torch

        ids = torch.as_tensor(order, device=self.layers.device)
        out = self.layers.new_empty(len(order), self.layers.shape[2])
        torch.cuda.synchronize(self.layers.device)  # the ids were copied on another stream

        def read(layer: int) -> None:
            with torch.cuda.stream(stream._stream):
                torch.index_select(self.layers[layer], 0, ids, out=out)

        return read


class TorchEvent:
    def __init__(self, stream: Any) -> None:
        import torch

        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: TorchEvent) -> float:
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class TorchStream:
    """A stream of its own, which no other waits for."""

    def __init__(self, stream: Any, where: str) -> None:
        self._stream = stream
        self._where = where
        self.handle = int(stream.cuda_stream)

    def copy(self, dst: Buffer, src: Buffer, num_bytes: int) -> None:
        import torch

        assert isinstance(dst, TorchBuffer)
        assert isinstance(src, TorchBuffer)
        with torch.cuda.stream(self._stream):
            dst.tensor[:num_bytes].copy_(src.tensor[:num_bytes], non_blocking=True)

    def work(self) -> None:
        import torch

        rows, weights, out = _matrices(self._where)
        with torch.cuda.stream(self._stream):
            for _ in range(MATMULS):
                torch.mm(rows, weights, out=out)

    def record(self) -> TorchEvent:
        return TorchEvent(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()


@functools.cache
def _matrices(device: str) -> tuple[Any, Any, Any]:
    import torch

    def ones(rows: int) -> Any:
        return torch.ones(rows, WIDTH, dtype=torch.bfloat16, device=device)

    made = ones(ROWS), ones(WIDTH), ones(ROWS)
    torch.cuda.synchronize(device)
    return made
