"""Every line of `continuum check`, where all is well and where it is not."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.tools.checks import Line, Verdict, worst
from continuum_connector.tools.checks.plan import Plan, read_plan
from continuum_connector.tools.checks.serving import MIDDLEWARES
from continuum_connector.tools.cli.check import look
from continuum_connector.vllm.proven import why_aside
from tests.unit import fake_machine as fake
from tests.unit.fake_machine import BRIDGE, CUDA, GIB, H100, PCI, VLLM
from tests.vllm.model_configs import LLAMA_8B

LLAMA = {key: LLAMA_8B[key] for key in LLAMA_8B if key != "torch_dtype"} | {"dtype": "bfloat16"}
OK, WARNING, ERROR, UNSEEN = Verdict.OK, Verdict.WARNING, Verdict.ERROR, Verdict.UNSEEN


POD = "KUBERNETES_SERVICE_HOST"
SHARE = "policy adaptive, a DRAM tier of a share of the node"
ON_CPU: dict[str, Any] = {"vllm": {**VLLM, "platform": "cpu"}, "cuda": {}}


def plan(*words: str, model: dict[str, Any] | None = None, root: Path | None = None, **extra: Any):
    """A plan for a Llama with a DRAM tier of 64 GiB."""
    given = [*words]
    if root is not None:
        (root / "model").mkdir(exist_ok=True)
        (root / "model/config.json").write_text(json.dumps(model or LLAMA))
        given += ["--model", str(root / "model")]
    config = {"dram_bytes": "64GiB", **extra}
    transfer = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = config
    return read_plan([*given, "--kv-transfer-config", json.dumps(transfer)], {})


def one(machine: Any, served: Plan, subject: str) -> Line:
    return fake.one(machine, served, subject)


def test_a_server_where_all_is_well_has_only_ok_lines(tmp_path: Path) -> None:
    lines = list(look(fake.make(tmp_path), plan(root=tmp_path, trace_path="/proc/trace")))
    fake.none_but_ok(lines)
    assert worst(lines) is OK
    said = {line.subject: line.text for line in lines}
    assert said["model"] == (
        "LlamaForCausalLM is served: 32 layers of full attention; 128.0 KiB per token, by "
        "config.json alone"
    )
    assert said["config"] == "policy adaptive, a DRAM tier of 64.0 GiB"
    assert said["KV layout"].startswith("BLHNC is asked for")
    assert said["GPU"] == "1 GPU: NVIDIA H100 80GB HBM3 (80.0 GiB)"
    assert said["PCIe link"] == "GPU 0: x16 at 32 GT/s, 63 GB/s a way"
    assert said["driver"] == "driver 570.86.15, CUDA 12.8: many copies in one call"
    assert said["DRAM"] == (
        "the machine has 200.0 GiB available and keeps 5.1 GiB; 64.0 GiB wanted"
    )
    assert said["native library"] == "loads (ABI 4) and copies over CUDA"
    assert all(not line.cure for line in lines)


def test_variables_of_another_connector_are_a_hint_where_it_is_not_named(tmp_path: Path) -> None:
    left = {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_CHUNK_SIZE": "256"}
    machine = fake.make(tmp_path, environ=left)
    line = one(machine, plan(), "environment")
    assert line.verdict is WARNING
    assert line.text.startswith("LMCACHE_CHUNK_SIZE and 1 more set another KV connector")
    simple = replace(machine, environ={"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"})
    assert one(simple, plan(), "environment").text.startswith("VLLM_USE_SIMPLE_KV_OFFLOAD set")
    both = [{"kv_connector": name} for name in ("ContinuumConnector", "LMCacheMPConnector")]
    transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = {"connectors": both}
    behind = read_plan(["--kv-transfer-config", json.dumps(transfer)], {})
    for other, served in ((machine, behind), (replace(machine, environ={"A": "1"}), plan())):
        assert "environment" not in {line.subject for line in look(other, served)}


def test_an_allocator_that_vllm_refuses_beside_a_connector_is_an_error(tmp_path: Path) -> None:
    setting = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
    machine = fake.make(tmp_path, environ=setting)
    line = one(machine, plan(), "environment")
    assert line.verdict is ERROR
    assert "vLLM stops at start" in line.text
    for flag in ("--enable-cumem-allocator", "--enable-sleep-mode"):
        subjects = {line.subject for line in look(machine, plan(flag))}
        assert "environment" not in subjects


def test_a_bare_machine_says_what_it_could_not_see(tmp_path: Path) -> None:
    machine = fake.make(
        tmp_path,
        dict.fromkeys(fake.FILES),
        vllm={},
        cuda={"trouble": "libcuda.so.1: cannot open shared object file"},
        plugins={"continuum": "x"},
    )
    lines = list(look(machine, plan()))
    unseen = {line.subject for line in lines if line.verdict is UNSEEN}
    assert unseen == {
        *("plugin", "KV layout", "model", "GPU", "NUMA", "DRAM"),
        "native library",
    }
    assert worst(line for line in lines if line.subject != "vLLM") is UNSEEN, "that is not ok"


# --- vLLM and plugin ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("vllm", "verdict", "part"),
    [
        ({"version": "0.26.0"}, OK, "within"),
        ({"version": "0.29.1.dev3+g12"}, OK, "within"),
        ({"version": "0.33.0+cpu"}, OK, "within"),
        ({"version": "0.25.1"}, ERROR, "older"),
        ({"version": "0.34.0"}, WARNING, "newer"),
        ({"version": "1.0.0"}, WARNING, "newer"),
        ({"version": "0.34.0"}, WARNING, "it has every name that we touch"),
        ({"version": "0.34.0", "lacks": ["vLLM 0.34.0 lacks A.b"]}, WARNING, "lacks A.b (tested"),
        ({"version": "0.34.0", "lacks_all": "vLLM 0.34.0 lacks A.b"}, ERROR, "lacks A.b (tested"),
        ({"version": "0.25.1", "lacks_all": "vLLM 0.25.1 lacks A.b"}, ERROR, "older"),
        ({"trouble": "ImportError: libtorch.so"}, ERROR, "libtorch.so"),
    ],
)
def test_vllm(tmp_path: Path, vllm: dict[str, Any], verdict: Verdict, part: str) -> None:
    line = one(fake.make(tmp_path, vllm={**VLLM, **vllm}), plan(), "vLLM")
    assert line.verdict is verdict
    assert part in line.text
    assert bool(line.cure) is (verdict is not OK)


def test_vllm_that_is_not_installed_is_an_error(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path, vllm={}), plan(), "vLLM")
    assert line.verdict is ERROR
    assert "the Python that runs the server" in line.cure


@pytest.mark.parametrize(
    ("fields", "part", "cure"),
    [
        ({"plugins": {}}, "entry point is not installed", "pip install"),
        ({"environ": {"VLLM_PLUGINS": "a,b"}}, "VLLM_PLUGINS=a,b", "VLLM_PLUGINS=a,b,continuum"),
        ({"environ": {"VLLM_PLUGINS": ""}}, "keeps ours", "VLLM_PLUGINS=continuum"),
        ({"vllm": {**VLLM, "plugin_trouble": "KeyError: x"}}, "KeyError: x", "report"),
    ],
)
def test_a_plugin_that_would_not_load(
    tmp_path: Path, fields: dict[str, Any], part: str, cure: str
) -> None:
    line = one(fake.make(tmp_path, **fields), plan(), "plugin")
    assert line.verdict is ERROR
    assert part in line.text
    assert cure in line.cure


def test_vllm_plugins_that_names_us_loads_us(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, environ={"VLLM_PLUGINS": "other,continuum"})
    assert one(machine, plan(), "plugin").verdict is OK


# --- config -------------------------------------------------------------------------------
def transfer(**fields: Any) -> list[str]:
    return ["--kv-transfer-config", json.dumps(fields)]


def multi(ours: dict[str, Any], **fields: Any) -> list[str]:
    children = [{"kv_connector": "ContinuumConnector", **ours}, {"kv_connector": "Other"}]
    extra = {"connectors": children}
    return transfer(kv_connector="MultiConnector", kv_connector_extra_config=extra, **fields)


@pytest.mark.parametrize(
    ("words", "environ", "verdict", "part"),
    [
        ([], {}, OK, "policy adaptive, a DRAM tier of a share of the node"),
        ([], {"CONTINUUM_DRAM_BYTES": "0"}, OK, "no DRAM tier (dram_bytes = 0); `continuum size`"),
        ([], {"CONTINUUM_DRAM_BYTES": "1GiB"}, OK, "a DRAM tier of 1.0 GiB"),
        ([], {"CONTINUUM_DRAM_BYTE": "1GiB"}, ERROR, "did you mean `CONTINUUM_DRAM_BYTES`?"),
        (transfer(kv_connector="LMCacheConnectorV1"), {}, ERROR, "'LMCacheConnectorV1'"),
        (transfer(kv_connector="ContinuumConnector"), {}, OK, SHARE),
        (transfer(kv_connector="ContinuumConnector", kv_role="kv_both"), {}, OK, SHARE),
        (
            transfer(kv_connector="ContinuumConnector", kv_role="kv_producer"),
            {},
            ERROR,
            "'kv_producer' stops the server",
        ),
        (multi({}, kv_role="kv_consumer"), {}, WARNING, "'kv_consumer'"),
        (multi({"kv_role": "kv_consumer"}, kv_role="kv_both"), {}, ERROR, "'kv_consumer' stops"),
        (["--kv-transfer-config", "{"], {}, ERROR, "--kv-transfer-config cannot be read"),
        (["--kv-transfer-config", "[]"], {}, ERROR, "no JSON object"),
        (
            transfer(
                kv_connector="ContinuumConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"dram_bytes": "64 gigs"},
            ),
            {},
            ERROR,
            "'64 gigs' is not a size",
        ),
    ],
)
def test_config(
    tmp_path: Path, words: list[str], environ: dict[str, str], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path), read_plan(words, environ), "config")
    assert line.verdict is verdict, line
    assert part in line.text
    assert bool(line.cure) is (verdict is not OK)


def test_we_are_found_inside_a_multi_connector(tmp_path: Path) -> None:
    words = multi({"kv_connector_extra_config": {"dram_bytes": "2GiB"}}, kv_role="kv_both")
    line = one(fake.make(tmp_path), read_plan(words, {}), "config")
    assert line == ("config", OK, "policy adaptive, a DRAM tier of 2.0 GiB", "")


def test_what_only_a_shell_knows_is_not_seen(tmp_path: Path) -> None:
    served = replace(plan(), unknown=("$PORT", "${TP:-2}"), others=("b",))
    line = one(fake.make(tmp_path), served, "options")
    assert line.verdict is UNSEEN
    assert line.text.startswith("$PORT, ${TP:-2}: only who runs it knows")
    line = one(fake.make(tmp_path / "b"), served, "command")
    assert (line.verdict, line.text) == (
        UNSEEN,
        "it starts 2 servers; all here is about the first",
    )


def test_a_default_of_vllm_is_not_judged_where_the_model_is_unknown(tmp_path: Path) -> None:
    served = replace(plan(), unknown=("$MODEL",), model="a/default", words=("--enforce-eager",))
    line = one(fake.make(tmp_path, **kv()), served, "model")
    assert line.verdict is UNSEEN
    assert line.text.startswith("only who runs it knows which")
    line = one(fake.make(tmp_path / "b", **kv()), replace(served, unknown=()), "model")
    assert line.verdict is OK


def test_a_path_in_a_container_is_not_called_missing(tmp_path: Path) -> None:
    served = replace(plan("--model", "/models/llama"), is_inside=True)
    line = one(fake.make(tmp_path), served, "model")
    assert line.verdict is UNSEEN
    assert "a path in the container" in line.text


def test_options_in_a_file_are_not_seen(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path), plan("--config", "serve.yaml"), "options")
    assert line.verdict is UNSEEN
    assert "serve.yaml is not read" in line.text


# --- how it is served ---------------------------------------------------------------------
def test_prefix_caching(tmp_path: Path) -> None:
    machine = fake.make(tmp_path)
    assert one(machine, plan("--enable-prefix-caching"), "prefix caching").verdict is OK
    line = one(machine, plan("--no-enable-prefix-caching"), "prefix caching")
    assert line.verdict is ERROR
    assert "steps aside: prefix caching is off" in line.text
    assert line.cure == "serve with --enable-prefix-caching"


@pytest.mark.parametrize(
    ("words", "extra", "verdict", "part", "cure"),
    [
        ([], {}, OK, "program order", ""),
        ([], {"max_head_start_s": 0}, OK, "vLLM's own order", ""),
        (["--scheduler-cls", "continuum_connector.scheduler_cls"], {}, OK, "ours", ""),
        (
            ["--scheduler-cls", "mine.Own"],
            {},
            ERROR,
            "the connector steps aside: --scheduler-cls mine.Own is not ours",
            "leave --scheduler-cls out",
        ),
    ],
)
def test_scheduler(
    tmp_path: Path, words: list[str], extra: dict[str, Any], verdict: Verdict, part: str, cure: str
) -> None:
    line = one(fake.make(tmp_path), plan(*words, **extra), "scheduler")
    assert (line.verdict, line.cure) == (verdict, cure)
    assert part in line.text


def kv(**fields: Any) -> dict[str, Any]:
    """A vLLM that makes this KV cache."""
    return {"vllm": {**VLLM, "kv": {**fake.KV, **fields}}}


WINDOWS: dict[str, Any] = {
    "layers": [["SlidingWindowSpec", 1024, 24], ["FullAttentionSpec", None, 8]],
    "groups": [["SlidingWindowSpec", 16, 1024]] * 3 + [["FullAttentionSpec", 16, None]],
    "block_bytes": 8 * 16 * 4096,
    "no_disk": "no disk tier for KV groups with windows",
}


@pytest.mark.parametrize(
    ("extra", "fields", "verdict", "part"),
    [
        ({"dram_bytes": 0}, {}, OK, "vLLM's own"),
        ({"kv_layout": "stock"}, {}, OK, "vLLM's own"),
        ({"kv_layout": "BLNHC"}, {}, OK, "BLNHC is asked for"),
        ({}, {"vllm": {**VLLM, "platform": "cpu"}}, OK, "vLLM's own"),
        ({}, {"vllm": {**VLLM, "has_layouts": False}}, WARNING, "before 0.29"),
        ({}, {"environ": {"VLLM_KV_CACHE_LAYOUT": "LBNHC"}}, WARNING, "wins over BLHNC"),
        ({}, {"environ": {"VLLM_KV_CACHE_LAYOUT": "BLHNC"}}, OK, "is asked for"),
    ],
)
def test_kv_layout(
    tmp_path: Path, extra: dict[str, Any], fields: dict[str, Any], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path, **fields), plan(**extra), "KV layout")
    assert line.verdict is verdict
    assert part in line.text


# --- the model ----------------------------------------------------------------------------
def test_a_model_the_connector_steps_aside_for(tmp_path: Path) -> None:
    why = "KV group 1 is CrossAttentionSpec, which is not proven yet, so turns are stock"
    machine = fake.make(tmp_path, **kv(aside=why))
    line = one(machine, plan(), "model")
    assert line.verdict is ERROR
    assert "steps aside: KV group 1 is CrossAttentionSpec, which is not proven yet" in line.text


def test_without_prefix_caching_one_line_is_to_blame(tmp_path: Path) -> None:
    off = kv(aside=why_aside(False, ""), prefix_caching=False)
    lines = [each for each in look(fake.make(tmp_path, **off), plan()) if each.verdict is ERROR]
    assert [line.subject for line in lines] == ["prefix caching"]


def test_what_vllm_cannot_say_is_not_seen_in_its_own_words(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, vllm={**VLLM, "not_seen": "layers: no module named tilelang"})
    line = one(machine, plan(root=tmp_path), "model")
    assert line.verdict is UNSEEN
    assert (
        "this vLLM cannot say here what its layers keep: layers: no module named til" in line.text
    )


def test_a_model_that_vllm_refuses_with_these_options_is_not_judged(tmp_path: Path) -> None:
    said = "Total number of attention heads (32) must be divisible by tensor parallel size (3)."
    machine = fake.make(tmp_path, vllm={**VLLM, "refused": said})
    served = plan(root=tmp_path)
    assert one(machine, served, "options") == Line(
        "options", ERROR, f"this vLLM refuses them: {said}", "mend it, or the server stops at start"
    )
    assert one(machine, served, "model").verdict is UNSEEN


def test_context_parallelism_is_stepped_aside_for(tmp_path: Path) -> None:
    served = plan("--decode-context-parallel-size", "2", root=tmp_path)
    line = one(fake.make(tmp_path), served, "model")
    assert line.verdict is ERROR
    assert "decode context parallelism" in line.text


def test_a_hybrid_model(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path, **kv(**WINDOWS)), plan(), "model")
    assert line.verdict is OK
    assert "24 layers with a window of 1,024, 8 layers of full attention" in line.text
    assert "32.0 KiB per token, as vLLM makes them on sm_90" in line.text


QWEN3_NEXT: dict[str, Any] = {
    "architecture": "Qwen3NextForCausalLM",
    "layers": [["MambaSpec", None, 36], ["FullAttentionSpec", None, 12]],
    "groups": [["MambaSpec", 544, None]] * 3 + [["FullAttentionSpec", 544, None]],
    "block_bytes": 12 * 544 * 2048,
}


def test_a_model_with_states_is_served_and_its_bytes_are_told(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path, **kv(**QWEN3_NEXT)), plan(), "model")
    assert (line.verdict, line.text) == (
        OK,
        "Qwen3NextForCausalLM is served: 36 layers of states, 12 layers of full attention; "
        "24.0 KiB per token, 38.2 MiB of states per turn, blocks of 544 tokens, as vLLM makes them "
        "on sm_90",
    )


def test_a_match_unit_is_recommended_with_its_numbers(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, **kv(**QWEN3_NEXT))
    line = one(machine, plan(), "states")
    assert line.verdict is WARNING
    assert "computes up to that many again, 272 in the mean" in line.text
    assert line.cure.startswith("--prefix-match-unit 32 where answers are shorter than 256 tokens")
    line = one(machine, plan("--prefix-match-unit", "32"), "states")
    assert line.verdict is OK
    assert line.text.endswith("or the last answer and 16 tokens, if less")


def test_drafts_that_drop_a_block_cost_one_per_turn(tmp_path: Path) -> None:
    drafts = {"drops_a_block": True, "server": {"has_drafts": True}}
    machine = fake.make(tmp_path, **kv(**QWEN3_NEXT, **drafts))
    line = one(machine, plan(), "drafts")
    assert line.verdict is WARNING
    assert "computes 544 tokens more" in line.text
    assert "the last answer" in one(machine, plan(), "states").text


def test_a_tier_that_the_server_refuses(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, **kv(no_tier="no DRAM tier for hybrid KV groups on this vLLM"))
    line = one(machine, plan(), "DRAM tier")
    assert line.verdict is ERROR
    assert "hybrid KV groups" in line.text


@pytest.mark.parametrize(
    ("flags", "model"),
    [
        (["--kv-cache-dtype", "nvfp4"], LLAMA),
        (["--kv-cache-dtype", "nvfp4"], {"layer_types": ["novel"]}),  # whatever the model is
    ],
)
def test_scales_of_their_own_leave_pins_and_no_tier(
    tmp_path: Path, flags: list[str], model: dict[str, Any]
) -> None:
    machine, served = fake.make(tmp_path), plan(*flags, root=tmp_path, model=model)
    line = one(machine, served, "DRAM tier")
    assert line.verdict is ERROR
    assert line.text.startswith("no DRAM tier with --kv-cache-dtype nvfp4")


@pytest.mark.parametrize("named", [["NobodysForCausalLM"], ["BertModel"], [], None])
def test_a_model_of_another_architecture_is_not_judged(tmp_path: Path, named: Any) -> None:
    machine = fake.make(tmp_path)
    assert one(machine, plan(root=tmp_path), "model").verdict is OK
    served = plan(root=tmp_path, model={**LLAMA, "architectures": named})
    line = one(machine, served, "model")
    assert line.verdict is UNSEEN
    assert f"its architectures are {named}" in line.text


@pytest.mark.parametrize("name", ["middleware.ProgramMiddlewar", "middleware:ProgramMiddleware"])
def test_a_middleware_of_ours_by_a_wrong_name_is_an_error(tmp_path: Path, name: str) -> None:
    machine = fake.make(tmp_path)
    line = one(machine, plan("--middleware", f"continuum_connector.{name}"), "middleware")
    assert line.verdict is ERROR
    for each in MIDDLEWARES:
        module, _, what = each.rpartition(".")
        assert hasattr(importlib.import_module(module), what)
        lines = look(machine, plan("--middleware", each))
        assert "middleware" not in {line.subject for line in lines}


def test_stages_have_a_tier_where_the_executor_passes_their_reports_on(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, cuda={**CUDA, "gpus": [H100, H100]})
    lines = look(machine, plan("-pp", "2", root=tmp_path))
    assert "DRAM tier" not in {line.subject for line in lines}
    ray = plan("-pp", "2", "--distributed-executor-backend", "ray", root=tmp_path)
    line = one(machine, ray, "DRAM tier")
    assert line.verdict is ERROR
    assert "pipeline parallelism over the executor `ray`" in line.text


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ({"layer_types": ["novel"] * 32}, "layer_types is set"),
        ({"sliding_window": 4096}, "sliding_window is set"),
        ({"model_type": "gemma3"}, "its model_type is gemma3"),
        ({"num_hidden_layers": None}, "num_hidden_layers or hidden_size is missing"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "may name the type"),
        ({"dtype": "int3"}, "int3"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "only vLLM knows"),
    ],
)
def test_a_model_that_config_json_does_not_tell_is_not_judged(
    tmp_path: Path, model: dict[str, Any], part: str
) -> None:
    line = one(fake.make(tmp_path), plan(root=tmp_path, model={**LLAMA, **model}), "model")
    assert line.verdict is UNSEEN
    assert part in line.text


@pytest.mark.parametrize("name", ["", "nobody/nothing"])
def test_a_model_that_is_not_here_is_not_seen(tmp_path: Path, name: str) -> None:
    machine = fake.make(tmp_path, environ={"HF_HUB_CACHE": str(tmp_path)})
    line = one(machine, plan("--model", name), "model")
    assert line.verdict is UNSEEN
    assert "--model FOLDER" in line.cure


@pytest.mark.parametrize("name", ["/nowhere", "a b?", "~nobody-at-all/x", "n" * 300, "."])
def test_a_model_that_no_server_finds_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    line = one(fake.make(tmp_path), plan("--model", name), "model")
    assert line.verdict is ERROR, line


def test_a_folder_with_another_format_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    line = one(fake.make(tmp_path), plan("--model", str(tmp_path)), "model")
    assert (line.verdict, "other formats" in line.text) == (UNSEEN, True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ("[" * 100_000, "is no JSON ("),
        ('{"num_hidden_layers": ' + "9" * 5000 + "}", "is no JSON"),
        ({"num_hidden_layers": "four"}, "got `str` - at `$.num_hidden_layers`"),
        ({"num_hidden_layers": 1e400}, "got `float` - at `$.num_hidden_layers`"),
        ({"num_hidden_layers": -3}, "Expected `int` >= 0 - at `$.num_hidden_layers`"),
        ({"num_hidden_layers": 999999999}, "Expected `int` <= 99999 - at `$.num_hidden_layers`"),
        ({"num_key_value_heads": [8, 4]}, "got `array` - at `$.num_key_value_heads`"),
    ],
)
def test_a_broken_config_json_is_an_error(tmp_path: Path, text: Any, part: str) -> None:
    text = text if isinstance(text, str) else json.dumps(LLAMA | text)
    (tmp_path / "config.json").write_text(text)
    line = one(fake.make(tmp_path), plan("--model", str(tmp_path)), "model")
    assert line.verdict is ERROR
    assert part in line.text


def test_a_config_json_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/proc/self/mem")
    line = one(fake.make(tmp_path), plan("--model", str(tmp_path)), "model")
    assert (line.verdict, "cannot be read" in line.text) == (ERROR, True)


def test_a_command_that_starts_no_server_is_an_error(tmp_path: Path) -> None:
    served = replace(plan(), why_no_server="`sleep 1` is not `vllm serve`")
    assert one(fake.make(tmp_path), served, "command").verdict is ERROR


# --- GPU, driver, link --------------------------------------------------------------------
def test_too_few_gpus(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path), plan("-tp", "2"), "GPU")
    assert line.verdict is ERROR
    assert "needs 2 on this node, CUDA shows 1 GPU" in line.text
    assert "CUDA_VISIBLE_DEVICES" in line.cure


@pytest.mark.parametrize(
    ("code", "cure"),
    [
        (100, "nvidia-smi"),
        (802, "fabricmanager"),
        (803, "reboot"),
        (804, "cuda-compat"),
        (999, "dmesg"),
    ],
)
def test_a_driver_that_does_not_start(tmp_path: Path, code: int, cure: str) -> None:
    cuda = {"has_library": True, "code": code, "trouble": "CUDA_ERROR_X"}
    line = one(fake.make(tmp_path, cuda=cuda), plan(), "GPU")
    assert line.verdict is ERROR
    assert f"CUDA_ERROR_X ({code})" in line.text
    assert cure in line.cure


@pytest.mark.parametrize(
    ("platform", "dram", "verdict", "part"),
    [
        ("cpu", "1GiB", OK, "CPU build"),
        ("rocm", "1GiB", ERROR, "rocm"),
        ("rocm", 0, UNSEEN, "no CUDA driver"),
        ("cuda", 0, UNSEEN, "no CUDA driver here (no libcuda.so.1)"),
        ("", 0, UNSEEN, "no CUDA driver"),
    ],
)
def test_no_cuda_driver(
    tmp_path: Path, platform: str, dram: Any, verdict: Verdict, part: str
) -> None:
    cuda = {"trouble": "no libcuda.so.1"}
    machine = fake.make(tmp_path, cuda=cuda, vllm={**VLLM, "platform": platform})
    line = one(machine, plan(dram_bytes=dram), "GPU")
    assert line.verdict is verdict
    assert part in line.text


def test_a_gpu_that_vllm_does_not_use(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, vllm={**VLLM, "platform": "cpu"})
    line = one(machine, plan(), "platform")
    assert line.verdict is WARNING
    assert "CUDA build" in line.cure


def test_a_driver_whose_release_the_kernel_does_not_name(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path, {"sys/module/nvidia/version": None}), plan(), "driver")
    assert line.text.startswith("driver of an unknown release, CUDA 12.8")


def test_an_old_driver_copies_call_by_call(tmp_path: Path) -> None:
    line = one(fake.make(tmp_path, cuda={**CUDA, "version": 12040}), plan(), "driver")
    assert line.verdict is WARNING
    assert "CUDA 12.4" in line.text


@pytest.mark.parametrize(
    ("files", "verdict", "part"),
    [
        (
            {f"{PCI}/current_link_width": "8"},
            WARNING,
            "x8 at 32 GT/s, 32 GB/s a way, of the GPU's x16",
        ),
        ({f"{PCI}/current_link_width": "8"}, WARNING, "loads take 2 times as long"),
        ({f"{BRIDGE}/max_link_speed": "16.0 GT/s PCIe"}, WARNING, "its slot cannot"),
        ({f"{BRIDGE}/max_link_speed": None}, OK, "63 GB/s"),
        ({f"{PCI}/max_link_speed": "Unknown"}, UNSEEN, "virtual machine?"),
    ],
)
def test_pcie_link(
    tmp_path: Path, files: dict[str, str | None], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path, files), plan(), "PCIe link")
    assert line.verdict is verdict, line
    assert part in line.text


def test_a_gpu_behind_nvlink_has_no_pcie_to_judge(tmp_path: Path) -> None:
    cuda = {**CUDA, "gpus": [{**H100, "name": "NVIDIA GH200 480GB"}]}
    machine = fake.make(tmp_path, {f"{PCI}/current_link_width": "1"}, cuda=cuda)
    assert one(machine, plan(), "PCIe link").verdict is OK


def test_links_that_are_alike_share_a_line(tmp_path: Path) -> None:
    machine = fake.make(tmp_path, cuda={**CUDA, "gpus": [H100, H100]})
    assert one(machine, plan("-tp", "2"), "PCIe link").text.startswith("GPU 0, 1: x16")


# --- memory -------------------------------------------------------------------------------
NODE1 = {"sys/devices/system/node/node1/cpulist": "8-15"}


@pytest.mark.parametrize(
    ("files", "extra", "verdict", "part"),
    [
        ({}, {}, OK, "one node"),
        (NODE1, {}, OK, "node 0, of 1 GPU, has 95.4 GiB free"),
        (NODE1, {"numa": False}, WARNING, "numa = 0"),
        (NODE1, {"dram_bytes": "100GiB"}, WARNING, "95.4 GiB free of the 100.0 GiB wanted"),
        ({**NODE1, f"{PCI}/numa_node": "-1"}, {}, UNSEEN, "is not said"),
        ({**NODE1, "proc/self/status": "Mems_allowed_list:\t1\n"}, {}, WARNING, "the memory of"),
        ({**NODE1, "proc/self/status": "Cpus_allowed_list:\t8-15\n"}, {}, WARNING, "the cores of"),
        ({"sys/devices/system/node/node0/cpulist": None}, {}, OK, "one node"),
    ],
)
def test_numa(
    tmp_path: Path, files: dict[str, Any], extra: dict[str, Any], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path, files), plan(**extra), "NUMA")
    assert line.verdict is verdict, line
    assert part in line.text


def test_numa_without_a_gpu_is_not_seen(tmp_path: Path) -> None:
    assert one(fake.make(tmp_path, NODE1, cuda={}), plan(), "NUMA").verdict is UNSEEN


def test_file_cache_counts_as_free_on_a_node(tmp_path: Path) -> None:
    text = "Node 0 MemFree: 1048576 kB\nNode 0 Active(file): 1048576 kB\nNode 0 AnonPages: 9 kB"
    files = {**NODE1, "sys/devices/system/node/node0/meminfo": text}
    assert "has 2.0 GiB free" in one(fake.make(tmp_path, files), plan(), "NUMA").text


@pytest.mark.parametrize(
    ("available_gib", "extra", "verdict", "part"),
    [
        (70, {}, OK, "64.0 GiB wanted"),
        (70, {"dram_bytes": 0}, OK, "none wanted"),
        (69, {}, WARNING, "64.0 GiB are wanted: the tier stops growing there"),
        (6, {}, ERROR, "no DRAM tier"),
        (255, {"dram_bytes": "257GiB"}, ERROR, "the machine has 256.0 GiB in all, 257.0 GiB are"),
    ],
)
def test_room(
    tmp_path: Path, available_gib: int, extra: dict[str, Any], verdict: Verdict, part: str
) -> None:
    text = f"MemTotal: {256 * 2**20} kB\nMemAvailable: {available_gib * 2**20} kB"
    line = one(fake.make(tmp_path, {"proc/meminfo": text}), plan(**extra), "DRAM")
    assert line.verdict is verdict, line
    assert part in line.text


POD_OF_2_GIB = {
    "proc/self/cgroup": "0::/../x\n",
    "sys/fs/cgroup/memory.max": str(2 * GIB),
    "sys/fs/cgroup/memory.current": str(GIB // 4),
}


@pytest.mark.parametrize(
    ("files", "fields", "verdict", "part"),
    [
        ({}, {}, OK, "grows to 97.4 GiB of it, or to 4 times the KV cache if that is less (CONT"),
        (POD_OF_2_GIB, {}, WARNING, "by default 384.0 MiB are for the tier: none, if the KV"),
        ({}, {"environ": {POD: "10.0.0.1"}}, OK, "grows to 48.7 GiB of it, or to 4 times the KV"),
        ({}, {"environ": {POD: "10.0.0.1"}}, OK, "a pod without a memory limit shares the machi"),
        ({}, ON_CPU, OK, "grows to 48.7 GiB of it, or to as much as the KV cache"),
    ],
)
def test_what_the_default_would_take(
    tmp_path: Path, files: dict[str, str], fields: dict[str, Any], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path, files, **fields), read_plan([], {}), "DRAM")
    assert line.verdict is verdict, line
    assert part in line.text


def test_servers_of_one_command_want_dram_bytes_each(tmp_path: Path) -> None:
    text = f"MemTotal: {256 * 2**20} kB\nMemAvailable: {200 * 2**20} kB"
    machine = fake.make(tmp_path, {"proc/meminfo": text})
    line = one(machine, plan("-dp", "4", "-dpl", "4", "-dpm"), "DRAM")
    assert line.verdict is WARNING
    assert "256.0 GiB (dram_bytes for each of 4 servers) are wanted" in line.text
    line = one(machine, plan("-dp", "4", "-dpl", "4"), "DRAM")
    assert line.verdict is OK
    assert line.text.endswith("; 64.0 GiB wanted")


@pytest.mark.parametrize(
    "files",
    [
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/memory.max": str(33 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(9 * GIB),
            "sys/fs/cgroup/pod/memory.stat": f"inactive_file {5 * GIB}\nactive_file {3 * GIB}",
            "sys/fs/cgroup/pod/box/memory.max": "max",
            "sys/fs/cgroup/pod/box/memory.current": str(GIB),
        },
        {
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/pod/memory.max": str(64 * GIB),
            "sys/fs/cgroup/pod/memory.high": str(33 * GIB),
            "sys/fs/cgroup/pod/memory.current": str(GIB),
        },
        {  # a container sees its own cgroup as the mount
            "proc/self/cgroup": "0::/../../elsewhere\n",
            "sys/fs/cgroup/memory.max": str(33 * GIB),
            "sys/fs/cgroup/memory.current": str(GIB),
        },
        {
            "proc/self/cgroup": "4:cpu,memory:/box\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(33 * GIB),
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {GIB}",
        },
    ],
    ids=["v2", "v2 that slows down first", "v2 in a container", "v1"],
)
def test_a_container_has_the_room_of_its_cgroup(tmp_path: Path, files: dict[str, str]) -> None:
    line = one(fake.make(tmp_path, files), plan(), "DRAM")
    assert line.verdict is WARNING
    assert "the memory cgroup has 32.0 GiB available and keeps 1.0 GiB" in line.text


def test_a_simulated_tier_is_stopped_by_nobody(tmp_path: Path) -> None:
    files = {"proc/meminfo": f"MemTotal: {8 * 2**20} kB\nMemAvailable: {8 * 2**20} kB"}
    machine = fake.make(tmp_path, files, vllm={**VLLM, "platform": "cpu"}, cuda={})
    line = one(machine, plan(), "DRAM")
    assert line.verdict is ERROR
    assert "the kernel kills the server" in line.text


# --- native library, files ----------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "extra", "verdict", "part"),
    [
        ({}, {}, OK, "over CUDA"),
        ({"vllm": {**VLLM, "platform": "cpu"}, "cuda": {}}, {}, OK, "the simulated driver"),
        ({"native": {"trouble": "not built."}}, {}, ERROR, "not built"),
        ({"native": {"trouble": "not built."}}, {"dram_bytes": 0}, WARNING, "No matter"),
        ({"cuda": {}}, {}, UNSEEN, "without a GPU here"),
        ({"cuda": {}, "vllm": {}}, {}, UNSEEN, "who copies depends"),
    ],
)
def test_native_library(
    tmp_path: Path, fields: dict[str, Any], extra: dict[str, Any], verdict: Verdict, part: str
) -> None:
    line = one(fake.make(tmp_path, **fields), plan(**extra), "native library")
    assert line.verdict is verdict
    assert part in line.text


@pytest.mark.parametrize(
    ("key", "path", "verdict"),
    [
        ("trace_path", "trace.jsonl", OK),
        ("trace_path", "no/folder/trace.jsonl", ERROR),
    ],
)
def test_files_that_are_written(tmp_path: Path, key: str, path: str, verdict: Verdict) -> None:
    machine = fake.make(tmp_path, {"var/here": "x"})
    line = one(machine, plan(**{key: f"/var/{path}"}), key)
    assert line.verdict is verdict
    assert f"/var/{path}" in line.text


@pytest.mark.parametrize(
    ("path", "said", "verdict", "part"),
    [
        ("switch", None, OK, "on: /var/switch is not there"),
        ("switch", "on", OK, "on: /var/switch says so"),
        ("switch", "OFF", WARNING, "/var/switch says off, so the server starts switched off"),
        ("switch", "aus", WARNING, "/var/switch says 'aus', which is neither"),
        ("switch/below", "on", ERROR, "/var/switch is no folder, so the server stops at start"),
        ("no/folder/switch", None, ERROR, "/var/no/folder is no folder"),
    ],
)
def test_the_switch(
    tmp_path: Path, path: str, said: str | None, verdict: Verdict, part: str
) -> None:
    machine = fake.make(tmp_path, {"var/here": "x", "var/switch": said})
    line = one(machine, plan(switch_path=f"/var/{path}"), "switch_path")
    assert line.verdict is verdict, line
    assert part in line.text


# --- endpoints for an operator ----------------------------------------------------------------
ENDPOINTS = {
    "switch endpoint": "continuum_connector.switch_endpoint.SwitchEndpoint",
    "epoch endpoint": "continuum_connector.epoch_endpoint.EpochEndpoint",
    "program endpoint": "continuum_connector.program_endpoint.ProgramEndpoint",
}
SWITCH, KEY = {"CONTINUUM_SWITCH_PATH": "/var/switch"}, {"CONTINUUM_ADMIN_KEY": "k"}


@pytest.mark.parametrize(
    ("which", "environ", "verdict", "part", "cure"),
    [
        ("switch", SWITCH | KEY, OK, "/continuum/switch reads and writes /var/switch", ""),
        ("switch", SWITCH, ERROR, "CONTINUUM_ADMIN_KEY is empty", "set a secret"),
        ("switch", KEY, ERROR, "CONTINUUM_SWITCH_PATH is empty", "name the file there"),
        ("epoch", KEY, OK, "/continuum/epoch begins an epoch", ""),
        ("epoch", {}, ERROR, "CONTINUUM_ADMIN_KEY is empty", "set a secret"),
        ("program", KEY, OK, "/continuum/programs/ ends a program", ""),
        ("program", {}, ERROR, "CONTINUUM_ADMIN_KEY is empty", "set a secret"),
    ],
)
def test_an_endpoint_that_would_stop_the_server(
    tmp_path: Path, which: str, environ: dict[str, str], verdict: Verdict, part: str, cure: str
) -> None:
    machine, subject = fake.make(tmp_path, environ=environ), f"{which} endpoint"
    line = one(machine, plan("--middleware", "my.Own", "--middleware", ENDPOINTS[subject]), subject)
    assert line.verdict is verdict
    assert part in line.text
    assert line.cure.startswith(cure)
    assert bool(line.cure) is bool(cure)


def test_nothing_is_said_of_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    lines = look(fake.make(tmp_path), plan("--middleware", "my.Own"))
    assert ENDPOINTS.keys().isdisjoint(line.subject for line in lines)


def test_each_endpoint_is_a_middleware_that_the_check_knows(tmp_path: Path) -> None:
    named = [word for each in ENDPOINTS.values() for word in ("--middleware", each)]
    lines = look(fake.make(tmp_path), plan(*named))
    assert "middleware" not in {line.subject for line in lines}
