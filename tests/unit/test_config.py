"""Configuration: what an operator may write, and what each refusal says."""

from __future__ import annotations

import itertools
import math
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum_connector.config import (
    ENV_PREFIX,
    KNOBS,
    OF_LMCACHE,
    OF_OFFLOADING,
    PATHS,
    ContinuumConfig,
    instead_of,
    load_config,
)
from continuum_connector.errors import ConfigError
from continuum_connector.memory import parse_bytes

# One is of no use without the others.
WITH_DISK = {"dram_bytes": 2**33, "disk_path": "/nowhere", "disk_bytes": 2**40}


def load(extra: dict[str, Any] | None = None, **environ: str) -> ContinuumConfig:
    return load_config(extra, environ)


def refusal(extra: dict[str, Any] | None = None, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(extra, **environ)
    return str(caught.value)


def test_nothing_set_is_the_defaults() -> None:
    assert load() == load_config({}, {}) == ContinuumConfig()


def test_every_key_is_explained_in_the_order_it_is_declared() -> None:
    assert (*KNOBS, "dram") == ContinuumConfig.__struct_fields__
    assert len(ContinuumConfig.__struct_defaults__) == len(KNOBS) + 1
    assert all(KNOBS.values())


def test_the_result_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load().ttl_s = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64GiB", 64 * 2**30),
        ("64 gib", 64 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        (" 7g ", 7 * 2**30),
        ("500MB", 500_000_000),
        ("1k", 1024),
        ("64Gi", 64 * 2**30),  # as Kubernetes has it
        ("1kB", 1000),
        ("2B", 2),
        ("9007199254740993", 9007199254740993),
        ("0.1GB", 100_000_000),
    ],
)
def test_sizes_that_people_write(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes
    assert load({"disk_write_budget": text}).disk_write_budget == num_bytes
    assert load(CONTINUUM_DISK_WRITE_BUDGET=text).disk_write_budget == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "64 gigs", "1 PiB", "64GiB extra", "0.5"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole bytes"):
        parse_bytes(text)
    message = refusal({"dram_bytes": text})
    assert f"kv_connector_extra_config.dram_bytes = {text!r}" in message
    assert "DRAM tier cannot be laid out" in message
    assert '"64GiB"' in message


def test_dram_bytes_as_a_number() -> None:
    assert load({"dram_bytes": 2**36}).dram_bytes == 2**36


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("dram_bytes", "1GiB", 2**30),
        ("sleep_dram", "release", "release"),
        ("disk_path", "/nowhere/yet", "/nowhere/yet"),
        ("disk_bytes", "1TB", 10**12),
        ("disk_write_budget", "0", 0),
        ("disk_timeout_s", "2.5", 2.5),
        ("numa", "no", False),
        ("policy", "stock", "stock"),
        ("ttl_s", "3.5", 3.5),
        ("max_ttl_s", "120", 120.0),
        ("max_pinned_fraction", "0.25", 0.25),
        ("max_head_start_s", "30", 30.0),
        ("gate_wait_s", "inf", math.inf),
        ("kv_layout", "BLNHC", "BLNHC"),
        ("checksum_every", "1", 1),
        ("max_programs", "12", 12),
        ("trace_path", "5", "5"),
        ("trace_bytes", "64MiB", 64 * 2**20),
        ("trace_hashed", "1", True),
        ("switch_path", "/run/continuum/switch", "/run/continuum/switch"),
        ("id_headers", "X-Run-Id, X-Agent", "X-Run-Id, X-Agent"),
        ("echo", " No ", False),
    ],
)
def test_every_key_can_be_set_in_the_environment_and_the_extra_config_wins(
    key: str, text: str, value: object
) -> None:
    name = ENV_PREFIX + key.upper()
    rest = {k: v for k, v in WITH_DISK.items() if k != key} if key in WITH_DISK else {}
    assert getattr(load_config(rest, {name: text}), key) == value
    assert getattr(load_config({**rest, key: value}, {}), key) == value
    default = WITH_DISK.get(key, getattr(ContinuumConfig(), key))
    assert value != default
    assert getattr(load_config({**rest, key: default}, {name: text}), key) == default


def test_the_table_above_names_every_key() -> None:
    (mark,) = test_every_key_can_be_set_in_the_environment_and_the_extra_config_wins.pytestmark  # type: ignore[attr-defined]
    assert [row[0] for row in mark.args[1]] == list(KNOBS)


