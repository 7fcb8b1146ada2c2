"""config.json of the models in families.py and of others: kinds that are read wrongly, too.

The models' own files, without what no layer of KV depends on.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
BERT: Config = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "torch_dtype": "float32",
}
TINY: Config = LLAMA_8B | {"num_hidden_layers": 2}
QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
NEMOTRON_3_NANO: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
    "max_position_embeddings": 262144,
    "vocab_size": 131072,
    "torch_dtype": "bfloat16",
}
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "sliding_window": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
    "vocab_size": 201088,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": []},
}
GEMMA3_27B: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "query_pre_attn_scalar": 168,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V32: Config = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 163840,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
LLAMA4_SCOUT: Config = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 48,
    "attention_chunk_size": 8192,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "max_position_embeddings": 131072,
    "vocab_size": 202048,
    "torch_dtype": "bfloat16",
}
FALCON_7B: Config = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "alibi": False,
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_kv_heads": 71,
    "num_hidden_layers": 32,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
FALCON_H1: Config = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "head_dim": 64,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "mamba_chunk_size": 128,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
    "vocab_size": 32784,
}
MISTRAL: Config = LLAMA_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
}
NOBODYS: Config = LLAMA_8B | {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}


def _like(name: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> Config:
    """A decoder that differs from Llama in numbers; `name`: model_type and class."""
    model_type, _, architecture = name.partition(" ")
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    named = {"model_type": model_type, "architectures": [f"{architecture}ForCausalLM"]}
    return LLAMA_8B | named | shape | {"num_key_value_heads": kv_heads} | more


_EXPERTS: Config = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_ROUTED: Config = {
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "hidden_act": "silu",
}
QWEN3_CODER = _like("qwen3_moe Qwen3Moe", 48, 32, 4, 2048, head_dim=128, **_EXPERTS)
QWEN2 = _like("qwen2 Qwen2", 28, 28, 4, 3584)
QWQ = _like("qwen2 Qwen2", 64, 40, 8, 5120)
GLM4_MOE = _like("glm4_moe Glm4Moe", 92, 96, 8, 5120, head_dim=128, rms_norm_eps=1e-5, **_ROUTED)
MINIMAX_M2 = _like(
    *("minimax_m2 MiniMaxM2", 62, 48, 8, 3072),
    head_dim=128,
    rotary_dim=64,
    rms_norm_eps=1e-6,
    num_local_experts=256,
    num_experts_per_tok=8,
    use_qk_norm=True,
    use_routing_bias=True,
    scoring_func="sigmoid",
)
DEVSTRAL = _like("mistral Mistral", 40, 32, 8, 5120, head_dim=128, sliding_window=None)
GRANITE3 = _like("granite Granite", 40, 32, 8, 4096)
SEED_OSS = _like("seed_oss SeedOss", 64, 80, 8, 5120, head_dim=128)
PHI4_MINI = _like("phi3 Phi3", 32, 24, 8, 3072, vocab_size=200064, pad_token_id=0)
OLMO3 = _like(
    *("olmo3 Olmo3", 64, 40, 8, 5120),
    sliding_window=4096,
    layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
)
DEEPSEEK_V3: Config = {
    **{key: value for key, value in DEEPSEEK_V32.items() if not key.startswith("index")},
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
}
KIMI_K2: Config = DEEPSEEK_V3 | {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "model_type": "kimi_k2",
}
DEEPSEEK_V4: Config = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "hidden_size": 7168,
    "head_dim": 512,
    "vocab_size": 129280,
    "torch_dtype": "bfloat16",
}
GEMMA4: Config = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "sliding_window": 1024,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "max_position_embeddings": 262144,
    "vocab_size": 262144,
    "torch_dtype": "bfloat16",
}
# As transformers 5 writes it, where no part is set for pictures.
GEMMA4_BARE: Config = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": GEMMA4,
    "vision_config": None,
    "audio_config": None,
    "torch_dtype": "bfloat16",
}
GRANITE4 = _like(
    *("granitemoehybrid GraniteMoeHybrid", 40, 12, 4, 1536),
    intermediate_size=512,
    num_local_experts=64,
    num_experts_per_tok=6,
    mamba_chunk_size=256,
    mamba_d_conv=4,
    mamba_d_head=64,
    mamba_d_state=128,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_n_heads=48,
    shared_intermediate_size=1024,
    position_embedding_type="nope",
    layer_types=[*["mamba"] * 9, "attention"] * 4,
)
QWEN3_5: Config = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{key: value for key, value in QWEN3_NEXT.items() if key != "architectures"},
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "vocab_size": 248320,
        "mamba_ssm_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    },
    "vision_config": {
        "model_type": "qwen3_5_moe",
        "depth": 27,
        "num_heads": 16,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "num_position_embeddings": 2304,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "deepstack_visual_indexes": [],
    },
}
KIMI_LINEAR: Config = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "head_dim": 72,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "mla_use_nope": True,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
    "routed_scaling_factor": 2.446,
    "rope_theta": 10000.0,
    "model_max_length": 1048576,
    "vocab_size": 163840,
    "torch_dtype": "bfloat16",
}
MINIMAX_M3 = MINIMAX_M2 | {
    "architectures": ["MiniMaxM3ForCausalLM"],
    "model_type": "minimax_m3",
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "sparse_attention_config": {"use_sparse_attention": True, "sparse_index_dim": 128},
}
JAMBA = _like(
    *("jamba Jamba", 32, 32, 8, 4096),
    attn_layer_offset=4,
    attn_layer_period=8,
    vocab_size=65536,
    expert_layer_offset=1,
    expert_layer_period=2,
    num_experts=16,
    mamba_d_conv=4,
    mamba_d_state=16,
    mamba_dt_rank=256,
    mamba_expand=2,
    num_experts_per_tok=2,
)
NEMOTRON_H: Config = {
    **{key: value for key, value in NEMOTRON_3_NANO.items() if "mamba_ssm" not in key},
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
}
QWEN2_5_VL = QWEN2 | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
MLLAMA: Config = {
    "architectures": ["MllamaForConditionalGeneration"],
    "model_type": "mllama",
    "text_config": LLAMA_8B
    | {
        "model_type": "mllama_text_model",
        "num_hidden_layers": 40,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "vision_config": {"model_type": "mllama_vision_model"},
    "torch_dtype": "bfloat16",
}
