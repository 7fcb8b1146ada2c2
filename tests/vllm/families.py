"""The layers of the models that agents run, in vLLM's terms: each family's real shapes.

Read from the models' code (model_executor/models, models/) and their config.json; one GPU, 16-bit
KV. `block_size` is what vLLM chooses for them (platforms/interface.py, _align_hybrid_block_size).
Each family whose parsers `continuum check` knows (tools/checks/serving.py) has a model here.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM uses what is deprecated as it is imported
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowMLASpec,
        SlidingWindowSpec,
    )

    from tests.vllm import model_configs as configs
    from tests.vllm.kv_caches import indexer_spec

BF16, FP32 = torch.bfloat16, torch.float32
Layers = dict[str, Any]


class Family(NamedTuple):
    """`groups`: layers of each KV group, states first; `block_bytes`: of VRAM, over all layers.

    `model`: a public name, "" for a family whose parsers nobody names. `config`, `options`: what
    vLLM is asked about it; None: only another vLLM can build it."""

    name: str
    layers: Callable[[], Layers]
    groups: list[int]
    block_size: int
    block_bytes: int
    model: str = ""
    config: configs.Config | None = None
    options: str = ""


def make(kind: type, **fields: Any) -> Any:
    """A spec of this kind; a field that this vLLM calls otherwise, or lacks, is translated."""
    known = {field.name for field in dataclasses.fields(kind)}
    if "tokens_per_state" not in known and "tokens_per_state" in fields:  # vLLM <= 0.28
        fields["compress_ratio"] = fields.pop("tokens_per_state")
    return kind(**{name: value for name, value in fields.items() if name in known})


def full(block_size: int, heads: int, head_size: int) -> Any:
    return make(
        FullAttentionSpec,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=BF16,
    )


def window(block_size: int, heads: int, head_size: int, tokens: int) -> Any:
    return make(
        SlidingWindowSpec,
        block_size=block_size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=BF16,
        sliding_window=tokens,
    )


def latent(block_size: int) -> Any:
    return make(
        MLAAttentionSpec,
        block_size=block_size,
        num_kv_heads=1,
        head_size=576,
        dtype=BF16,
        cache_dtype_str="auto",
    )


def state(block_size: int, page: int, *parts: tuple[tuple[int, ...], Any]) -> Any:
    """`parts`: shape and type of each of a layer's states; `page`: bytes, with the padding."""
    return make(
        MambaSpec,
        block_size=block_size,
        shapes=tuple(shape for shape, _ in parts),
        dtypes=tuple(dtype for _, dtype in parts),
        page_size_padded=page,
        mamba_cache_mode="align",
    )


def _named(specs: list[Any]) -> Layers:
    return {f"model.layers.{i}.attn": spec for i, spec in enumerate(specs)}


def qwen3_next(dtype: Any = BF16, mtp: int = 0) -> Layers:
    """48 layers, every fourth full; `mtp`: layers of drafts behind them."""
    size = 544 if dtype == BF16 else 1056
    attention = full(size, 2, 256)
    gdn = state(size, attention.page_size_bytes, ((3, 8192), BF16), ((32, 128, 128), dtype))
    return _named([*[gdn, gdn, gdn, attention] * 12, *[attention] * mtp])


def nemotron_3_nano() -> Layers:
    attention = full(2096, 2, 128)
    mamba = state(2096, attention.page_size_bytes, ((3, 6144), BF16), ((64, 64, 128), FP32))
    return _named([mamba] * 23 + [attention] * 6)


def kimi_linear() -> Layers:
    mla = latent(1920)
    convs = [((3, 4096), BF16)] * 3
    kda = state(1920, mla.page_size_bytes, *convs, ((32, 128, 128), FP32))
    return _named([*[kda, kda, kda, mla] * 6, kda, kda, mla])


def gpt_oss() -> Layers:
    return _named([window(16, 8, 64, 128), full(16, 8, 64)] * 12)


def gemma3_27b() -> Layers:
    local = window(16, 16, 128, 1024)
    return _named([*[*[local] * 5, full(16, 16, 128)] * 10, local, local])


def v32() -> Layers:
    """DeepSeek V3.2 and GLM-5: beside each layer's MLA the keys of its indexer."""
    both = {"mla": latent(64), "index": indexer_spec(block_size=64)}
    return {f"model.layers.{i}.{name}": spec for i in range(61) for name, spec in both.items()}


