"""What people paste into `continuum check` and ask of `continuum size`, and what is true of it.

`{NAME}` in a text is a folder with that model's config.json (tests/vllm/model_configs.py),
`{tiers}` a config with both tiers, `{yaml}` a file of options.
"""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, ERROR, UNSEEN, ABSENT = "ok", "warning", "error", "not seen", ""


class Case(NamedTuple):
    """`wants`: a line's subject -> its verdict, and after a colon a part of it; "": no line."""

    name: str
    text: str
    wants: dict[str, str]


class Sized(NamedTuple):
    """`num_bytes`: KV of 16,000 tokens within a tenth; None: it must say that it is not seen."""

    name: str
    words: str
    num_bytes: int | None


YAML = """no-enable-prefix-caching: true
tensor-parallel-size: 2
kv-transfer-config: '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'
"""
LLAMA = {"command": ABSENT, "model": "ok:128.0 KiB per token"}
BOTH = {**LLAMA, "options": ABSENT, "DRAM tier": ABSENT, "disk tier": ABSENT}
NO_DISK = {**LLAMA, "DRAM tier": ABSENT, "disk tier": ERROR}
MULTI = (
    '\'{"kv_connector":"MultiConnector","kv_role":"kv_both","kv_connector_extra_config":'
    '{"connectors":[{"kv_connector":"ContinuumConnector","kv_role":"kv_both"},'
    '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}]}}\''
)
COMPOSE = """services:
  vllm:
    image: vllm/vllm-openai:latest
    command: --model {LLAMA_8B} --tensor-parallel-size 2 --kv-transfer-config {tiers}
    ports: ["8000:8000"]
    environment: [HF_TOKEN=x]
"""
MANIFEST = """apiVersion: apps/v1
kind: Deployment
metadata:
  name: llm
spec:
  template:
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:latest
        %s
        ports:
        - containerPort: 8000
"""
BY_ARGS = 'args: ["--model", "{LLAMA_8B}", "-tp", "2"]'
BY_SHELL = 'command: ["sh", "-c"]\n        args: ["exec vllm serve {LLAMA_8B} -tp 2"]'
STATES = "vllm serve {QWEN3_NEXT} --kv-transfer-config {tiers}"
MTP = "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2"

