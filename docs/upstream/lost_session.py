"""[Bug]: a streaming session is lost if it is preempted while its last token is in flight

A streaming session (a resumable request) with async scheduling. The step that samples the last
token of an answer is in flight; the next step preempts the session for its blocks. When the token
arrives, the answer is over: `_handle_stopped_request` puts the session, which waits for its
client's next input, into the waiting queue, where it already is. After the loop
`update_from_output` removes every request that stopped while preempted from that queue, and the
session with it. Two things follow:

1. Its next input finds it in `requests`, changes its status and queues nothing. It never answers
   again, and its client waits for ever.
2. `num_waiting_for_streaming_input` still counts it, but no queue has it, so
   `get_num_unfinished_requests` is one too few. If only one other request runs, the engine takes
   itself for idle and does not step until something else arrives.

Expected: it answers its next input, and the others go on.

Smallest mend, as in 0.33: enqueue what continues after that removal, not before it.

    continuing_reqs.append(request)  # instead of _enqueue_waiting_request in the loop
    ...
    for request in continuing_reqs:  # after remove_requests(stopped_preempted_reqs)
        self._enqueue_waiting_request(request)

This script runs vLLM's own AsyncScheduler, without a model or a GPU. Exit code 1: the fault is
there; 0: it is mended; 2: no session was preempted at that moment, so this release cannot tell.
"""

import dataclasses
import json
import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 16  # tokens
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def configure(folder, is_async, **options):
    """Return the config of a server whose model is a config.json only."""
    (Path(folder) / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=folder, skip_tokenizer_init=True, max_model_len=4096),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_model_len=4096, is_encoder_decoder=False, max_num_seqs=8, **options
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.scheduler_config.async_scheduling = is_async  # the CPU platform turns it off
    return config


def build(config, num_blocks):
    """Do what EngineCore.__init__ does; one of the blocks is the null block."""
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    size = num_blocks * page
    if "shared_by" in {field.name for field in dataclasses.fields(KVCacheTensor)}:  # <= 0.28
        tensor = KVCacheTensor(size=size, shared_by=["layer"])
    else:
        tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=page)
    cache = KVCacheConfig(
        num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
    )


class Engine:
    """EngineCore's loop with two batches in flight: the one before is read after the next began."""

    def __init__(self, scheduler):
        self.scheduler, self.in_flight, self.answers = scheduler, deque(), {}
        hash_fn = get_hash_fn_by_name("sha256")
        init_none_hash(hash_fn)
        self.hasher = get_request_block_hasher(BLOCK, hash_fn)

    def add(self, name, tokens, max_tokens, **fields):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, tokens, params, None, block_hasher=self.hasher, **fields)
        self.scheduler.add_request(request)
        return self.scheduler.requests[name]

    def step(self):
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            sampled = []
            for name in step.num_scheduled_tokens:
                request = self.scheduler.requests[name]
                sampled.append([7] if request.num_computed_tokens >= request.num_tokens else [])
            names = list(step.num_scheduled_tokens)
            places = {name: place for place, name in enumerate(names)}
            self.in_flight.append((step, ModelRunnerOutput(names, places, sampled)))
        if len(self.in_flight) > 1 or (self.in_flight and not self.scheduler.has_requests()):
            batches = self.scheduler.update_from_output(*self.in_flight.popleft())
            for batch in batches.values():
                for output in batch.outputs:
                    so_far = self.answers.setdefault(output.request_id, [])
                    so_far += output.new_token_ids


def play(scheduler, num_other):
    """A session whose answer is one token, beside another request with `num_other` prompt tokens
    that needs its blocks. Return whether the engine took itself for idle while that one ran, and
    how many tokens the session answers to its next input; None if it was not preempted with its
    token in flight."""
    engine = Engine(scheduler)
    engine.add("other", list(range(5000, 5000 + num_other)), 40)
    engine.step()
    engine.step()
    session = engine.add("session", list(range(1000, 1080)), 1, resumable=True)
    while "session" not in engine.answers and scheduler.has_requests():
        engine.step()
    if not session.num_preemptions:
        return None
    for _ in range(60):
        engine.step()
    is_idle = len(engine.answers["other"]) < 40
    engine.add("session", list(range(2000, 2010)), 4, resumable=True)
    for _ in range(60):
        engine.step()
    return is_idle, len(engine.answers["session"]) - 1


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = configure(folder, is_async=True, max_num_batched_tokens=512)
        # In which step the other needs one block more, releases may differ.
        asked = [play(build(config, num_blocks=9), num_other) for num_other in range(33, 49)]
    found = [each for each in asked if each is not None]
    if not found:
        print(f"vLLM {vllm.__version__}: no session was preempted with its last token in flight")
        return 2
    lost = [each for each in found if not each[1]]
    if lost:
        idle = ", and the engine is idle while another runs" if any(i for i, _ in lost) else ""
        print(
            f"vLLM {vllm.__version__}: the fault is there: a session that was preempted with its "
            f"last token in flight never answers its next input{idle}"
        )
        return 1
    print(f"vLLM {vllm.__version__}: mended: such a session answers its next input")
    return 0


if __name__ == "__main__":
    sys.exit(main())
