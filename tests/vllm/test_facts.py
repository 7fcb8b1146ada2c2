"""What vLLM's config says of the bytes of a KV block, and of where the weights came from."""

from __future__ import annotations

import copy
import json
import os
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from bench.sim import versions
from continuum_connector.vllm import facts

# Where a backend puts things in a block; what is quantized; which kernels run.
SWITCHES = {
    **dict.fromkeys(("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_MLA_DISABLE"), "1"),
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    **dict.fromkeys(("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG"), "{}"),
    "VLLM_MARLIN_INPUT_DTYPE": "fp8",
    "VLLM_CPU_INT4_W4A8": "0",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    **dict.fromkeys(("VLLM_BATCH_INVARIANT", "VLLM_DEEPEPLL_NVFP4_DISPATCH"), "1"),
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
}
HAS_FIXED_SEED = hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    made = versions.vllm_config(block_size=16)
    made.model_config.hf_config = copy.deepcopy(made.model_config.hf_config)
    return made


def test_two_configs_of_one_server_have_the_same_facts_and_json_takes_them(config: Any) -> None:
    one, other = (
        json.dumps(facts.facts(each), sort_keys=True, default=str)
        for each in (config, versions.vllm_config(block_size=16))
    )
    assert one == other
    assert " at 0x" not in one, "an address in it would differ at each start"


def test_every_fact_matters(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: Any
) -> None:
    """Each is changed alone, where vLLM or the machine has it: then it is another fact, and no
    fact is without such a change."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    layer = SimpleNamespace(get_attn_backend=lambda: type("Backend", (), {}))
    dists = [SimpleNamespace(dist=SimpleNamespace(name="their-models", version="1.0"))]
    code = tmp_path / "transformers_modules" / "someone" / "modeling.py"
    code.parent.mkdir(parents=True)
    code.write_text("def forward(): ...")
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", str(tmp_path))
    sizes = [f"{each}_parallel_size" for each in ("tensor", "pipeline", "decode_context")]
    changes: dict[str, list[tuple[Any, str, Any]]] = {
        "vllm": [(vllm, "__version__", "9.9.9")],
        "torch": [(torch, "__version__", "9.9.9")],
        "transformers": [(transformers, "__version__", "9.9.9")],
        "packages": [(facts, "_version", lambda name: name if name == "pillow" else None)],
        "plugins": [(metadata, "entry_points", lambda group: dists)],
        "device": [(type(current_platform), "get_device_name", lambda *_: "another")],
        "model": [(model.hf_config, "rope_theta", 1234.0)],
        "code": [(model, "code_revision", "another"), (model, "trust_remote_code", True)],
        "model_config": [(model, each, "another") for each in facts._MODEL],
        "dtype": [(model, "dtype", "float64")],
        "quantization": [(model, "quantization", "fp8")],
        "max_model_len": [(model, "max_model_len", 77)],
        "loader": [(config.load_config, each, "mistral") for each in facts._LOADER],
        "impl": [(model, "model_impl", "terratorch")],
        "mm_processor": [
            (model, "multimodal_config", SimpleNamespace(**{each: "another"}))
            for each in facts._EMBEDDINGS
        ],
        "cache": [(cache, "cache_dtype", "fp8"), (cache, "block_size", 77)],
        "states": [(cache, each, "another") for each in facts._STATES],
        "skips": [(cache, "kv_cache_dtype_skip_layers", ["0"])],
        "hash": [(cache, "prefix_caching_hash_algo", "sha256_cbor")],
        "ranks": [(parallel, each, 4) for each in sizes],
        "rank": [(parallel, "rank", 3)],
        "experts": [(parallel, each, "another") for each in facts._EXPERTS],
        "parts": [(config, each, "another") for each in facts._PARTS],
        "switches": [
            (os, "environ", {**os.environ, name: said}) for name, said in SWITCHES.items()
        ],
        "backends": [(config.compilation_config, "static_forward_context", {"layer.0": layer})],
        "environment": [
            (os, "environ", {**os.environ, each: "another"}) for each in facts.ENVIRONMENT
        ],
    }
    known = facts.facts(config)
    assert set(changes) == set(known)
    for fact, ways in changes.items():
        for part, field, value in ways:
            with subtests.test(fact=fact, field=field), monkeypatch.context() as patches:
                before = getattr(part, field, None)
                patches.setattr(part, field, value, raising=False)
                assert facts.facts(config)[fact] != known[fact]
                assert getattr(part, field, None) != before
    assert facts.facts(config) == known, "each change was undone"


def test_a_place_that_a_pod_gets_anew_is_no_fact(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts.facts(config)
    monkeypatch.setenv("VLLM_P2P_SIDE_CHANNEL_HOST", "10.0.0.7")
    assert facts.facts(config) == known


def test_code_that_a_model_brings_is_a_fact_wherever_it_was_fetched_from(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' folder may name code of another repository: `auto_map: someone/other--x.X`."""
    monkeypatch.setattr("transformers.utils.hub.HF_MODULES_CACHE", str(tmp_path))
    code = tmp_path / "transformers_modules" / "someone" / "other" / "abc" / "modeling_x.py"
    code.parent.mkdir(parents=True)
    code.write_text("def forward(): ...")
    assert facts.facts(config)["code"][1] is None, "this model brings no code"
    config.model_config.hf_config.auto_map = {"AutoModelForCausalLM": "someone/other--modeling_x.X"}
    known = facts.facts(config)["code"]
    assert facts.facts(config)["code"] == known
    code.write_text("def forward(): return 1")
    changed = facts.facts(config)["code"]
    assert changed != known
    code.unlink()
    code.symlink_to(tmp_path / "gone")  # what cannot be read is never the same
    assert facts.facts(config)["code"] != facts.facts(config)["code"]


