"""What a restart must share with the life before it to find its KV again: the weights above all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from continuum_connector.errors import TransferError
from continuum_connector.vllm import facts as module
from continuum_connector.vllm.facts import MEMORY, Checkpoint, Reader, UnprovenError, prover
from continuum_connector.worker.abi import Region
from continuum_connector.worker.disk import Namespace
from continuum_connector.worker.layout import Layout

LAYOUT = Layout((Region(4096, 4096, 0, 4000),), 100, 4096, "cpu", 0)
FACTS = {"model": {"layers": 4}, "dtype": "float32"}
SINCE = time.time() + 86_400.0  # files made by a test are older than that, whenever it runs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module.logger, "warning", lambda text, *parts: lines.append(text % parts))
    return lines


def name(
    beside: Path,
    checkpoint: Checkpoint | UnprovenError,
    facts: dict[str, Any] = FACTS,
    layout: Layout = LAYOUT,
    is_over: Callable[[], bool] = lambda: False,
) -> Namespace:
    def ask() -> Checkpoint:
        if isinstance(checkpoint, UnprovenError):
            raise checkpoint
        return checkpoint

    return prover(lambda: facts, ask, str(beside))(layout, is_over)


def test_the_same_model_has_the_same_name_wherever_it_lies(model: Path, beside: Path) -> None:
    first = name(beside, Checkpoint(str(model), SINCE))
    moved = model.rename(model.parent / "moved")
    assert name(beside, Checkpoint(str(moved), SINCE)) == first
    assert len(first.digest) == 32
    found = json.loads(first.facts)
    assert found["model"] == {"layers": 4}
    assert [row[:2] for row in found["weights"]] == [
        ["config.json", 2],
        ["model.safetensors", 7000],
    ]


def test_other_weights_of_the_same_size_and_age_under_the_same_path_are_another_name(
    model: Path, beside: Path
) -> None:
    weights = model / "model.safetensors"
    first = name(beside, Checkpoint(str(model), SINCE))
    before = weights.stat()
    weights.write_bytes(b"Weights" * 1000)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert name(beside, Checkpoint(str(model), SINCE)).digest != first.digest


@pytest.mark.parametrize(
    "change", ["facts", "bytes", "stride", "offset", "slot", "order", "file", "name"]
)
def test_whatever_else_differs_is_another_name(model: Path, beside: Path, change: str) -> None:
    read_from = Checkpoint(str(model), SINCE)
    first, layout, facts = name(beside, read_from), LAYOUT, dict(FACTS)
    [region] = LAYOUT.regions
    if change == "facts":
        facts["dtype"] = "bfloat16"
    elif change == "bytes":
        layout = replace(layout, regions=(replace(region, num_bytes=3000),))
    elif change == "stride":
        layout = replace(layout, regions=(replace(region, dev_stride=8192),))
    elif change == "offset":
        layout = replace(layout, regions=(replace(region, host_offset=16),))
    elif change == "slot":
        layout = replace(layout, slot_bytes=8192)
    elif change == "order":
        layout = replace(layout, order=(("layer.0", "bfloat16"),))
    elif change == "file":
        (model / "code.py").write_text("def forward(): ...")
    else:
        (model / "model.safetensors").rename(model / "other.safetensors")
    assert name(beside, read_from, facts, layout).digest != first.digest


def test_how_many_blocks_there_are_and_where_they_lie_is_no_part_of_the_name(
    model: Path, beside: Path
) -> None:
    read_from = Checkpoint(str(model), SINCE)
    moved = (replace(LAYOUT.regions[0], dev_base=1 << 40),)
    other = replace(LAYOUT, num_blocks=77, regions=moved)
    assert name(beside, read_from, layout=other) == name(beside, read_from)


def test_weights_are_read_once_and_remembered_for_us_alone(
    model: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    sums = Reader._sum

    def count(self: Reader, path: Path) -> str:
        read.append(path.name)
        return sums(self, path)

    monkeypatch.setattr(Reader, "_sum", count)
    first = name(beside, Checkpoint(str(model), SINCE))
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert (beside / MEMORY).stat().st_mode & 0o777 == 0o600
    assert name(beside, Checkpoint(str(model), SINCE)) == first
    assert len(read) == 2
    (model / "model.safetensors").touch()
    assert name(beside, Checkpoint(str(model), SINCE)) == first
    assert read[2:] == ["model.safetensors"]


def test_models_that_take_turns_on_a_disk_are_read_once_each_and_few_are_remembered(
    model: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [Path(shutil.copytree(model, model.parent / f"model{n}")) for n in range(4)]
    digests = [name(beside, Checkpoint(str(each), SINCE)) for each in models[:2]]
    with monkeypatch.context() as patched:
        patched.setattr(Reader, "_sum", lambda *_: pytest.fail("it was read again"))
        for _ in range(2):
            assert [name(beside, Checkpoint(str(each), SINCE)) for each in models[:2]] == digests
    monkeypatch.setattr(module, "MAX_REMEMBERED", 2)  # a model's two files
    for each in models:
        name(beside, Checkpoint(str(each), SINCE))
    known = json.loads((beside / MEMORY).read_text())
    assert {Path(path).parent.name for path in known} == {"model2", "model3"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"x": 1}', b"\xff"])
def test_a_memory_that_is_no_more_is_not_believed(
    model: Path, beside: Path, content: bytes
) -> None:
    first = name(beside, Checkpoint(str(model), SINCE))
    (beside / MEMORY).write_bytes(content)
    assert name(beside, Checkpoint(str(model), SINCE)) == first


def test_a_memory_that_cannot_be_written_is_read_again_next_time(
    model: Path, beside: Path, told: list[str]
) -> None:
    first = name(beside, Checkpoint(str(model), SINCE))
    (beside / MEMORY).unlink()
    (beside / MEMORY).mkdir()
    assert name(beside, Checkpoint(str(model), SINCE)) == first
    assert len(told) == 1
    assert "could not be written" in told[0]


def test_a_file_that_changed_since_the_server_began_may_not_be_what_it_loaded(
    model: Path, beside: Path, told: list[str]
) -> None:
    weights = model / "model.safetensors"
    began = weights.stat().st_ctime - 1.0
    one, other = (name(beside, Checkpoint(str(model), began)) for _ in range(2))
    assert one.digest != other.digest
    assert told[0].startswith("A restart will not find again what is on the disk: ")
    assert "has changed since this process began" in told[0]
    assert not (beside / MEMORY).exists()


def test_a_file_that_changes_while_it_is_read_proves_nothing(
    model: Path, beside: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(_self: Reader, path: Path) -> str:
        path.write_bytes(b"else")
        return "0"

    monkeypatch.setattr(Reader, "_sum", change)
    one, other = (name(beside, Checkpoint(str(model), SINCE)) for _ in range(2))
    assert one.digest != other.digest
    assert "has changed while it was read" in told[0]


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """Weights of the Hugging Face cache: a link to a blob, which is named after its content."""
    content = b"weights" * 1000
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    named = blobs / hashlib.sha256(content).hexdigest()
    named.write_bytes(content)
    (snapshot / "model.safetensors").symlink_to(named)
    return snapshot / "model.safetensors"


def test_a_blob_of_the_hugging_face_cache_is_read_once_before_it_is_believed(
    blob: Path, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody edits the weights through their link before the first start, and puts the original
    back later: the two are two models."""
    original = blob.read_bytes()
    patched = original.replace(b"w", b"W")
    blob.write_bytes(patched)
    first = name(beside, Checkpoint(str(blob.parent), SINCE))
    [[_, _, digest]] = json.loads(first.facts)["weights"]
    assert digest == hashlib.sha256(patched).hexdigest() != blob.resolve().name
    with monkeypatch.context() as patches:
        patches.setattr(Reader, "_sum", lambda *_: pytest.fail("it was read again"))
        assert name(beside, Checkpoint(str(blob.parent), SINCE)) == first
    blob.write_bytes(original)
    assert name(beside, Checkpoint(str(blob.parent), SINCE)).digest != first.digest


