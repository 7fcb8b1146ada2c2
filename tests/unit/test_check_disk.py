"""The lines of `continuum check` on the disk tier, and what it asks of a real folder."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.tools.checks import Line, Verdict, ask
from continuum_connector.tools.checks.plan import Plan, read_plan
from continuum_connector.tools.cli.check import look
from continuum_connector.worker.disk import make_folder
from tests.unit import fake_machine as fake
from tests.unit.fake_machine import GIB

OK, WARNING, ERROR, UNSEEN = Verdict.OK, Verdict.WARNING, Verdict.ERROR, Verdict.UNSEEN
SUBJECTS = ("disk", "file system", "disk space", "disk writes")
MOUNTED = "22 1 254:0 / / rw - ext4 /dev/vda rw\n23 22 {} / /kv rw - {} {} rw"


def plan(**config: Any) -> Plan:
    """A plan for a disk of 2 TiB below 64 GiB of DRAM."""
    extra = {"dram_bytes": "64GiB", "disk_path": "/kv", "disk_bytes": "2TiB", **config}
    transfer = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    transfer["kv_connector_extra_config"] = extra  # type: ignore[assignment]
    return read_plan(["--kv-transfer-config", json.dumps(transfer)], {})


def said(tmp_path: Path, served: Plan | None = None, **made: Any) -> dict[str, Line]:
    """Subject to line, of the lines on the disk alone."""
    machine = fake.make(tmp_path, made.pop("files", None), **made)
    return {each.subject: each for each in look(machine, served or plan()) if _is_of_disk(each)}


def _is_of_disk(line: Line) -> bool:
    return "disk" in line.subject or line.subject == "file system"


def test_a_drive_where_all_is_well_has_only_ok_lines(tmp_path: Path) -> None:
    lines = said(tmp_path)
    assert tuple(lines) == SUBJECTS
    fake.none_but_ok(list(lines.values()))
    assert {each.subject: each.text for each in lines.values()} == {
        "disk": "only the server may write to /kv",
        "file system": "xfs at /kv",
        "disk space": "2048.0 GiB wanted, of 3700.0 GiB that may be used: 3900.0 GiB free of "
        "4000.0 GiB, of which 5% must stay free",
        "disk writes": "2048.0 GiB a day, 25.5 MB/s on average: 0.51 times the file system of "
        "4000.0 GiB",
    }


def test_without_a_disk_nothing_is_said_and_nobody_is_asked(tmp_path: Path) -> None:
    machine = fake.make(tmp_path)
    asked: list[str] = []
    spy = fake.replace_ask(machine, asked)
    lines = list(look(spy, plan(disk_path="", disk_bytes=0)))
    assert not [each for each in lines if each.subject in SUBJECTS]
    assert "disk" not in asked


@pytest.mark.parametrize(
    ("seen", "verdict", "part", "cure"),
    [
        (
            {"trouble": "no answer within 180 s"},
            ERROR,
            "/kv: no answer within 180 s, so",
            "answers",
        ),
        ({"exists": False, "place": "/"}, OK, "is not there yet; the server makes it", ""),
        ({"mode": 0o755}, OK, "only the server may write", ""),
        ({"mode": 0o775}, ERROR, "has mode 775: others could write", "chmod 700"),
        ({"mode": 0o702}, ERROR, "has mode 702", "chmod 700"),
        ({"is_ours": False}, ERROR, "belongs to another user", "chown /kv"),
    ],
)
def test_the_folder(
    tmp_path: Path, seen: dict[str, Any], verdict: Verdict, part: str, cure: str
) -> None:
    line = said(tmp_path, disk=seen)["disk"]
    assert line.verdict is verdict
    assert part in line.text
    assert cure in line.cure


def test_of_a_folder_that_cannot_be_used_nothing_else_is_said(tmp_path: Path) -> None:
    assert tuple(said(tmp_path, disk={"trouble": "/kv is no folder"})) == ("disk",)


@pytest.mark.parametrize(
    ("kind", "verdict", "part"),
    [
        ("ext4", OK, "ext4 at /kv"),
        ("tmpfs", ERROR, "is memory"),
        ("nfs4", WARNING, "is a network"),
        ("fuse.sshfs", WARNING, "or a process"),
        ("overlay", WARNING, "ends with the container"),
        ("btrfs", WARNING, "to a new place"),
    ],
)
def test_the_file_system(tmp_path: Path, kind: str, verdict: Verdict, part: str) -> None:
    mounts = MOUNTED.format("259:1", kind, "/dev/nvme0n1p1")
    line = said(tmp_path, files={"proc/self/mountinfo": mounts})["file system"]
    assert line.verdict is verdict
    assert part in line.text
    assert bool(line.cure) is (verdict is not OK)


def test_the_mount_nearest_to_the_folder_counts_and_of_two_there_the_last(tmp_path: Path) -> None:
    text = "1 0 1:1 / / rw - ext4 /dev/a rw\n2 1 1:2 / /k rw - tmpfs t rw\n"
    text += "3 1 1:3 / /kv\\0402 rw - xfs /dev/b rw\n4 1 1:4 / /kv\\0402 rw - nfs4 host:/x rw\n"
    text += "5 1 1:5 / /kv\\0402/deeper rw - tmpfs t rw\n"
    text += "6 1 1:6 / /kv\\0402/mod rw - tmpfs t rw\n"
    lines = said(
        tmp_path,
        plan(disk_path="/kv 2/model"),
        disk={"place": "/kv 2/model"},
        files={"proc/self/mountinfo": text},
    )
    assert lines["file system"].text.startswith("nfs4 at /kv 2")


def test_who_sees_no_mounts_judges_none(tmp_path: Path) -> None:
    lines = said(tmp_path, files={"proc/self/mountinfo": None})
    assert lines["file system"].verdict is UNSEEN


@pytest.mark.parametrize(
    ("model", "words", "part"),
    [
        ({}, ["--enable-lora"], "no disk tier with --enable-lora"),
        ({}, ["--pipeline-parallel-size", "2"], "no disk tier with pipeline parallelism"),
        ({}, ["--speculative-config", '{"method":"ngram"}'], "with speculative decoding"),
    ],
)
def test_what_gets_no_disk_tier_is_said_before_the_start(
    tmp_path: Path, model: dict[str, Any], words: list[str], part: str
) -> None:
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({**sizes, "model_type": "llama", "architectures": ["LlamaForCausalLM"], **model})
    )
    served = replace(read_plan([*words, "--model", str(tmp_path)], {}), config=plan().config)
    line = fake.one(fake.make(tmp_path / "machine"), served, "disk tier")
    assert line.verdict is ERROR
    assert part in line.text
    without = replace(served, config=plan(disk_path="", disk_bytes=0).config)
    lines = look(fake.make(tmp_path / "without"), without)
    assert "disk tier" not in {each.subject for each in lines}


def test_where_there_can_be_no_dram_tier_the_disk_is_not_blamed_as_well(tmp_path: Path) -> None:
    served = replace(plan(), pipeline_parallel_size=2, distributed_executor_backend="ray")
    lines = [each.subject for each in look(fake.make(tmp_path), served)]
    assert "DRAM tier" in lines
    assert "disk tier" not in lines


# --- space --------------------------------------------------------------------------------
def test_a_twentieth_of_the_file_system_stays_free(tmp_path: Path) -> None:
    room = {"num_bytes": 4000 * GIB, "free_bytes": 2248 * GIB}
    assert said(tmp_path / "a", disk=room)["disk space"].verdict is OK
    line = said(tmp_path / "b", disk={**room, "free_bytes": 2248 * GIB - 1})["disk space"]
    assert line.verdict is ERROR
    assert "so there is no disk tier" in line.text


def test_files_that_the_tier_has_already_count_as_room(tmp_path: Path) -> None:
    slabs = {"dp0-rank0.slab": 2048 * GIB}
    room = {"num_bytes": 4000 * GIB, "free_bytes": 200 * GIB, "slabs": slabs}
    line = said(tmp_path / "a", disk=room)["disk space"]
    assert line.verdict is OK
    assert line.text.endswith("and 2048.0 GiB in files of the tier")
    assert said(tmp_path / "b", disk=room | {"free_bytes": 0})["disk space"].verdict is OK


def test_files_of_ranks_that_are_no_more_are_no_room_and_are_named(tmp_path: Path) -> None:
    """The server neither uses nor removes them."""
    slabs = {"dp0-rank0.slab": 1024 * GIB, "dp0-rank1.slab": 1024 * GIB, "dp1-rank0.slab": 0}
    room = {"num_bytes": 4000 * GIB, "free_bytes": 200 * GIB, "slabs": slabs}
    line = said(tmp_path / "a", disk=room)["disk space"]
    assert line.verdict is ERROR
    assert line.cure == "less disk_bytes, or delete dp0-rank1.slab, dp1-rank0.slab"
    line = said(tmp_path / "b", disk=room | {"free_bytes": 2000 * GIB})["disk space"]
    assert line.verdict is WARNING
    assert "1024.0 GiB more in files of ranks that this server does not have" in line.text
    assert line.cure == "delete dp0-rank1.slab, dp1-rank0.slab"
    served = replace(plan(), tensor_parallel_size=2, data_parallel_size=2)
    lines = said(tmp_path / "c", served, disk=room)
    assert "more in files" not in lines["disk space"].text
    served = replace(
        plan(), data_parallel_size=2, data_parallel_size_local=1
    )  # the other node may use this folder
    assert "more in files" not in said(tmp_path / "d", served, disk=room)["disk space"].text


def test_a_disk_below_dram_is_of_little_use(tmp_path: Path) -> None:
    line = said(tmp_path, plan(disk_bytes="63GiB"))["disk space"]
    assert line.verdict is WARNING
    assert "less than dram_bytes" in line.text
    assert "continuum size --dram" in line.cure


def test_servers_of_one_command_take_a_disk_each(tmp_path: Path) -> None:
    transfer = {"kv_connector": "ContinuumConnector", "kv_role": "kv_both"}
    extra = {"dram_bytes": "64GiB", "disk_path": "/kv", "disk_bytes": "2TiB"}
    words = ["-dp", "2", "-dpl", "2", "--data-parallel-multi-port-external-lb"]
    words += ["--kv-transfer-config", json.dumps(transfer | {"kv_connector_extra_config": extra})]
    lines = said(tmp_path, read_plan(words, {}))
    assert lines["disk space"].text.startswith("4096.0 GiB (2 servers) wanted")
    assert lines["disk space"].verdict is ERROR
    assert "1 times the file system" in lines["disk writes"].text


# --- drive --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("budget", "verdict", "part"),
    [
        ("4000GiB", OK, "1 times the file system"),
        ("4100GiB", WARNING, "most drives are rated for 1 a day"),
        (0, WARNING, "no bound"),
    ],
)
def test_what_is_written_per_day(tmp_path: Path, budget: Any, verdict: Verdict, part: str) -> None:
    line = said(tmp_path, plan(disk_write_budget=budget))["disk writes"]
    assert line.verdict is verdict
    assert part in line.text


# --- a real folder ------------------------------------------------------------------------
def test_a_folder_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    found = ask.look_at_disk(str(tmp_path / "there"))
    assert (found["place"], found["exists"]) == (str(tmp_path), False)
    assert found["is_ours"]
    assert found["num_bytes"] > found["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_tier_are_counted_by_what_they_take(tmp_path: Path) -> None:
    (tmp_path / "dp0-rank1.slab").write_bytes(b"x" * 8192)
    with (tmp_path / "dp0-rank0.slab").open("wb") as file:
        file.truncate(1 << 30)  # and no block of it there
    (tmp_path / "others.slab").write_bytes(b"x" * 8192)
    found = ask.look_at_disk(str(tmp_path))["slabs"]
    assert found == {"dp0-rank0.slab": 0, "dp0-rank1.slab": 8192}


def test_a_file_system_without_nameless_files_gets_one_that_is_unlinked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = os.open

    def refuses(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return plain(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refuses)
    found = ask.look_at_disk(str(tmp_path))
    assert "trouble" not in found
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_looked_at_is_said_in_a_sentence(tmp_path: Path) -> None:
    said = ask.look_at_disk(f"{tmp_path}/{'x' * 300}/kv")["trouble"]
    assert said.startswith("no file can be made in ")
    assert said.endswith("(File name too long)")


def test_a_file_system_without_a_size_is_not_judged(tmp_path: Path) -> None:
    assert said(tmp_path, disk={"num_bytes": 0})["disk writes"].verdict is UNSEEN


@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        ("file", "it is no folder"),
        ("file/kv", "{0}/file is no folder"),
        ("none/kv", "{0}/none is not there, and only the last folder is made"),
        ("link", "it is a symbolic link, which may be pointed elsewhere"),
    ],
)
def test_what_the_server_would_not_take_for_its_folder_is_said(
    tmp_path: Path, name: str, trouble: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    assert ask.look_at_disk(str(tmp_path / name))["trouble"] == trouble.format(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o702])
def test_the_check_takes_the_folders_that_the_server_takes(tmp_path: Path, mode: int) -> None:
    """One rule in two places: this one may not make the folder, that one is amid a start."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    machine = fake.make(tmp_path / "machine", disk=ask.look_at_disk(str(tmp_path / "kv")))
    takes = fake.one(machine, plan(), "disk").verdict is OK
    try:
        make_folder(str(tmp_path / "kv"))
    except TransferError:
        assert not takes
    else:
        assert takes
