"""What the ladder climbs: a model of each family, and the servers it is played on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.serve.server import DTYPE_BYTES
from bench.serve.tiny_model import GPT_OSS, GRANITE, LLAMA, QWEN3_NEXT, ModelShape, make_model
from tests.server.altered import transfer_config
from tests.server.mamba2_cpu import plugin_path

MAX_TOKENS = 2048  # of a context


@dataclass(frozen=True)
class Family:
    """`block`: tokens of a block as vLLM makes it; `num_groups`: KV groups, `layers` each;
    `others`: prompts of 1300 tokens that together need all of VRAM."""

    shape: ModelShape
    num_groups: int
    layers: int
    num_blocks: int
    num_slots: int
    others: int
    block: int = 32
    dtype: str = "float32"

    @property
    def slot_bytes(self) -> int:
        heads = 2 * self.shape.kv_heads * self.shape.head_dim
        return self.layers * self.block * heads * DTYPE_BYTES[self.dtype]

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float32"


# Where a CPU has products of bfloat16, vLLM keeps such states in float32 (platforms/cpu.py), and a
# block is as large as a state. It rounds more coarsely there, too: of 24 cold prompts stock vLLM
# parts from itself by more than the ladder's bound in two, so only hits say something.
_LARGE = torch.cpu._is_avx512_bf16_supported()

# VRAM bears two or three contexts at once, DRAM four to six.
FAMILIES = {
    "llama": Family(LLAMA, 1, 6, num_blocks=81, num_slots=101, others=2),
    "gpt_oss": Family(GPT_OSS, 2, 2, num_blocks=121, num_slots=151, others=3),
    "qwen3_next": Family(
        QWEN3_NEXT,
        num_groups=4,
        layers=1,
        num_blocks=35 if _LARGE else 49,
        num_slots=41 if _LARGE else 61,
        others=4 if _LARGE else 3,
        block=160 if _LARGE else 96,
        dtype="bfloat16",
    ),
    "mamba2": Family(GRANITE, 4, 1, num_blocks=49, num_slots=61, others=3, block=96),
}


def options(family: Family, folder: Path) -> dict[str, Any]:
    """Options of every server: the control's, too."""
    found: dict[str, Any] = {
        "num_blocks": family.num_blocks,
        "max_model_len": MAX_TOKENS,
        "dtype": family.dtype,
    }
    if family.shape.family == "granite_hybrid":
        found["env"] = {"PYTHONPATH": plugin_path(folder)}
    return found


def control_options(family: Family, folder: Path) -> dict[str, Any]:
    """No connector, and room for all it is asked at once. No prefix cache either where numbers are
    exact; elsewhere one in which nothing is found (player.py, ask_cold): with it vLLM ends the
    pieces of a prompt where a state is kept, and bfloat16 rounds by pieces."""
    found = options(family, folder) | {"num_blocks": 2 * family.num_blocks}
    prefix = "--no-enable-prefix-caching" if family.is_exact else "--enable-prefix-caching"
    return found | {"args": (prefix,)}


def connector_options(family: Family, folder: Path, checksum_every: int) -> dict[str, Any]:
    """With the connector, its faults and its switch; turns are pinned until a client says less."""
    keys: dict[str, Any] = {
        "policy": "fixed_ttl",
        "ttl_s": 3600,
        "max_ttl_s": 3600,
        "dram_bytes": family.num_slots * family.slot_bytes,
        "checksum_every": checksum_every,
        "switch_path": str(folder / "switch"),
    }
    found = options(family, folder)
    found["env"] = {**found.get("env", {}), "TEST_FAULT_FILE": str(folder / "fault")}
    return found | {"kv_transfer_config": transfer_config("faulty", keys)}


def model_of(family: Family) -> Path:
    return make_model(family.shape)