def test_what_an_older_version_believed_unread_is_read(blob: Path, beside: Path) -> None:
    """Up to 0.2 the memory could hold the name of a blob that nobody had read."""
    found = blob.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    entry = [found.st_dev, found.st_ino, found.st_size, *times, "5" * 64]
    (beside / MEMORY).write_text(json.dumps({str(blob.resolve()): entry}))
    facts = json.loads(name(beside, Checkpoint(str(blob.parent), SINCE)).facts)
    assert facts["weights"][0][2] == hashlib.sha256(blob.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("there", "other_formats", "read"),
    [
        (["a.safetensors", "a.bin", "a.pt"], False, ["a.safetensors"]),
        (["a.safetensors", "a.bin"], True, ["a.bin", "a.safetensors"]),
        (["a.bin", "a.pt", "a.gguf"], False, ["a.bin", "a.pt"]),
        (["a.safetensors", "sub/b.safetensors"], False, ["a.safetensors", "sub/b.safetensors"]),
        (["a.safetensors", "original/b.pth", ".git/c.json"], True, ["a.safetensors"]),
    ],
)
def test_what_is_not_loaded_is_not_read(
    tmp_path: Path, beside: Path, there: list[str], other_formats: bool, read: list[str]
) -> None:
    folder = tmp_path / "model"
    for each in there:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_text(each)
    rows = Reader(beside / MEMORY, lambda: False).digest(
        Checkpoint(str(folder), SINCE, has_other_formats=other_formats)
    )
    assert [row[0] for row in rows] == read


@pytest.mark.parametrize("case", ["said", "no weights", "no folder"])
def test_where_nothing_proves_the_weights_each_start_has_a_name_of_its_own_and_the_log_says_why(
    tmp_path: Path, beside: Path, told: list[str], case: str
) -> None:
    read_from: Checkpoint | UnprovenError = {
        "said": UnprovenError("load_format dummy leaves no file"),
        "no weights": Checkpoint(str(beside), SINCE),
        "no folder": Checkpoint(str(tmp_path / "nowhere"), SINCE),
    }[case]
    one, other = (name(beside, read_from) for _ in range(2))
    assert one.digest != other.digest
    says = {"said": "load_format dummy leaves no file"}.get(case, "holds no weights that are known")
    assert told[0].startswith("A restart will not find again what is on the disk: ")
    assert says in told[0]


def test_a_server_that_ends_meanwhile_does_not_wait_for_the_weights(
    model: Path, beside: Path
) -> None:
    with pytest.raises(TransferError, match="ended before its disk was open"):
        name(beside, Checkpoint(str(model), SINCE), is_over=lambda: True)