CASES = [
    Case("plain", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers}", BOTH),
    Case(
        "docker.cmd",
        "docker run --gpus all -p 8000:8000 --ipc=host -v ~/.cache/huggingface:/models "
        "vllm/vllm-openai:latest --model Qwen/Qwen3-8B --tensor-parallel-size 2",
        {"command": ABSENT, "options": ABSENT, "model": UNSEEN},
    ),
    Case("docker, folder", "docker run -it vllm/vllm-openai --model {LLAMA_8B}", LLAMA),
    Case(
        "docker, its own entry point",
        "docker run --rm --entrypoint bash vllm/vllm-openai -c 'vllm serve {LLAMA_8B}'",
        LLAMA,
    ),
    Case("docker, a module", "docker run img python3 -m vllm.entrypoints.openai.api_server "
         "--model {LLAMA_8B}", LLAMA),
    Case("bash -c", 'bash -c "export A=1 && vllm serve {LLAMA_8B} > log 2>&1 &"', LLAMA),
    Case("tmux", "tmux new -d -s x 'vllm serve {LLAMA_8B} --port 80'", LLAMA),
    Case("a script", "#!/bin/sh\n# serve\nMODEL={LLAMA_8B}\nvllm serve $MODEL # here", LLAMA),
    Case("a comment", "vllm serve {LLAMA_8B} --port 80  # the default", LLAMA),
    Case("$PORT", "vllm serve {LLAMA_8B} --port $PORT", {**LLAMA, "options": UNSEEN}),
    Case("${TP:-2}", "vllm serve {LLAMA_8B} -tp ${TP:-2}", {**LLAMA, "options": UNSEEN}),
    Case("$(nproc)", "vllm serve {LLAMA_8B} -tp $(nproc)", {**LLAMA, "options": UNSEEN}),
    Case("compose", COMPOSE, BOTH),
    Case("manifest, args", MANIFEST % BY_ARGS, LLAMA),
    Case("manifest, sh -c", MANIFEST % BY_SHELL, LLAMA),
    Case("helm template", "---\n# Source: a/b.yaml\n" + MANIFEST % BY_ARGS, LLAMA),
    Case("args", 'args:\n  - "--model"\n  - "{LLAMA_8B}"\n', LLAMA),
    Case("options", "--model {LLAMA_8B} -tp 2", LLAMA),
    Case("systemd", "[Service]\nExecStart=/usr/bin/vllm serve {LLAMA_8B}\nRestart=always", LLAMA),
    Case("two servers", "vllm serve {LLAMA_8B} &\nvllm serve {FALCON_7B}", {"command": UNSEEN}),
    Case("no server", "sleep 1", {"command": ERROR}),
    Case("bench", "vllm bench serve --model {LLAMA_8B}", {"command": ERROR}),
    Case("--config", "vllm serve {LLAMA_8B} --config {yaml}",
         {"prefix caching": ERROR, "config": ERROR}),
    Case("ngram, short", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} --spec-method ngram "
         "--spec-tokens 3", NO_DISK),
    Case("ngram, dotted", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} "
         "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
         NO_DISK),
    Case("ngram, -sc.", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} -sc.method ngram "
         "-sc.num_speculative_tokens 3", NO_DISK),
    Case("ngram, JSON", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} --speculative-config "
         '\'{"method":"ngram","num_speculative_tokens":3}\'', NO_DISK),
    Case("LoRA", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} --enable-lora", NO_DISK),
    Case("stages", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} -pp 2", NO_DISK),
    Case("MTP beside states", f"{STATES} {MTP}", {"DRAM tier": ABSENT, "disk tier": ERROR}),
    Case("MTP, retention", f"{STATES} {MTP} --prefix-cache-retention-interval 1056",
         {"DRAM tier": "error:retention"}),
    Case("MTP, runner V1", f"VLLM_USE_V2_MODEL_RUNNER=0 {STATES} {MTP}", {"DRAM tier": ERROR}),
    Case("hybrid beside LMCache", f"vllm serve {{GEMMA3_27B}} --kv-transfer-config {MULTI}",
         {"model": "ok:496.0 KiB per token"}),
    Case("hybrid", "vllm serve {GEMMA3_27B}", {"model": "ok:52 layers with a window of 1,024"}),
    Case("Llama 4", "vllm serve {LLAMA4_SCOUT}", {"model": "ok:36 layers in chunks of 8,192"}),
    Case("overrides", "vllm serve {LLAMA_8B} --hf-overrides '{\"num_hidden_layers\": 4}'",
         {"model": "ok:16.0 KiB per token"}),
    Case("pooling", "vllm serve {LLAMA_8B} --runner pooling", {"model": ERROR}),
    Case("an encoder", "vllm serve {BERT}", {"model": "error:the runner is pooling"}),
    Case("blocks of states", "vllm serve {FALCON_H1} --block-size 4096",
         {"model": "ok:blocks of 4,096 tokens"}),
    Case("falcon-h1", "vllm serve {FALCON_H1}", {"model": "ok:blocks of 800 tokens"}),
    Case("falcon-7b", "vllm serve {FALCON_7B}", {"model": "ok:8.0 KiB per token"}),
    Case("heads", "vllm serve {FALCON_7B} -tp 3", {"options": ERROR}),
    Case("nvfp4", "vllm serve {LLAMA_8B} --kv-transfer-config {tiers} --kv-cache-dtype nvfp4",
         {"DRAM tier": ERROR}),
    Case("a typo", "vllm serve {LLAMA_8B} --tensor-paralel-size 2", {"options": ERROR}),
    Case("an abbreviation", "vllm serve {LLAMA_8B} --no-enable-prefix", {"prefix caching": ERROR}),
    Case("nobody's", "vllm serve {NOBODYS}", {"model": UNSEEN}),
    Case("context ranks", "vllm serve {LLAMA_8B} -tp 16 -dcp 2", {"model": ERROR}),
]  # fmt: skip
SIZES = [
    Sized("llama", "--model {LLAMA_8B}", 16_000 * 131_072),
    Sized("falcon-7b", "--model {FALCON_7B}", 16_000 * 8_192),
    Sized("falcon-h1", "--model {FALCON_H1}", 21 * 14_745_600),
    Sized("minimax-m3", "--model {MINIMAX_M3}", None),
    Sized("MiniMax M2", "--model {MINIMAX_M2}", 1000 * 62 * 65_536),
    Sized("Qwen3.5", "--model {QWEN3_5}", (16 + 3) * 21_626_880),
    Sized("Gemma 4, transformers 5", "--model {GEMMA4_BARE}", None),
    Sized("Nemotron 3", "--model {NEMOTRON_3_NANO}", (8 + 4) * 12_877_824),
    Sized("Nemotron-H", "--model {NEMOTRON_H}", (16 + 6) * 17_039_360),
    Sized("DeepSeek V3.2", "--model {DEEPSEEK_V32}", 250 * 5_012_736),
    Sized("DeepSeek V3", "--model {DEEPSEEK_V3}", 1000 * 61 * 16 * 1152),
    Sized("DeepSeek V4", "--model {DEEPSEEK_V4}", None),
    Sized("gpt-oss", "--model {GPT_OSS_20B}", (8 + 1000) * 393_216),
    Sized("Kimi-Linear", "--model {KIMI_LINEAR}", (9 + 3) * 15_482_880),
    Sized("Jamba", "--model {JAMBA}", (200 + 7) * 1_310_720),
    Sized("Granite 4", "--model {GRANITE4}", (40 + 9) * 3_276_800),
    Sized("Olmo 3", "--model {OLMO3}", (3 * 256 + 1000) * 1_048_576),
    Sized("Qwen2.5-VL", "--model {QWEN2_5_VL}", 1000 * 917_504),
    Sized("Mllama", "--model {MLLAMA}", None),
    Sized("Gemma 3", "--model {GEMMA3_27B}", (6 * 64 + 1000) * 1_310_720),
    Sized("Qwen3-Next", "--model {QWEN3_NEXT}", (30 + 3) * 13_369_344),
]