def test_a_package_that_is_not_there_is_told_from_one_that_is(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "PACKAGES", ("pytest", "no-such-package"))
    assert facts.facts(config)["packages"] == [pytest.__version__, None]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("media_io_kwargs", {"video": {"num_frames": 40}}),
        ("mm_encoder_attn_dtype", "fp8"),
        ("mm_encoder_fp8_scale_path", "scales.json"),
    ],
)
def test_what_decides_how_an_image_is_embedded_is_a_fact(
    config: Any, field: str, value: object
) -> None:
    """A client may name an image itself; then nothing else of it is in the hashes."""
    object.__setattr__(config.model_config, "multimodal_config", SimpleNamespace())
    known = facts.facts(config)
    setattr(config.model_config.multimodal_config, field, value)
    assert facts.facts(config) != known


def test_an_order_of_bytes_that_only_the_environment_names_is_a_fact(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = facts.facts(config)
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    assert facts.facts(config) != known


def test_what_a_backend_is_called_is_a_fact(config: Any) -> None:
    class Backend:
        pass

    layer = SimpleNamespace(get_attn_backend=lambda: Backend)
    config.compilation_config.static_forward_context["layer.0"] = layer
    [name] = facts.facts(config)["backends"]
    assert name.endswith("Backend")


def why_unproven(config: Any) -> str:
    try:
        facts.checkpoint(config)
    except facts.UnprovenError as error:
        return str(error)
    return ""


def test_hashes_that_are_drawn_anew_at_each_start_are_told(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts.hash_seed(config) == "0"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert (facts.hash_seed(config) is not None) == HAS_FIXED_SEED
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert facts.hash_seed(config) is None
    assert "set PYTHONHASHSEED=0" in why_unproven(config)


def test_vllm_draws_its_first_hash_as_we_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal twice where there is a seed, and else two different ones."""
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"", raising=False)

    def drawn(algo: str) -> set[bytes]:
        found = set()
        for _ in range(2):
            kv_cache_utils.init_none_hash(get_hash_fn_by_name(algo))
            found.add(bytes(kv_cache_utils.NONE_HASH))
        return found

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert len(drawn("sha256")) == (1 if HAS_FIXED_SEED else 2)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(drawn("sha256")) == 1


def test_a_folder_of_weights_is_where_they_were_read_and_this_process_is_older(
    config: Any, tmp_path: Path
) -> None:
    config.model_config.model = str(tmp_path)
    found = facts.checkpoint(config)
    assert (found.folder, found.has_other_formats) == (str(tmp_path), False)
    assert time.time() - 24 * 3600 < found.since <= time.time() + 1.0
    config.load_config.load_format = "pt"
    assert facts.checkpoint(config).has_other_formats


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("load_config", "load_format", "dummy"), "load_format dummy leaves no file"),
        (("load_config", "load_format", "runai_streamer"), "load_format runai_streamer leaves"),
        (("load_config", "load_format", "my_own"), "load_format my_own leaves no file"),
        (("model_config", "quantization", "fp8"), "quantization fp8 is worked out while"),
        (("cache_config", "calculate_kv_scales", True), "the scales of the KV cache are worked"),
        (
            ("model_config", "model", "nobody/no-such-model"),
            "'nobody/no-such-model' were not found",
        ),
        (("model_config", "model", "no such: model"), "'no such: model' were not found"),
        (("model_config", "model_weights", "s3://bucket/model"), "weights from an object store"),
    ],
)
def test_weights_that_no_file_proves_the_same_are_told(
    config: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str, Any],
    says: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config.model_config.model = str(tmp_path)
    part, field, value = change
    object.__setattr__(getattr(config, part), field, value)
    assert says in why_unproven(config)


@pytest.fixture
def cached(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of the Hugging Face cache, by its name; the file that says which revision is main."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repository = tmp_path / "models--somebody--llm"
    for commit in ("a" * 40, "b" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "model.safetensors").write_text(commit)
    main = repository / "refs" / "main"
    main.parent.mkdir()
    main.write_text("a" * 40)
    config.model_config.model = "somebody/llm"
    config.load_config.download_dir = str(tmp_path)
    return main


def test_a_model_of_the_cache_is_read_where_its_revision_lies(config: Any, cached: Path) -> None:
    found = facts.checkpoint(config)
    assert Path(found.folder).name == "a" * 40
    config.model_config.revision = "b" * 40
    assert Path(facts.checkpoint(config).folder).name == "b" * 40


def test_a_branch_that_moved_since_the_model_was_loaded_proves_nothing(
    config: Any, cached: Path
) -> None:
    config.model_config.hf_config._commit_hash = "a" * 40
    assert why_unproven(config) == ""
    cached.write_text("b" * 40)
    assert "'somebody/llm' became another revision" in why_unproven(config)
    config.model_config.revision = "a" * 40
    assert why_unproven(config) == ""


def test_a_model_from_elsewhere_than_the_hugging_face_cache_is_not_proven_by_its_namesake(
    config: Any, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    assert "'somebody/llm' were not found" in why_unproven(config)


def test_a_part_from_another_repository_is_told(config: Any, tmp_path: Path) -> None:
    config.model_config.model = str(tmp_path)
    config.model_config.hf_config.text_model_id = "somebody/llm"
    assert "loaded from another repository" in why_unproven(config)


def test_a_checkpoint_that_is_quantized_as_it_lies_there_is_read_from_files(
    config: Any, tmp_path: Path
) -> None:
    config.model_config.model = str(tmp_path)
    config.model_config.quantization = "fp8"
    config.model_config.hf_config.quantization_config = {"quant_method": "fp8"}
    assert why_unproven(config) == ""
