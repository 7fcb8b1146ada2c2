"""What `continuum check` says of a command line is what the server decides with it.

vLLM itself is asked in a process without GPU, weights or network; beside it stand the layers of
families.py, read from the models' code by hand, and the connector's own answers for them.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.sim import versions
from continuum_connector import build
from continuum_connector.tools.checks import serving as parsers
from continuum_connector.vllm import served
from continuum_connector.vllm.proven import Server, why_no_disk, why_no_tier
from tests.vllm import model_configs as configs
from tests.vllm.asked import answers
from tests.vllm.families import FAMILIES, OTHERS, V4, Family, full
from tests.vllm.test_check import HAS_PLANNED
from tests.vllm.test_families import cache_of

pytestmark = pytest.mark.skipif(not HAS_PLANNED, reason="this vLLM cannot be asked")

OURS = '{"kv_connector":"ContinuumConnector"}'
BESIDE = json.dumps(
    {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"},
                {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
            ]
        },
    }
)
RETENTION = "--prefix-cache-retention-interval 1056"
MTP = "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2"
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


class Asked(NamedTuple):
    """A command line and what is known of its server. `expects`: fields of the answer's `kv`, the
    beginning of a sentence or the whole of a number; or "refused", "not_seen": a part of it."""

    name: str
    config: configs.Config
    options: str
    expects: dict[str, Any]
    environ: dict[str, str] = {}  # noqa: RUF012 - nobody changes it


NO_STATE_TIER = "no DRAM tier for layers of state with speculative decoding"
NO_DRAFT_DISK = "no disk tier with speculative decoding"
NO_GROUPS_DISK = "no disk tier for KV groups with windows"
NONE = {"aside": "", "no_tier": "", "no_disk": ""}

CASES = [
    Asked("plain", configs.LLAMA_8B, "", NONE | {"block_bytes": 16 * 131_072, "num_ranks": 1}),
    Asked("two ranks", configs.LLAMA_8B, "-tp 2", NONE | {"block_bytes": 16 * 131_072}),
    Asked("heads twice", configs.LLAMA_8B, "-tp 16", NONE | {"block_bytes": 32 * 131_072}),
    Asked("stages", configs.LLAMA_8B, "-pp 2", {"no_disk": "no disk tier with pipeline par"}),
    Asked(
        "stages over Ray",
        configs.LLAMA_8B,
        "-pp 2 --distributed-executor-backend ray",
        {"not_seen": "ray"},  # which is not installed here
    ),
    Asked("fp8", configs.LLAMA_8B, "--kv-cache-dtype fp8", NONE | {"block_bytes": 8 * 131_072}),
    Asked(
        "nvfp4",
        configs.LLAMA_8B,
        "--kv-cache-dtype nvfp4",
        {"not_seen": "layers: "},  # its backend is not in this build
    ),
    Asked(
        "LoRA", configs.LLAMA_8B, "--enable-lora", {"no_disk": "no disk tier with --enable-lora"}
    ),
    Asked(
        "ngram, short",
        configs.LLAMA_8B,
        "--spec-method ngram --spec-tokens 3",
        {"no_tier": "", "no_disk": NO_DRAFT_DISK},
    ),
    Asked(
        "ngram, -sc.",
        configs.LLAMA_8B,
        "-sc.method ngram -sc.num_speculative_tokens 3",
        {"no_tier": "", "no_disk": NO_DRAFT_DISK},
    ),
    Asked("pooling", configs.LLAMA_8B, "--runner pooling", {"aside": "the runner is pooling"}),
    Asked(
        "no caching",
        configs.LLAMA_8B,
        "--no-enable-prefix-caching",
        {"aside": "prefix caching is off", "prefix_caching": False},
    ),
    Asked(
        "overrides",
        configs.LLAMA_8B,
        "--hf-overrides '{\"num_hidden_layers\": 4}'",
        NONE | {"block_bytes": 4 * 16 * 4096},
    ),
    Asked("blocks", configs.LLAMA_8B, "--block-size 64", {"block_bytes": 64 * 131_072}),
    Asked("context ranks", configs.LLAMA_8B, "-tp 16 -dcp 2", {"aside": "decode context par"}),
    Asked("heads", configs.FALCON_7B, "-tp 3", {"refused": "must be divisible by tensor parallel"}),
    Asked("one KV head", configs.FALCON_7B, "", NONE | {"block_bytes": 32 * 16 * 256}),
    Asked("a window alone", configs.MISTRAL, "", {"aside": "", "no_disk": NO_GROUPS_DISK}),
    Asked("nobody's", configs.NOBODYS, "", {"not_seen": "config: "}),
    Asked("no part for pictures", configs.GEMMA4_BARE, "", {"not_seen": "layers: "}),
    Asked("no tokenizer", configs.MLLAMA, "", {"not_seen": "layers: "}),
    Asked("an unknown type", configs.MINIMAX_M3, "", {"not_seen": "model type `minimax_m3`"}),
    Asked("kernels that are not here", configs.DEEPSEEK_V4, "", {"not_seen": "layers: "}),
    Asked("no option", configs.LLAMA_8B, "--no-such-option", {"refused": "unrecognized arguments"}),
    Asked(
        "states and attention in one layer",
        configs.FALCON_H1,
        "",
        {"no_tier": "", "no_disk": NO_GROUPS_DISK, "block_bytes": 14_745_600},
    ),
    Asked("states, blocks", configs.FALCON_H1, "--block-size 4096", {"block_bytes": 75_497_472}),
    Asked(
        "MTP beside states",
        configs.QWEN3_NEXT,
        MTP,
        {"no_tier": "", "no_disk": NO_GROUPS_DISK, "drops_a_block": True},
    ),
    Asked(
        "MTP beside states, retention",
        configs.QWEN3_NEXT,
        f"{MTP} {RETENTION}",
        {"no_tier": NO_STATE_TIER},
    ),
    Asked(
        "MTP beside states, runner V1",
        configs.QWEN3_NEXT,
        MTP,
        {"no_tier": NO_STATE_TIER},
        V1,
    ),
    Asked(
        "one group for all",
        configs.GEMMA3_27B,
        "--disable-hybrid-kv-cache-manager",
        NONE | {"block_bytes": 62 * 16 * 16 * 512},
    ),
    Asked(
        "beside a connector that knows no hybrids",
        configs.GEMMA3_27B,
        f"--kv-transfer-config '{BESIDE}'",
        NONE | {"block_bytes": 62 * 16 * 16 * 512},
    ),
]


ROWS = [family for family in [*FAMILIES, *OTHERS] if family.config]


def _key(family: Family) -> str:
    """The same of families that are asked about in the same words."""
    return f"{id(family.config)} {family.options}"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM says of each case and each family, from one process that imports it."""
    root = tmp_path_factory.mktemp("models")
    every = [*CASES, *(Asked(_key(each), each.config or {}, each.options, {}) for each in ROWS)]
    every = list({case.name: case for case in every}.values())
    questions, environs = [], {}
    for index, case in enumerate(every):
        model = root / str(index)
        model.mkdir()
        (model / "config.json").write_text(json.dumps(case.config))
        words = shlex.split(case.options)
        given = [] if "--kv-transfer-config" in words else ["--kv-transfer-config", OURS]
        questions.append([str(model), *given, *words])
        environs[index] = case.environ
    found = answers(questions, environs)
    return {case.name: answer for case, answer in zip(every, found, strict=True)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_vllm_would_do_is_known_before_it_starts(
    told: dict[str, dict[str, Any]], case: Asked
) -> None:
    answer = told[case.name]
    for key, wanted in case.expects.items():
        if key in ("refused", "not_seen"):
            assert wanted in answer.get(key, ""), answer
            assert "kv" not in answer
            continue
        found = answer["kv"][key] if "kv" in answer else answer
        assert found == wanted or (wanted and str(found).startswith(wanted)), answer


def test_every_family_whose_parsers_are_known_has_a_model_in_the_table() -> None:
    models = [family.model for family in [*FAMILIES, *OTHERS, V4] if family.model]
    assert {parsers.family_of(model) for model in models} == set(parsers.FAMILIES)


@pytest.mark.parametrize("family", ROWS, ids=lambda family: family.name)
def test_the_layers_of_a_real_model_are_those_of_the_table_and_the_server_says_the_same(
    told: dict[str, dict[str, Any]], family: Family
) -> None:
    kv = told[_key(family)].get("kv")
    assert kv, told[_key(family)]
    config = versions.vllm_config(block_size=family.block_size)
    if "MambaSpec" in str(family.layers()):
        config.cache_config.mamba_cache_mode = "align"
    cache = cache_of(config, family, 100)
    by_hand = Counter(served.group(each).kind for each in cache.kv_cache_groups)
    assert Counter(kind for kind, _, _ in kv["groups"]) == by_hand
    # Beside an index, a block that lies outermost is padded (DeepSeek V3.2: 768 bytes of 5 MB).
    assert 0 <= kv["block_bytes"] - family.block_bytes <= 1024
    assert {size for _, size, _ in kv["groups"]} == {family.block_size}
    assert kv["aside"] == build.reason_to_step_aside(config, cache)
    _decides_the_same(kv, served.server(config, cache))


def _decides_the_same(kv: dict[str, Any], here: Server) -> None:
    """Whether the server that was asked about is the one that decides in a real scheduler."""
    there = Server(**{**kv["server"], "kinds": tuple(kv["server"]["kinds"])})
    # One rank's executor is made later in the harness than where a server makes its config.
    one_rank = kv["num_ranks"] == 1
    same: dict[str, Any] = {"executor": "uni"} if one_rank else {}
    by_kind = [each._replace(kinds=tuple(sorted(each.kinds)), **same) for each in (there, here)]
    assert by_kind[0] == by_kind[1]
    assert (kv["no_tier"], kv["no_disk"]) == (why_no_tier(here), why_no_disk(here))


STATES = {"has_states": True, "cache": {"mamba_cache_mode": "align"}}
FLAGS: dict[str, dict[str, Any]] = {  # by the names of CASES, as a config is made for a scheduler
    "plain": {},
    "two ranks": {"world_size": 2},
    "stages": {"world_size": 2, "num_stages": 2},
    "fp8": {"cache": {"cache_dtype": "fp8"}},
    "no caching": {"enable_prefix_caching": False},
    "MTP beside states": STATES | {"num_drafts": 2},
}


@pytest.mark.parametrize("name", FLAGS)
def test_an_option_decides_the_same_in_a_real_scheduler(
    told: dict[str, dict[str, Any]], name: str
) -> None:
    kv, given = told[name]["kv"], FLAGS[name]
    family = next(one for one in FAMILIES if one.name == "Qwen3-Next")
    if "has_states" not in given:
        family = Family("Llama", lambda: {"model.layers.0.attn": full(16, 8, 128)}, [1], 16, 0)
    config = versions.vllm_config(block_size=family.block_size, **given)
    cache = cache_of(config, family, 100)
    assert kv["aside"] == build.reason_to_step_aside(config, cache)
    _decides_the_same(kv, served.server(config, cache))


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """No file is written beside the model, and no model is asked for on the network."""
    (tmp_path / "config.json").write_text(json.dumps(configs.LLAMA_8B))
    gone, here = answers([["nobody/nothing"], [str(tmp_path)]])
    assert "kv" not in gone
    assert "kv" in here
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