def minimax_m3() -> Layers:
    """60 layers of grouped heads; all but the first three choose by an index of one head."""
    index = make(MLAAttentionSpec, block_size=128, num_kv_heads=1, head_size=128, dtype=BF16)
    attention = {f"model.layers.{i}.attn": full(128, 4, 128) for i in range(60)}
    return attention | {f"model.layers.{i}.index": index for i in range(3, 60)}


def llama4() -> Layers:
    """48 layers, three of four in chunks, which have groups of their own unless
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is 0."""
    chunk = make(
        ChunkedLocalAttentionSpec,
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        dtype=BF16,
        attention_chunk_size=8192,
    )
    return _named([chunk, chunk, chunk, full(16, 8, 128)] * 12)


def llama4_as_full() -> Layers:
    """The same beside EAGLE, for which vLLM turns its hybrid manager off."""
    return dict.fromkeys(llama4(), full(16, 8, 128))


def deepseek_v4() -> Layers:
    """Of 61 layers every other with 4 tokens in a state and an index, every other with 128; each
    with a window, and the windows of what is being compressed."""
    mla: dict[str, Any] = {"num_kv_heads": 1, "alignment": 576}
    packed = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}
    row = mla | packed | {"dtype": torch.uint8, "head_size": 512, "state_content_bytes": 584}
    found: Layers = {}
    for i in range(61):
        ratio, name = (4, 128)[i % 2], f"model.layers.{i}"
        found[f"{name}.attn"] = make(
            MLAAttentionSpec, **row, block_size=256, tokens_per_state=ratio
        )
        found[f"{name}.swa"] = make(SlidingWindowMLASpec, **row, block_size=64, sliding_window=128)
        found[f"{name}.compressor"] = _compressor(ratio, 512, mla)
        if ratio == 4:
            found[f"{name}.index"] = make(
                MLAAttentionSpec,
                **mla,
                block_size=256,
                tokens_per_state=4,
                head_size=132,
                dtype=torch.uint8,
            )
            found[f"{name}.index.compressor"] = _compressor(4, 128, mla)
    return found


def _compressor(ratio: int, head_dim: int, mla: dict[str, Any]) -> Any:
    """Keys and scores of the tokens that are not yet a state (models/deepseek_v4/compressor.py)."""
    overlap = 2 if ratio == 4 else 1
    return make(
        SlidingWindowMLASpec,
        **mla,
        block_size={4: 4, 128: 8}[ratio],
        head_size=2 * overlap * head_dim,
        dtype=FP32,
        sliding_window=overlap * ratio,
    )


FLOAT32 = "--mamba-ssm-cache-dtype float32"
NEXT = ("Qwen/Qwen3-Next-80B-A3B-Instruct", configs.QWEN3_NEXT)
NANO = ("nvidia/Nemotron-3-Nano-30B-A3B", configs.NEMOTRON_3_NANO)
GPT_OSS = ("openai/gpt-oss-20b", configs.GPT_OSS_20B)
V32 = ("deepseek-ai/DeepSeek-V3.2", configs.DEEPSEEK_V32)
SCOUT = ("meta-llama/Llama-4-Scout-17B-16E-Instruct", configs.LLAMA4_SCOUT)
# Rows of docs/models.md.
FAMILIES = [
    Family("Qwen3-Next", qwen3_next, [12, 12, 12, 12], 544, 13_369_344, *NEXT),
    Family(
        "Qwen3-Next, float32", lambda: qwen3_next(FP32), [12] * 4, 1056, 25_952_256, *NEXT, FLOAT32
    ),
    Family("Qwen3-Next, MTP", lambda: qwen3_next(FP32, mtp=1), [12, 12, 12, 13], 1056, 28_114_944),
    Family("Nemotron-3-Nano", nemotron_3_nano, [6, 6, 6, 5, 6], 2096, 12_877_824, *NANO),
    Family(
        *("Kimi-Linear", kimi_linear, [7, 7, 6, 7], 1920, 15_482_880, "", configs.KIMI_LINEAR),
    ),
    Family("gpt-oss-20b", gpt_oss, [12, 12], 16, 393_216, *GPT_OSS),
    Family("Gemma3-27B", gemma3_27b, [9, 9, 9, 9, 8, 8, 10], 16, 1_310_720, "", configs.GEMMA3_27B),
    Family("DeepSeek V3.2", v32, [122], 64, 5_012_736, *V32),
    Family("MiniMax M3", minimax_m3, [117], 128, 17_596_416),
    Family("Llama 4", llama4, [12] * 4, 16, 786_432, *SCOUT),
    Family("Llama 4, EAGLE", llama4_as_full, [48], 16, 3_145_728),
]
V4 = Family(
    "DeepSeek V4", deepseek_v4, [92, 31, 30, 62, 30], 256, 1_480_320, "deepseek-ai/DeepSeek-V4"
)


