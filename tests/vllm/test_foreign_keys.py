"""config.py knows what this vLLM's own offloading reads from its config, release by release.

Found in vLLM's sources: a key that a release adds, or a connector, turns this red until somebody
says what to write here instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vllm

from continuum_connector.config import KNOBS, OF_OFFLOADING, instead_of

VLLM = Path(vllm.__file__).parent
CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
OFFLOADING = (
    f"{CONNECTORS}/offloading",
    f"{CONNECTORS}/simple_cpu_offload_connector.py",
    "v1/kv_offload",
    "v1/simple_kv_offload",
)
# These bring KV to other machines, or are examples. Nobody who has one moves to ours: it may stay,
# behind ours in a MultiConnector. Our config refuses their keys without a word on them.
OTHERS = {
    *("decode_bench", "example", "example_hidden_states", "hf3fs", "lmcache", "lmcache_mp"),
    *("lmcache_integration", "mooncake", "moriio", "multi", "nixl", "umbp"),
}


def keys_in(source: str) -> Iterator[str]:
    """The keys that this source reads from a connector's extra config."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(key), *_])
                | ast.Subscript(value=owner, slice=ast.Constant(key))
            ) if "extra" in ast.unparse(owner):
                yield str(key)
            case ast.Call(
                func=ast.Attribute(attr="get_from_extra_config"), args=[ast.Constant(key), *_]
            ):
                yield str(key)


def keys_below(*places: str) -> dict[str, str]:
    """Each key that vLLM's files there read, and a file that does."""
    files = [
        file
        for place in places
        for file in ([VLLM / place] if place.endswith(".py") else (VLLM / place).rglob("*.py"))
        if file.exists()
    ]
    return {key: str(file.relative_to(VLLM)) for file in files for key in keys_in(file.read_text())}


def test_each_key_of_vllms_own_offloading_is_known() -> None:
    found = keys_below(*OFFLOADING)
    unknown = {key: file for key, file in found.items() if key not in {*OF_OFFLOADING, *KNOBS}}
    assert unknown == {}, "add them to OF_OFFLOADING in config.py"
    assert {"cpu_bytes_to_use", "spec_name", "eviction_policy"} <= set(found), "nothing was read"
    assert instead_of("cpu_bytes_to_use")


def test_each_other_connector_that_reads_keys_is_one_that_was_looked_at() -> None:
    of_ours = tuple(str(VLLM / place) for place in OFFLOADING)
    readers = {
        file.relative_to(VLLM / CONNECTORS).parts[0].removesuffix(".py").removesuffix("_connector")
        for file in (VLLM / CONNECTORS).rglob("*.py")
        if not str(file).startswith(of_ours) and any(keys_in(file.read_text()))
    }
    assert readers <= OTHERS, "does its user move to ours? then its keys belong in config.py"


def test_a_key_is_found_however_it_is_read() -> None:
    source = """
self.extra_config.get("one", 1)
config.kv_connector_extra_config["two"]
kv_transfer_config.get_from_extra_config(
    "three", None
)
other.get("four")
"""
    assert list(keys_in(source)) == ["one", "two", "three"]
