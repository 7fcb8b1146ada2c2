"""What a run stands on: GPU, model, PCIe, and how long a step takes there. Published figures; what
was fitted says so."""

from __future__ import annotations

from dataclasses import dataclass, replace

from continuum_connector.costs import Work

GB = 10**9
UTILIZATION = 0.9  # of the GPU's memory, as vLLM has it
SEQUENCE_S = 20e-6  # of a step for each of its requests: sampling, input preparation


@dataclass(frozen=True)
class Gpu:
    """One GPU. `flops`: peak dense bf16 per second; `mfu`: share of it that a prefill reaches.

    `memory_rate`, `pcie_rate` (one way, or both together): bytes per second.
    `step_s`: what a step takes beside its computation. `mfu` and `step_s` were fitted, see
    README.md (validation); all else is data sheets and the published sweep.
    """

    name: str
    memory_bytes: float
    flops: float
    memory_rate: float
    pcie_rate: float
    mfu: float
    step_s: float
    chunk: int  # vLLM's default max_num_batched_tokens there
    max_num_seqs: int


GEN4, GEN5 = 25 * GB, 55 * GB
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("L40S", 48 * GB, 362e12, 864e9, GEN4, 0.48, 6e-3, 2048, 256),
        Gpu("A100-40", 40 * GB, 312e12, 1555e9, GEN4, 0.68, 6e-3, 2048, 256),
        Gpu("A100-80", 80 * GB, 312e12, 1935e9, GEN4, 0.68, 6e-3, 2048, 256),
        Gpu("H100", 80 * GB, 989e12, 3350e9, GEN5, 0.63, 4e-3, 8192, 1024),
        Gpu("H200", 141 * GB, 989e12, 4800e9, GEN5, 0.63, 4e-3, 8192, 1024),
        # Never fitted: as the H100, for want of a published sweep on it.
        Gpu("B200", 180 * GB, 2250e12, 8000e9, GEN5, 0.63, 4e-3, 8192, 1024),
    )
}


@dataclass(frozen=True)
class Experts:
    """Weights of which a token reads a share. `num_bytes`: of all experts; `share`: of them that
    one token chooses."""

    num_bytes: float
    share: float


@dataclass(frozen=True)
class States:
    """What layers without attention remember: a state, as large behind one token as behind all.

    `num_groups`: of such layers, each of which has a KV group; `num_bytes`: of one group's state;
    `block_size`: tokens of every block, so many that vLLM's blocks can hold a state.
    """

    num_groups: int
    num_bytes: int
    block_size: int


@dataclass(frozen=True)
class Model:
    """One model. `token_flops`: of the matrix products of a token; `pair_flops`: of attention
    for one token and one before it; `token_bytes`: K and V of a token, all layers.

    `flops_factor`: how much faster than in bf16 its matrix products are; attention is bf16. The
    two of fp8 are for GPUs with fp8 units, which an A100 has not.

    `num_drafts`: tokens that its MTP layer guesses per step. They change which blocks are kept
    and hit; no step is made shorter or longer by them.
    """

    name: str
    weight_bytes: float
    token_flops: float
    pair_flops: float
    token_bytes: int
    flops_factor: float = 1.0
    experts: Experts | None = None
    states: States | None = None
    num_drafts: int = 0

    def bytes_read(self, num_tokens: int) -> float:
        """Of its weights, by a step that computes so many tokens."""
        if self.experts is None:
            return self.weight_bytes
        unread = (1 - self.experts.share) ** num_tokens
        return self.weight_bytes - self.experts.num_bytes * unread


# Qwen3-Next-80B-A3B in fp8, by its config.json: 12 layers with 16 heads and 2 KV heads of 256, 36
# with states; a token's products go through 10 of 512 experts and a shared one per layer. Blocks
# and states as vLLM 0.32 lays them out on one GPU, both in bf16. flops_factor: fitted to one
# published number, 20.4 s to the first token of a prompt of 256 K on an H200; README.md.
_QWEN3_NEXT = Model(
    *("qwen3-next-80b-fp8", 80e9, 2 * 3.25e9, 4 * 12 * 16 * 256, 12 * 2048),
    flops_factor=0.29,
    experts=Experts(48 * 512 * 3 * 2048 * 512, 10 / 512),
    states=States(num_groups=3, num_bytes=12 * 1_097_728, block_size=544),
)
MODELS = {
    model.name: model
    for model in (
        # 2 * (8.03e9 - embedding - LM head); 4 * layers * heads * head size
        Model("llama-8b", 16.06e9, 13.96e9, 4 * 32 * 32 * 128, 131_072),
        Model("llama-70b-fp8", 70.6e9, 2 * 68.5e9, 4 * 80 * 64 * 128, 327_680, 2.0),
        # DeepSeek-V2-Lite: 2.4e9 active parameters, latent of 512 + 64 in bf16 per layer
        Model("mla-16b", 31.4e9, 2 * 2.2e9, 4 * 27 * 16 * 192, 27 * 576 * 2),
        _QWEN3_NEXT,
        # with its MTP layer, the thirteenth that has K and V
        replace(_QWEN3_NEXT, name="qwen3-next-80b-fp8-mtp", token_bytes=13 * 2048, num_drafts=2),
    )
}

