"""serve_equal: how its servers are started, and what it says of what they answer.

The servers themselves need a GPU, or minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.serve.server import ServerOptions
from bench.serve.tiny_model import LLAMA, write_shape
from tests.gpu import serve_equal
from tests.gpu.serve_equal import Seen
from tests.server.helpers import BLOCK, find_mapping

RIGHT = [[[1, 2], [3, 4]]]
WRONG_AT_LAST = [[[1, 2], [9, 9]]]
WRONG_AT_FIRST = [[[9, 9], [3, 4]]]


def command_of(*given: str, connector: dict[str, Any] | None = None) -> list[str]:
    """The command line of a server."""
    options = serve_equal.parse([*given, "--", "--load-format", "dummy"])
    run = serve_equal.Run(options, Path("model"))
    started = ServerOptions(connector=connector, **run.fields(connector))
    return started.command(run.model, 1)


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


@pytest.mark.parametrize(("given", "is_eager"), [([], True), (["--graphs"], False)])
def test_servers_are_eager_unless_graphs_are_asked_for(given: list[str], is_eager: bool) -> None:
    command = command_of(*given)
    assert command[-2:] == ["--load-format", "dummy"]
    assert ("--enforce-eager" in command) is is_eager
    assert value(command, "--dtype") == "float32"


def test_stock_has_room_for_all_and_only_that_differs() -> None:
    stock, ours = command_of(), command_of(connector={"policy": "lru_offload"})
    flag = "--num-gpu-blocks-override"
    assert (value(stock, flag), value(ours, flag)) == ("364", "129")
    config = ours.index("--kv-transfer-config")
    del ours[config : config + 2]
    ours[ours.index(flag) + 1] = "364"
    assert stock == ours


def test_one_option_is_all_of_the_run_in_16_bit() -> None:
    command = command_of("--flash")
    assert value(command, "--dtype") == "bfloat16"
    assert value(command, "--attention-backend") == "FLASH_ATTN"
    assert "--enforce-eager" not in command


@pytest.mark.parametrize(
    ("shape", "dtype", "blocks"),
    [("hybrid", "float32", "129"), ("qwen3_next", "bfloat16", "49"), ("granite", "float32", "49")],
)
def test_a_shape_has_numbers_that_its_kernels_know_and_vram_for_half(
    shape: str, dtype: str, blocks: str
) -> None:
    command = command_of("--shape", shape, connector={"policy": "lru_offload"})
    assert value(command, "--dtype") == dtype
    assert value(command, "--num-gpu-blocks-override") == blocks
    assert value(command, "--max-model-len") == "1453", "not what VRAM holds: groups share it"


@pytest.mark.parametrize("option", ["--graphs", "--flash"])
def test_no_verdict_where_nothing_was_captured_though_graphs_were_asked_for(
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "server.log"
    play_along(monkeypatch, log, [Seen(RIGHT, 5.0)])
    log.write_text("started")
    assert serve_equal.main([option]) == 2
    assert capsys.readouterr().out.startswith("NO VERDICT: the server's log")
    log.write_text("INFO Graph capturing finished in 3 secs, took 0.20 GiB")
    assert serve_equal.main([option]) == 0


@pytest.mark.parametrize(
    ("as_is", "summed", "status", "said"),
    [
        (Seen(WRONG_AT_LAST, 5.0), Seen(RIGHT, 5.0, num_corrupt=3.0), 0, "PASS"),
        (Seen(RIGHT, 5.0), Seen(RIGHT, 5.0, num_corrupt=3.0), 1, "no answer differs"),
        (Seen(WRONG_AT_FIRST, 5.0), Seen(RIGHT, 5.0, num_corrupt=3.0), 1, "before anything"),
        (Seen(WRONG_AT_LAST, 5.0), Seen(RIGHT, 5.0), 1, "checksums did not notice"),
        (Seen(WRONG_AT_LAST, 5.0), Seen(WRONG_AT_LAST, 5.0, num_corrupt=3.0), 1, "checksums"),
    ],
)
def test_overwritten_dram_must_be_noticed_by_the_comparison_and_by_checksums(
    as_is: Seen,
    summed: Seen,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started = play_along(monkeypatch, tmp_path / "server.log", [as_is, summed])
    assert serve_equal.main(["--overwrite"]) == status
    assert said in capsys.readouterr().out.splitlines()[-1]
    stock, *ours = (each["connector"] for each in started)
    assert stock is None
    assert [each.get("checksum_every") for each in ours] == [None, 1]


def test_a_dry_run_shows_every_server_and_starts_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_equal, "VllmServer", None)
    assert serve_equal.main(["--flash", "--overwrite", "--dry-run"]) == 0
    stock, as_is, summed = capsys.readouterr().out.splitlines()
    assert "--kv-transfer-config" not in stock
    assert "checksum_every" not in as_is
    assert '"checksum_every": 1' in summed


@pytest.mark.parametrize(
    ("answers", "found", "again", "status", "said"),
    [
        (RIGHT, (0, 9), RIGHT, 0, "PASS"),
        (RIGHT, (0, 5), RIGHT, 0, "PASS"),
        (WRONG_AT_LAST, (0, 9), RIGHT, 1, "FAIL: answers differ"),
        (WRONG_AT_LAST, (0, 5), RIGHT, 2, "NO VERDICT: answers differ, but so do the pieces"),
        (WRONG_AT_LAST, (0, 9), WRONG_AT_LAST, 2, "NO VERDICT: stock vLLM, asked twice"),
    ],
)
def test_answers_that_differ_are_wrong_only_where_both_computed_the_same_pieces(
    answers: Any,
    found: tuple[int, ...],
    again: Any,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert serve_equal.verdict(RIGHT, again, (0, 9), Seen(answers, 5.0, found)) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(said)


def test_the_control_says_nothing_where_stock_vllm_disagrees_with_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = Seen(WRONG_AT_LAST, 5.0), Seen(RIGHT, 5.0, num_corrupt=3.0)
    assert serve_equal.verdict_overwritten(RIGHT, WRONG_AT_LAST, *seen) == 2
    assert "NO VERDICT" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "of_float32"), [("float32", 1), ("bfloat16", 2)])
def test_dram_is_an_odd_number_of_blocks(dtype: str, of_float32: int, tmp_path: Path) -> None:
    write_shape(tmp_path, LLAMA)
    block_bytes = BLOCK * LLAMA.kv_bytes_per_token() // of_float32
    options = serve_equal.parse(["--dram", "128MiB", "--dtype", dtype])
    found = serve_equal.Run(options, tmp_path).dram_bytes
    assert found % block_bytes == 0
    assert found // block_bytes % 2 == 1
    assert (128 << 20) - 2 * block_bytes <= found <= 128 << 20


def test_a_mapping_is_found_in_pieces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = """\
1000-3000 rw-p 00000000 00:00 0
3000-6000 rw-p 00000000 00:00 0 [heap]
7000-8000 rw-p 00000000 00:00 0
8000-9000 r--p 00000000 08:01 77 /usr/lib/libc.so"""
    monkeypatch.setattr(Path, "read_text", lambda self: maps)
    assert find_mapping(1, 0x5000) == 0x1000
    assert find_mapping(1, 0x3000) == 0x3000
    for num_bytes in (0x4000, 0x6000):  # what ends within a mapping, what has a gap
        with pytest.raises(AssertionError, match=f"mappings of {num_bytes} bytes"):
            find_mapping(1, num_bytes)


def play_along(monkeypatch: pytest.MonkeyPatch, log: Path, seen: list[Seen]) -> list[Any]:
    """Servers that are none answer as `seen` says, one by one; how each was started."""
    started: list[Any] = []
    answers = iter(seen * 2)

    def start(model: Path, name: str, connector: Any = None, **more: Any) -> FakeServer:
        started.append({"connector": connector, **more})
        return FakeServer(log)

    monkeypatch.setattr(serve_equal, "VllmServer", start)
    monkeypatch.setattr(serve_equal, "play", lambda *_, **__: RIGHT)
    monkeypatch.setattr(serve_equal, "ask_ours", lambda *_: next(answers))
    return started


class FakeServer:
    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        return
