"""What a run stands on: GPU, model, PCIe. Published figures; what was fitted says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Gpu:
    """One GPU. `flops`: peak dense bf16 per second; `mfu`: share of it that a prefill reaches.

    `memory_rate`, `pcie_rate` (one way), `pcie_both` (both ways together): bytes per second.
    `step_s`: what a step takes beside its computation. `mfu` and `step_s` were fitted, see
    README.md (validation); all else is data sheets and the published sweep.
    """

    name: str
    memory_bytes: float
    flops: float
    memory_rate: float
    pcie_rate: float
    pcie_both: float
    mfu: float
    step_s: float
    chunk: int  # vLLM's default max_num_batched_tokens there
    max_num_seqs: int


GEN4, GEN5 = 25 * GB, 55 * GB
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("L40S", 48 * GB, 362e12, 864e9, GEN4, GEN4, 0.48, 6e-3, 2048, 256),
        Gpu("A100-40", 40 * GB, 312e12, 1555e9, GEN4, GEN4, 0.68, 6e-3, 2048, 256),
        Gpu("A100-80", 80 * GB, 312e12, 1935e9, GEN4, GEN4, 0.68, 6e-3, 2048, 256),
        Gpu("H100", 80 * GB, 989e12, 3350e9, GEN5, GEN5, 0.63, 4e-3, 8192, 1024),
        Gpu("H200", 141 * GB, 989e12, 4800e9, GEN5, GEN5, 0.63, 4e-3, 8192, 1024),
        # Never fitted: as the H100, for want of a published sweep on it.
        Gpu("B200", 180 * GB, 2250e12, 8000e9, GEN5, GEN5, 0.63, 4e-3, 8192, 1024),
    )
}


@dataclass(frozen=True)
class Model:
    """One model. `token_flops`: of the matrix products of a token; `pair_flops`: of attention
    for one token and one before it; `token_bytes`: K and V of a token, all layers and ranks.

    `flops_factor`: how much faster than in bf16 its matrix products are; attention is bf16. The
    two of fp8 are for GPUs with fp8 units, which an A100 has not.
    """

    name: str
    weight_bytes: float
    token_flops: float
    pair_flops: float
    token_bytes: int
    flops_factor: float = 1.0


MODELS = {
    model.name: model
    for model in (
        # 2 * (8.03e9 - embedding - LM head); 4 * layers * heads * head size
        Model("llama-8b", 16.06e9, 13.96e9, 4 * 32 * 32 * 128, 131_072),
        Model("llama-70b-fp8", 70.6e9, 2 * 68.5e9, 4 * 80 * 64 * 128, 327_680, 2.0),
        # DeepSeek-V2-Lite: 2.4e9 active parameters, latent of 512 + 64 in bf16 per layer
        Model("mla-16b", 31.4e9, 2 * 2.2e9, 4 * 27 * 16 * 192, 27 * 576 * 2),
    )
}

# Tokens of KV that the published sweep counted with Llama 3.1 8B (its section 1, table 2).
PUBLISHED_KV_TOKENS = {"L40S": 208_000, "A100-40": 139_000, "H100": 434_000, "H200": 868_000}


@dataclass(frozen=True)
class Machine:
    """A server: `tp` GPUs that share a model's weights, KV and work, each with its own PCIe.

    `kv_tokens`: that fit into VRAM. `dram_bytes`: for offloaded blocks, all ranks together.
    `max_num_seqs`, `chunk`: vLLM's limits of a step. `reserve_full_isl`: vLLM admits a turn only
    if all of its prompt fits (its default since 0.15); older ones did not ask.
    """

    gpu: Gpu
    model: Model
    kv_tokens: int
    dram_bytes: int
    tp: int = 1
    block_size: int = 64
    reserve_full_isl: bool = True

    @property
    def pcie_rate(self) -> float:
        """Bytes per second one way, over all ranks."""
        return self.gpu.pcie_rate * self.tp

    @property
    def pcie_both(self) -> float:
        """Bytes per second of both ways together, over all ranks."""
        return self.gpu.pcie_both * self.tp

    @property
    def num_blocks(self) -> int:
        """Blocks of VRAM, vLLM's null block included."""
        return self.kv_tokens // self.block_size + 1

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.model.token_bytes


def machine(
    gpu: str = "H100",
    model: str = "llama-8b",
    *,
    dram_gb: float = 400.0,
    tp: int = 1,
    kv_tokens: int | None = None,
    pcie_gb_s: float | None = None,
    utilization: float = 0.9,
    block_size: int = 64,
    reserve_full_isl: bool = True,
    mfu: float | None = None,
    step_s: float | None = None,
) -> Machine:
    """Return a server by names. Raises KeyError for unknown ones, ValueError if nothing fits.

    Without `kv_tokens`: what the published sweep counted, else what `utilization` of the memory
    leaves beside the weights and 4 GB of activations. `pcie_gb_s`, `mfu` and `step_s` replace the
    GPU's own.
    """
    one, what = GPUS[gpu], MODELS[model]
    if pcie_gb_s is not None:
        one = replace(one, pcie_rate=pcie_gb_s * GB, pcie_both=pcie_gb_s * GB)
    one = replace(
        one,
        mfu=one.mfu if mfu is None else mfu,
        step_s=one.step_s if step_s is None else step_s,
    )
    if kv_tokens is None and tp == 1 and model == "llama-8b":
        kv_tokens = PUBLISHED_KV_TOKENS.get(gpu)
    if kv_tokens is None:
        room = tp * (one.memory_bytes * utilization - 4 * GB) - what.weight_bytes
        kv_tokens = int(room / what.token_bytes)
    if kv_tokens < 2 * block_size:
        raise ValueError(
            f"{model} leaves no room for KV on {tp} x {gpu}, so nothing could be served; raise tp"
        )
    dram_bytes = int(dram_gb * GB)
    return Machine(one, what, kv_tokens, dram_bytes, tp, block_size, reserve_full_isl)
