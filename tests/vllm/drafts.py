"""Servers with drafts, as far as their caches go: which KV groups drafts read, what is dropped."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import pytest
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from bench.sim import versions

HAS_FLAGS = "is_eagle_group" in {field.name for field in dataclasses.fields(KVCacheGroupSpec)}
# vLLM 0.26 takes a chunk that ends amid a block for one that ends with it: with drafts its prefix
# cache finds a wrong state behind it, with or without a connector (docs/models.md).
HAS_RIGHT_STATES = "prefill_end" in inspect.getsource(Scheduler._mamba_block_aligned_split)


def drafts_read(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """In engines made from here on drafts read the KV of `group`: each lookup drops a block of it.

    vLLM 0.27.1 and 0.33 drop only if the scheduler says that drafts run, which it reads off a
    config that needs a draft model.
    """
    if not HAS_FLAGS:
        pytest.skip("this vLLM does not say whose groups drafts read")
    build, start_cache, start = versions.cache_of, KVCacheManager.__init__, Scheduler.__init__

    def with_flag(*args: Any, **kwargs: Any) -> Any:
        built = build(*args, **kwargs)
        built.kv_cache_groups[group].is_eagle_group = True
        return built

    @functools.wraps(start_cache)
    def cache_with_drafts(self: KVCacheManager, *args: Any, **kwargs: Any) -> None:
        start_cache(self, *args, **{**kwargs, "use_eagle": True})

    @functools.wraps(start)
    def with_drafts(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if hasattr(self, "use_eagle_block_drop"):
            self.use_eagle_block_drop = True

    monkeypatch.setattr(versions, "cache_of", with_flag)
    monkeypatch.setattr(KVCacheManager, "__init__", cache_with_drafts)
    monkeypatch.setattr(Scheduler, "__init__", with_drafts)
