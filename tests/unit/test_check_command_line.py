"""A pasted command line -> Plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from continuum_connector.errors import ToldError
from continuum_connector.tools.checks.plan import Plan, as_vllm_reads, read_plan

OURS = (
    '--kv-transfer-config {"kv_connector":"ContinuumConnector","kv_role":"kv_both",'
    '"kv_connector_extra_config":%s}'
)
IN_MULTI = (
    '--kv-transfer-config {"kv_connector":"MultiConnector",'
    '"kv_connector_extra_config":{"connectors":%s}}'
)


def plan(*words: str) -> Plan:
    return read_plan(words, {})


@pytest.mark.parametrize(
    "words",
    [
        ["m", "-tp", "2"],
        ["--tensor-parallel-size", "2", "m", "--port", "8000"],
        ["m", "--tensor_parallel_size=2"],
        ["m", "-tp=2", "--enforce-eager"],
        ["--model", "m", "-tp", "2"],
        ["m", "-tp", "8", "--model", "wrong", "-tp", "2"],  # vLLM takes the first word
    ],
)
def test_ways_to_say_the_same(words: list[str]) -> None:
    assert plan(*words) == Plan(model="m", tensor_parallel_size=2)


def test_nothing_said_is_our_connector_with_its_defaults() -> None:
    assert plan() == Plan()
    assert plan().names_us


def test_dotted_parts_of_the_config_are_left_to_vllm() -> None:
    found = plan("m", "--kv_transfer_config.kv_role=kv_both", "--kv-transfer-config.x.y", "1")
    assert found.only_vllm_reads == "--kv-transfer-config.kv_role, --kv-transfer-config.x.y"


def test_json_of_the_config_and_the_environment_under_it() -> None:
    text = json.dumps(
        {"kv_connector": "ContinuumConnector", "kv_connector_extra_config": {"ttl_s": 3}}
    )
    environ = {"CONTINUUM_TTL_S": "4", "CONTINUUM_MAX_TTL_S": "5"}
    config = read_plan([f"--kv-transfer-config={text}"], environ).config
    assert (config.ttl_s, config.max_ttl_s) == (3.0, 5.0)


def test_ranks_of_this_node_are_counted_as_vllm_does() -> None:
    assert plan("-tp", "4", "-pp", "2", "-dp", "2").num_ranks == 16
    assert plan("-tp", "4", "-dp", "8", "-dpl", "2").num_ranks == 8
    assert plan("-tp", "16", "--nnodes", "2").num_ranks == 8
    assert plan("-tp", "8", "-dp", "2", "--nnodes", "2").num_ranks == 8, "an engine on each node"
    assert plan("-tp", "4", "-dp", "8", "--nnodes", "2").num_ranks == 16
    assert plan("-tp", "16", "-dp", "2", "--nnodes", "4").num_ranks == 8, "two nodes an engine"
    assert plan("-tp", "4", "-pcp", "2").num_ranks == 8
    assert plan("-tp", "4", "-dp", "8", "-dpl", "0").num_ranks == 4, "no engine here"


@pytest.mark.parametrize("words", [["-dpn", "3"], ["--data-parallel-external-lb"]])
def test_a_server_of_one_engine_has_its_dram_alone(words: list[str]) -> None:
    found = plan("-tp", "2", "-dp", "8", *words)
    assert (found.num_ranks, found.num_servers) == (2, 1)


def test_a_server_for_each_engine_means_dram_bytes_as_often() -> None:
    found = plan("-tp", "2", "-dp", "8", "-dpl", "4", "--data-parallel-multi-port-external-lb")
    assert (found.num_ranks, found.num_servers, found.num_gpus) == (2, 4, 8)


def test_flags_that_turn_things_off() -> None:
    assert plan("--no-enable-prefix-caching").enable_prefix_caching is False
    assert plan("--no-enable-prefix-caching", "--enable-prefix-caching").enable_prefix_caching


@pytest.mark.parametrize("words", [["-tp", "two"], ["-tp", "0"], ["--tensor-parallel-size"]])
def test_what_vllm_would_refuse(words: list[str]) -> None:
    with pytest.raises(ToldError, match="tensor-parallel-size"):
        plan(*words)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([OURS % '"{}"'], "kv_connector_extra_config = '{}' is no JSON object"),
        ([OURS % "[1]"], "kv_connector_extra_config = [1] is no JSON object"),
        ([IN_MULTI % '[{"kv_connector":"ContinuumConnector","kv_connector_extra_config":"{}"}]'],
         "kv_connector_extra_config = '{}' is no JSON object"),
        (["--kv-transfer-config", "null"], "null is no JSON object"),
        ([OURS % '{"trace_path":"a\\u0000b"}'], "trace_path = 'a\\x00b' has a NUL"),
    ],
)  # fmt: skip
def test_a_config_of_another_shape_is_one_sentence(words: list[str], part: str) -> None:
    found = plan(*(word for each in words for word in each.split(" ", 1)))
    assert part in found.why_no_config
    assert found.config == Plan().config


def test_an_option_that_would_replace_us_is_said_where_we_are_named() -> None:
    offloading = ("--kv_offloading_size", "1.5")
    assert "CONTINUUM_DRAM_BYTES=1.5GiB" in plan(*offloading).why_no_config
    other = ("--kv-transfer-config", '{"kv_connector":"X"}')
    assert not plan(*offloading, *other).why_no_config


@pytest.mark.parametrize("connectors", ["null", '"ContinuumConnector"', "[null, 3]", "{}"])
def test_a_list_of_connectors_that_is_none_does_not_name_us(connectors: str) -> None:
    found = plan(*(IN_MULTI % connectors).split(" ", 1))
    assert not found.why_no_config
    assert not found.names_us


def test_an_extra_config_that_is_none_does_not_name_us() -> None:
    found = plan("--kv-transfer-config", '{"kv_connector":"X","kv_connector_extra_config":"x"}')
    assert not found.names_us


def test_what_vllms_parser_reads_counts() -> None:
    mine = replace(plan("m", "--config", "serve.yaml"), words=("m",), is_stock=True, unknown=("x",))
    assert as_vllm_reads(mine, None, {}) is mine
    transfer = {"kv_connector": "X", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    told = {"model": "m", "tensor_parallel_size": 2, "enable_prefix_caching": False}
    found = as_vllm_reads(mine, told | {"kv_transfer_config": transfer}, {})
    assert (found.tensor_parallel_size, found.enable_prefix_caching, found.names_us) == (
        2,
        False,
        False,
    )
    assert (found.is_stock, found.only_vllm_reads, found.unknown) == (False, "", ("x",))
    assert as_vllm_reads(mine, told, {}).is_stock, "none was given in the file, either"
    assert as_vllm_reads(mine, {"spec_method": "ngram"}, {}).drafts