# Tokens of KV that the published sweep counted with Llama 3.1 8B (its section 1, table 2).
PUBLISHED_KV_TOKENS = {"L40S": 208_000, "A100-40": 139_000, "H100": 434_000, "H200": 868_000}


@dataclass(frozen=True)
class Drive:
    """A disk for what leaves DRAM: its size, bytes per second that it reads and writes alone."""

    num_bytes: int
    reads: float
    writes: float


@dataclass(frozen=True)
class Machine:
    """A server with one GPU.

    `kv_tokens`: that fit into VRAM; of a model with states, the tokens that full attention alone
    would have room for. `dram_bytes`: for offloaded blocks.
    `max_num_seqs`, `chunk`: vLLM's limits of a step. `reserve_full_isl`: vLLM admits a turn only
    if all of its prompt fits (its default since 0.15); older ones did not ask. `drive`: a disk.
    """

    gpu: Gpu
    model: Model
    kv_tokens: int
    dram_bytes: int
    block_size: int = 64
    reserve_full_isl: bool = True
    drive: Drive | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of VRAM, vLLM's null block included."""
        return self.kv_tokens // self.block_size + 1

    @property
    def block_bytes(self) -> int:
        """Of a block of any group: all are padded to the largest."""
        return self.block_size * self.model.token_bytes

    @property
    def reuse_unit(self) -> int:
        """Tokens in which a perfect memory counts: blocks of 64 and less are as good as tokens."""
        return self.block_size if self.model.states else 1

    def held_tokens(self, num_tokens: int) -> int:
        """Tokens' worth of memory that a context of so many takes, its states included."""
        states = self.model.states
        return num_tokens + (states.num_groups * self.block_size if states else 0)


def machine(
    gpu: str = "H100",
    model: str = "llama-8b",
    *,
    dram_gb: float = 400.0,
    kv_tokens: int | None = None,
    pcie_gb_s: float | None = None,
    block_size: int | None = None,
    reserve_full_isl: bool = True,
    step_s: float | None = None,
    disk_gb: float = 0.0,
    disk_gb_s: float = 7.0,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> Machine:
    """Return a server by names. Raises KeyError for unknown ones, ValueError if nothing fits.

    Without `kv_tokens`: what the published sweep counted, else what nine tenths of the memory leave
    beside the weights and 4 GB of activations. `pcie_gb_s`, `step_s`, `max_num_batched_tokens` and
    `max_num_seqs` replace the GPU's own.
    Without `block_size`: what a model with states needs, else 64. `disk_gb_s`: that a drive of
    `disk_gb`, 0 for none, reads; it writes half as fast.
    """
    one, what = GPUS[gpu], MODELS[model]
    if block_size is None:
        block_size = what.states.block_size if what.states else 64
    if pcie_gb_s is not None:
        one = replace(one, pcie_rate=pcie_gb_s * GB)
    if step_s is not None:
        one = replace(one, step_s=step_s)
    if max_num_batched_tokens is not None:  # with fewer tokens than sequences no vLLM starts
        most = min(one.max_num_seqs, max_num_batched_tokens)
        one = replace(one, chunk=max_num_batched_tokens, max_num_seqs=most)
    if max_num_seqs is not None:
        one = replace(one, max_num_seqs=max_num_seqs)
    if one.max_num_seqs > one.chunk:
        raise ValueError(
            f"max_num_batched_tokens {one.chunk} is below max_num_seqs {one.max_num_seqs}, with "
            "which vLLM does not start; raise the one or lower the other"
        )
    if kv_tokens is None and model == "llama-8b":
        kv_tokens = PUBLISHED_KV_TOKENS.get(gpu)
    if kv_tokens is None:
        room = one.memory_bytes * UTILIZATION - 4 * GB - what.weight_bytes
        kv_tokens = int(room / what.token_bytes)
    if kv_tokens < 2 * block_size:
        raise ValueError(
            f"{model} leaves no room for KV on {gpu}, so nothing could be served; take a larger GPU"
        )
    dram_bytes = int(dram_gb * GB)
    rate = disk_gb_s * GB
    drive = Drive(int(disk_gb * GB), rate, rate / 2) if disk_gb else None
    return Machine(one, what, kv_tokens, dram_bytes, block_size, reserve_full_isl, drive)


def step_seconds(machine: Machine, work: Work) -> float:
    """Seconds of a step that computes `work`: a roofline with a fitted share of the peak.

    Matrix products overlap with reading the weights; attention over prompts and the KV reads of
    decodes come on top.
    """
    gpu, model = machine.gpu, machine.model
    flops, memory = gpu.flops * gpu.mfu, gpu.memory_rate
    num_tokens = work.num_new + work.num_decodes
    product_s = num_tokens * model.token_flops / (flops * model.flops_factor)
    products = max(product_s, model.bytes_read(num_tokens) / memory)
    attention = (work.pairs + work.decode_context) * model.pair_flops / flops
    # A decode reads and writes all of its states; a prefill's are few beside its products.
    states = model.states.num_groups * model.states.num_bytes if model.states else 0
    state_bytes = 2 * work.num_decodes * states
    reads = (work.decode_context * model.token_bytes + state_bytes) / memory
    num_requests = work.num_decodes + (1 if work.num_new else 0)
    return gpu.step_s + SEQUENCE_S * num_requests + products + attention + reads