def _alike(model: str, config: configs.Config, num: int, spec: Any) -> Family:
    """A model whose layers are all alike, so that they are one group."""
    block_bytes = num * spec.page_size_bytes
    return Family(model, lambda: _named([spec] * num), [num], 16, block_bytes, model, config)


def _every(number: int, times: int, rare: Any, other: Any) -> Callable[[], Layers]:
    return lambda: _named([*[other] * (number - 1), rare] * times)


def _granite4() -> Layers:
    attention = full(400, 4, 128)
    parts = ((3, 3328), BF16), ((48, 64, 128), BF16)
    return _every(10, 4, attention, state(400, attention.page_size_bytes, *parts))()


def _qwen3_5() -> Layers:
    attention = full(1056, 2, 256)
    parts = ((3, 8192), BF16), ((32, 128, 128), FP32)
    return _every(4, 10, attention, state(1056, attention.page_size_bytes, *parts))()


LLAMA, MLA = full(16, 8, 128), latent(16)
# The other families whose parsers are known.
OTHERS = [
    _alike("Qwen/Qwen3-Coder-30B-A3B-Instruct", configs.QWEN3_CODER, 48, full(16, 4, 128)),
    _alike("Qwen/QwQ-32B", configs.QWQ, 64, LLAMA),
    _alike("Qwen/Qwen2.5-7B-Instruct", configs.QWEN2, 28, full(16, 4, 128)),
    _alike("NousResearch/Hermes-3-Llama-3.1-8B", configs.LLAMA_8B, 32, LLAMA),
    _alike("meta-llama/Llama-3.1-8B-Instruct", configs.LLAMA_8B, 32, LLAMA),
    _alike("zai-org/GLM-4.7", configs.GLM4_MOE, 92, LLAMA),
    _alike("zai-org/GLM-4.5", configs.GLM4_MOE, 92, LLAMA),
    _alike("moonshotai/Kimi-K2-Instruct", configs.KIMI_K2, 61, MLA),
    _alike("MiniMaxAI/MiniMax-M2", configs.MINIMAX_M2, 62, LLAMA),
    _alike("deepseek-ai/DeepSeek-V3.1", configs.DEEPSEEK_V3, 61, MLA),
    _alike("deepseek-ai/DeepSeek-R1", configs.DEEPSEEK_V3, 61, MLA),
    _alike("deepseek-ai/DeepSeek-V3", configs.DEEPSEEK_V3, 61, MLA),
    _alike("mistralai/Devstral-Small-2507", configs.DEVSTRAL, 40, LLAMA),
    _alike("ibm-granite/granite-3.3-8b-instruct", configs.GRANITE3, 40, LLAMA),
    _alike("ByteDance-Seed/Seed-OSS-36B-Instruct", configs.SEED_OSS, 64, LLAMA),
    _alike("microsoft/Phi-4-mini-instruct", configs.PHI4_MINI, 32, LLAMA),
    Family(
        *("Qwen3.5", _qwen3_5, [10] * 4, 1056, 21_626_880),
        *("Qwen/Qwen3.5-35B-A3B", configs.QWEN3_5),
    ),
    Family(
        "Gemma 4",
        _every(6, 5, full(16, 2, 512), window(16, 8, 256, 1024)),
        [*[2] * 12, 1, 5],
        *(16, 327_680, "google/gemma-4-26B-A4B-it", configs.GEMMA4),
    ),
    Family(
        *("Granite 4", _granite4, [4] * 10, 400, 3_276_800),
        *("ibm-granite/granite-4.0-h-tiny", configs.GRANITE4),
    ),
    Family(
        *("Olmo 3", _every(4, 16, LLAMA, window(16, 8, 128, 4096)), [16] * 4, 16, 1_048_576),
        *("allenai/Olmo-3-32B-Think", configs.OLMO3),
    ),
]


def abridged(layers: Layers, number: int) -> Layers:
    """The first layers of each spec, for what is really allocated."""
    seen: Counter[Any] = Counter()
    kept: Layers = {}
    for name, spec in layers.items():
        seen[spec] += 1
        if seen[spec] <= number:
            kept[name] = spec
    return kept
