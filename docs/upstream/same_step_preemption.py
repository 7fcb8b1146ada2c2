"""[Bug]: prefix cache hits on KV that was never computed (priority policy, chunked prefill)

Schedule with `--scheduling-policy priority` and prefix caching. A request gets a chunk of its
prompt in a step; in the same step a request of higher priority finds no free block, and the first
one is preempted. `Scheduler.schedule` takes the victim out of the step's output again, so nothing
of the chunk is computed. But `allocate_slots` has already put the chunk's full blocks into the
prefix cache (`cache_blocks`), and `_preempt_request` frees them with their hashes. The victim, or
anybody else with the same prompt, then hits them and reads whatever they held before.

Expected: what the scheduler takes out of a step is not found in the prefix cache.

Smallest mend: where the victim is in `scheduled_running_reqs`, evict the blocks that hold tokens
from `num_computed_tokens` on before they are freed:

    first = preempted_req.num_computed_tokens // self.block_size
    for blocks in self.kv_cache_manager.get_block_ids(preempted_req.request_id):
        self.kv_cache_manager.evict_blocks(set(blocks[first:]))

This script runs vLLM's own Scheduler, without a model or a GPU. Exit code 1: the fault is there;
0: it is mended.
"""

import dataclasses
import json
import sys
import tempfile
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


def play(scheduler, num_urgent):
    """A long prompt, and a request of higher priority with `num_urgent` prompt tokens that outgrows
    the pool. Return (tokens that vLLM takes for computed, tokens that were) of the first request
    that is resumed with too many; None if none is."""
    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(BLOCK, hash_fn)

    def add(name, tokens, max_tokens, priority):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, tokens, params, None, priority=priority, block_hasher=hasher)
        scheduler.add_request(request)

    computed = {}  # by request: how far its KV has ever been computed
    add("long", list(range(1000, 1320)), 4, priority=1)
    for number in range(200):
        if number == 1:
            add("urgent", list(range(5000, 5000 + num_urgent)), 40, priority=0)
        if not scheduler.has_requests():
            return None
        step = scheduler.schedule()
        cached = step.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for name, num_tokens in step.num_scheduled_tokens.items():
            if starts[name] > computed.get(name, 0):
                return starts[name], computed.get(name, 0)
            end = starts[name] + num_tokens
            computed[name] = max(end, computed.get(name, 0))
            sampled.append([7] if end >= scheduler.requests[name].num_tokens else [])
        names = list(step.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        output = ModelRunnerOutput(names, places, sampled_token_ids=sampled)
        scheduler.update_from_output(step, output)
    return None


def main():
    with tempfile.TemporaryDirectory() as folder:
        config = configure(
            folder,
            is_async=False,
            policy="priority",
            max_num_batched_tokens=128,
            long_prefill_token_threshold=64,
        )
        for num_urgent in range(33, 49):  # in which step it needs one block more, releases differ
            found = play(build(config, num_blocks=24), num_urgent)
            if found is not None:
                claimed, computed = found
                print(
                    f"vLLM {vllm.__version__}: the fault is there: a preempted request is resumed "
                    f"with {claimed} tokens taken for computed, and only {computed} ever were"
                )
                return 1
    print(f"vLLM {vllm.__version__}: mended: nothing is hit that was not computed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