@pytest.mark.parametrize("text", ["1", "true", "True", "ON", "yes"])
def test_switches_are_turned_on_by_words(text: str) -> None:
    assert load(CONTINUUM_NUMA=text).numa is True


@pytest.mark.parametrize("raw", [0, False, "0", "false", "Off", "no"])
def test_switches_are_turned_off_by_words_and_numbers(raw: object) -> None:
    assert load({"numa": raw}).numa is False


@pytest.mark.parametrize("text", ["", "2", "maybe"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(text: str) -> None:
    message = refusal(CONTINUUM_NUMA=text)
    assert f"CONTINUUM_NUMA = {text!r}" in message
    assert "so the server stops" in message
    assert "write 1 or 0" in message


@pytest.mark.parametrize("key", ["dram_bytes", "disk_bytes"])
@pytest.mark.parametrize("written", [64, "64"])
def test_a_size_without_its_unit_is_refused_before_weights_are_loaded(
    key: str, written: Any
) -> None:
    message = refusal(WITH_DISK | {key: written})
    assert f"{key} = 64 is in bytes and holds no block" in message
    assert 'write the unit, such as "64GiB"' in message


def test_an_unknown_key_is_refused_with_the_nearest_one() -> None:
    message = refusal({"dram_byte": 1})
    assert "kv_connector_extra_config key `dram_byte`" in message
    assert "would have no effect" in message
    assert "did you mean `dram_bytes`?" in message


@pytest.mark.parametrize("key", ["DRAM_BYTES", "Dram-Bytes", "CONTINUUM_DRAM_BYTES"])
def test_a_key_written_as_its_variable_is_refused_with_the_key(key: str) -> None:
    assert "did you mean `dram_bytes`?" in refusal({key: "64GiB"})


@pytest.mark.parametrize("key", [5, None, True])
def test_a_key_that_is_no_text_is_refused_as_any_other(key: Any) -> None:
    assert f"kv_connector_extra_config key `{key}` is unknown" in refusal({key: 1})


@pytest.mark.parametrize("key", sorted({*KNOBS} - {*PATHS, "disk_path"}))
def test_bytes_that_are_no_text_are_refused_with_the_key(key: str) -> None:
    said = refusal(**{ENV_PREFIX + key.upper(): os.fsdecode(b"5\xff")})
    assert key in said.lower()
    assert r"\xff" in said or r"\udcff" in said


def test_an_item_that_is_no_header_is_refused_with_its_key() -> None:
    said = refusal({"id_headers": ["X-Run-Id", 5]})
    assert said.startswith("id_headers = ['X-Run-Id', 5] does not fit (")
    assert "It means: your own headers" in said


def test_an_unknown_key_like_no_other_is_refused_with_the_list() -> None:
    message = refusal({"xyzzy": 1})
    assert all(key in message for key in KNOBS)


@pytest.mark.parametrize(
    ("key", "raw", "says"),
    [
        ("cpu_bytes_to_use", 2**36, "= 68719476736 is one of vLLM's own offloading"),
        ("cpu_bytes_to_use", 2**36, "set `dram_bytes` (bytes per node, for all its ranks"),
        ("cpu_bytes_to_use_per_rank", 2**33, "set `dram_bytes` "),
        ("disk_capacity_bytes", 2**40, "set `disk_bytes` "),
        ("kv_offload_backend", "disk", "= 'disk' is one of vLLM's own offloading"),
        ("secondary_tiers", [{"type": "fs"}], "set `disk_path` and `disk_bytes` for a local drive"),
        ("eviction_policy", "arc", "here `policy` decides"),
        ("block_size", 64, "here a block is vLLM's own (`--block-size`)"),
        ("spec_name", "TieringOffloadingSpec", "leave it out"),
        ("lmcache.max_local_cpu_size", 20, "= 20 is one of LMCache"),
        ("lmcache.max_local_cpu_size", 20, "set `dram_bytes` "),
        ("lmcache.mp.port", 6755, "put that connector behind ours in a MultiConnector"),
        ("connectors", [{}], "write MultiConnector as kv_connector"),
        ("secondary_tiers", [{"type": "x" * 9_999}], "xxxxx is one of vLLM's"),
    ],
)
def test_a_key_of_another_connector_is_refused_with_what_it_is_here(
    key: str, raw: Any, says: str
) -> None:
    message = refusal({key: raw})
    assert message.startswith(f"kv_connector_extra_config.{key} = ")
    assert says in message
    assert "would have no effect here" in message or "would not run" in message
    assert len(message) < 400


def test_what_another_connectors_key_is_here_is_a_key_of_ours() -> None:
    keys = [*OF_OFFLOADING, *(f"lmcache.{key}" for key in OF_LMCACHE)]
    named = {name for key in keys for name in re.findall(r"`(\w+)`", instead_of(key))}
    assert named == {"dram_bytes", "disk_bytes", "disk_path", "policy"} <= set(KNOBS)


def test_an_unknown_environment_variable_is_refused_with_the_nearest_one() -> None:
    message = refusal(CONTINUUM_TRACE_HASH="0")
    assert "environment variable CONTINUUM_TRACE_HASH is unknown" in message
    assert "would have no effect" in message
    assert "did you mean `CONTINUUM_TRACE_HASHED`?" in message


def test_an_unknown_environment_variable_like_no_other_is_refused_with_names_to_set() -> None:
    message = refusal(CONTINUUM_XYZZY="0")
    assert all(f"CONTINUUM_{key.upper()}" in message for key in KNOBS)


@pytest.mark.parametrize(("text", "meant"), [("dram", "dram_bytes"), ("trace", "trace_path")])
def test_the_beginning_of_a_key_is_refused_with_the_key(text: str, meant: str) -> None:
    assert f"did you mean `{meant}`?" in refusal({text: 1})
    assert f"did you mean `CONTINUUM_{meant.upper()}`?" in refusal(
        **{f"CONTINUUM_{text.upper()}": "1"}
    )


def test_a_key_that_is_gone_is_refused_with_what_to_do_instead() -> None:
    message = refusal({"objective": "throughput"})
    assert "kv_connector_extra_config key `objective` was removed: program order" in message
    assert "leave it out" in message
    assert "CONTINUUM_OBJECTIVE was removed: " in refusal(CONTINUUM_OBJECTIVE="latency")


def test_other_programs_variables_are_none_of_our_business() -> None:
    assert load(PATH="/bin", VLLM_PLUGINS="x", MY_CONTINUUM_TTL_S="9") == ContinuumConfig()


def test_the_endpoints_key_is_no_knob() -> None:
    assert load(CONTINUUM_ADMIN_KEY="s") == ContinuumConfig()
    assert "admin_key` is unknown" in refusal({"admin_key": "s"})


def test_the_endpoint_must_write_the_file_that_is_read() -> None:
    ours, other = {"switch_path": "/a/switch"}, {"switch_path": "/b/switch"}
    both = {"CONTINUUM_SWITCH_PATH": "/a/switch", "CONTINUUM_ADMIN_KEY": "s"}
    assert load(**both) == load(ours, **both) == ContinuumConfig(switch_path="/a/switch")
    message = refusal(other, **both)
    assert "switch_path = '/b/switch', but /continuum/switch writes" in message
    assert "leave switch_path out of kv_connector_extra_config" in message
    del both["CONTINUUM_ADMIN_KEY"]  # no endpoint, no quarrel: the extra config wins
    assert load(other, **both).switch_path == "/b/switch"


@pytest.mark.parametrize(
    "name",
    [
        "CONTINUUM_SERVICE_HOST",
        "CONTINUUM_SERVICE_PORT",
        "CONTINUUM_SERVICE_PORT_HTTP",
        "CONTINUUM_PORT",
        "CONTINUUM_PORT_8000_TCP",
        "CONTINUUM_PORT_8000_TCP_PROTO",
        "CONTINUUM_PORT_8000_TCP_PORT",
        "CONTINUUM_PORT_8000_TCP_ADDR",
        "CONTINUUM_CONNECTOR_SERVICE_HOST",
    ],
)
def test_a_kubernetes_service_called_continuum_does_not_stop_the_server(name: str) -> None:
    assert load_config(None, {name: "10.0.0.1"}) == ContinuumConfig()


@pytest.mark.parametrize(
    ("key", "raw", "expected"),
    [
        ("dram_bytes", -5, ">= 0"),
        ("dram_bytes", 1.5, "`int | null`"),
        ("dram_bytes", True, "`int | null`"),
        ("disk_bytes", None, "`int`"),
        ("dram_bytes", 2**61, "<="),
        ("ttl_s", -1, ">= 0"),
        ("ttl_s", float("nan"), ">= 0"),
        ("ttl_s", float("inf"), "<= 86400"),
        ("ttl_s", "fast", "`float`"),
        ("ttl_s", "", "`float`"),
        ("max_ttl_s", 1e6, "<= 86400"),
        ("max_pinned_fraction", 1.01, "<= 1"),
        ("max_pinned_fraction", -0.1, ">= 0"),
        ("max_programs", 0, ">= 1"),
        ("max_programs", 1.5, "`int`"),
        ("policy", 3, "`str`"),
        ("trace_path", 5, "`str`"),
        ("numa", 2, "`bool`"),
        ("echo", None, "`bool`"),
        ("checksum_every", -1, ">= 0"),
        ("checksum_every", 2**32, "<= 4294967295"),
    ],
)
def test_a_value_out_of_type_or_bounds_names_value_consequence_and_cure(
    key: str, raw: object, expected: str
) -> None:
    message = refusal({key: raw})
    assert message.startswith(f"{key} = {raw!r}")
    assert expected in message
    assert "so the server stops" in message
    assert KNOBS[key] in message
    assert f"kv_connector_extra_config.{key} or CONTINUUM_{key.upper()}" in message


@pytest.mark.parametrize(
    ("key", "raw", "hint"),
    [
        ("policy", "fixed-ttl", "did you mean `fixed_ttl`?"),
        ("policy", "zzz", "choose one of adaptive, continuum, "),
        ("kv_layout", "blhnc", "did you mean `BLHNC`?"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(
    key: str, raw: str, hint: str
) -> None:
    message = refusal({key: raw})
    assert message.startswith(f"{key} = {raw!r} does not exist, so the server stops")
    assert hint in message
    assert "choose one of" in message


def test_a_ttl_above_its_guard_is_refused() -> None:
    message = refusal({"ttl_s": 90})
    assert "ttl_s = 90 is above max_ttl_s = 60" in message
    assert "no pin would ever last that long" in message
    assert "raise max_ttl_s or lower ttl_s" in message
    assert load({"ttl_s": 60}).ttl_s == 60.0


def test_a_budget_that_is_no_size_is_refused() -> None:
    message = refusal(CONTINUUM_DISK_WRITE_BUDGET="4 megs")
    assert "CONTINUUM_DISK_WRITE_BUDGET = '4 megs' is not a size" in message
    assert '"4MiB"' in message


def test_the_first_bad_environment_value_does_not_matter_if_the_extra_config_overrides_it() -> None:
    assert load({"ttl_s": 3}, CONTINUUM_TTL_S="abc").ttl_s == 3.0


def test_the_struct_itself_refuses_unknown_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="dram_byte"):
        msgspec.convert({"dram_byte": 1}, ContinuumConfig)


# --- files ----------------------------------------------------------------------------------
@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("kind", ["a named pipe", "a folder", "a device"])
def test_what_is_no_file_is_refused_before_it_is_opened(
    tmp_path: Path, key: str, kind: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    path = {"a named pipe": str(tmp_path / "pipe"), "a device": "/dev/null"}.get(
        kind, str(tmp_path)
    )
    message = refusal({key: path})
    assert message == (
        f"{key} = {path!r} is {kind}, which cannot serve as a file, so the server stops; "
        "name a file, or leave it empty"
    )


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"dram_bytes": "9" * 5_000}, "is not a size"),
        ({"trace_bytes": "9" * 4_000 + "GiB"}, "is not a size"),
        *(({key: "/tmp/\ud800"}, f"{key} = '/tmp/\\ud800' has half of a") for key in PATHS),
        ({"a\nb": 1}, "key `a\\nb` is unknown"),
    ],
    ids=lambda value: str(value)[:40].encode("unicode_escape").decode(),
)
def test_whatever_is_in_a_value_or_a_name_it_is_one_sentence_in_one_line(
    extra: dict[str, Any], says: str
) -> None:
    message = refusal(extra)
    assert says in message
    assert message.isprintable()


@pytest.mark.parametrize("link", ["hard", "soft", "none"])
@pytest.mark.parametrize("pair", [*itertools.combinations(PATHS, 2)])
def test_two_keys_that_name_one_file_are_refused(
    tmp_path: Path, pair: tuple[str, str], link: str
) -> None:
    one = other = tmp_path / "one"
    if link != "none":
        one.touch()
        other = tmp_path / "other"
        other.hardlink_to(one) if link == "hard" else other.symlink_to(one)
    message = refusal({pair[0]: str(one), pair[1]: str(other)})
    assert str(one) in message
    assert "which each would destroy for the other; name two" in message
    load({pair[0]: str(one), pair[1]: str(tmp_path / "third")})


def test_a_file_under_a_name_that_a_full_trace_moves_to_is_refused(tmp_path: Path) -> None:
    trace, link = tmp_path / "t", tmp_path / "link"
    link.symlink_to(tmp_path / "t.7")
    for path in (tmp_path / "t.1", link):
        message = refusal({"trace_path": str(trace), "switch_path": str(path)})
        assert message.startswith(f"switch_path = {str(path)!r} is what trace_path = ")
        load({"trace_path": str(trace), "switch_path": str(path), "trace_bytes": 0})
    load({"trace_path": str(trace), "switch_path": str(tmp_path / "t.one")})
    load({"trace_path": str(trace), "switch_path": str(tmp_path / "1")})


def test_a_trace_that_would_keep_next_to_nothing_is_refused() -> None:
    assert "trace_bytes = 256 is below 1 MiB" in refusal({"trace_bytes": 256})
    assert load({"trace_bytes": 0}).trace_bytes == 0
    assert load({"trace_bytes": "1MiB"}).trace_bytes == 2**20


# --- the disk ---------------------------------------------------------------------------------
def with_disk(path: Path | str, **more: object) -> dict[str, Any]:
    """A server with a disk tier; what is None is left out."""
    extra = {"dram_bytes": "1MiB", "disk_path": str(path), "disk_bytes": 2**21, **more}
    return {key: value for key, value in extra.items() if value is not None}


def test_a_disk_has_a_folder_that_may_not_be_there_yet(tmp_path: Path) -> None:
    assert load(with_disk(tmp_path)).disk_path == str(tmp_path)
    assert load(with_disk(tmp_path / "new")).disk_path == str(tmp_path / "new")
    assert load(with_disk("/no/drive/is/mounted/here")).disk_bytes == 2**21
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"disk_bytes": None}, "without disk_bytes means no disk tier; set disk_bytes too"),
        ({"disk_path": None}, "disk_bytes = 2097152 without disk_path means no disk tier; set"),
        ({"dram_bytes": 0}, "blocks reach the disk through DRAM alone; set dram_bytes, or"),
        ({"disk_timeout_s": 0}, "disk_timeout_s = 0 would wait for no read, so the disk would be"),
        ({"disk_bytes": 2**60}, "disk_bytes = 1152921504606846976 leaves less than 5% of the file"),
        ({"disk_path": "cache"}, "disk_path = 'cache' is relative, so each process could mean"),
        ({"disk_path": "/dev/null"}, "is a device, which cannot serve as a folder, so the server"),
        ({"disk_path": __file__}, "is a file, which cannot serve as a folder, so the server"),
        ({"disk_path": "/tmp/\0"}, "has a NUL in it, which no file's name may have"),
        ({"disk_path": "/tmp/\ud800"}, "has half of a surrogate pair in it"),
        ({"disk_bytes": "a lot"}, "= 'a lot' is not a size, so the disk tier cannot be laid out"),
    ],
)
def test_a_disk_that_cannot_work_is_refused_in_one_sentence(
    tmp_path: Path, more: dict[str, object], says: str
) -> None:
    message = refusal(with_disk(tmp_path, **more))
    assert says in message
    assert message.isprintable()


def test_a_folder_of_somebody_elses_is_refused_and_one_that_is_read_only_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)  # root may write anywhere
    message = refusal(with_disk(tmp_path))
    assert message == (
        f"disk_path = {str(tmp_path)!r} is not ours to write in, so nothing could be kept there; "
        "give the folder to the user who runs the server"
    )
    before = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*before[:8], before.f_flag | os.ST_RDONLY, before[9]))
    monkeypatch.setattr(os, "statvfs", lambda _path: read_only)
    assert load(with_disk(tmp_path)).disk_path == str(tmp_path)


def test_a_drive_that_answers_nothing_does_not_stop_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_path: str) -> os.statvfs_result:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "statvfs", fail)
    assert load(with_disk(tmp_path)).disk_path == str(tmp_path)
