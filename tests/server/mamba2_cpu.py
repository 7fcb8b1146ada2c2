"""Lets vLLM's CPU build serve Mamba2 with prefix caching: a plugin of vLLM, for tests alone.

vLLM wants the state of a block's end from inside a prefill (MambaMixer2.get_kv_cache_spec), and
its scan for CPUs gives the last one only, so the prefill ends with an IndexError. Without that
wish the scheduler ends a prefill's chunks at block ends, as it does for gated delta nets.
"""

from __future__ import annotations

import os
from pathlib import Path


def plugin_path(folder: Path) -> str:
    """PYTHONPATH of a server whose every process is patched; `folder` gets what vLLM finds."""
    found = folder / "mamba2_cpu-0.dist-info"
    found.mkdir(exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: mamba2_cpu\nVersion: 0\n")
    entry = f"[vllm.general_plugins]\nmamba2_cpu = {__name__}:patch\n"
    (found / "entry_points.txt").write_text(entry)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def patch() -> None:
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec
