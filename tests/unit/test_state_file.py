"""StateFile: what was learned comes back; a file that is no good is told once, and survived."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from continuum_connector.costs import state_file
from continuum_connector.costs.state_file import SAVE_EVERY_S, Bites, StateFile, run_to_end
from continuum_connector.errors import ConfigError
from continuum_connector.forecast.gaps import Gaps
from continuum_connector.toolcalls.asked import Asked, Ending


class Writer:
    """Stands in for the disk: holds up or refuses what is written, on demand."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.began, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.error: OSError | None = None

    def __call__(self, path: str, content: bytes) -> None:
        self.began.set()
        assert self.go_on.wait(60)
        if self.error:
            raise self.error
        self.written.append(content)


class Part:
    """Takes a part of the state."""

    def __init__(self, num_dropped: int = 0) -> None:
        self.taken: list[object] = []
        self._num_dropped = num_dropped

    def load_state(self, state: object) -> int:
        self.taken.append(state)
        return self._num_dropped


def read(path: str | Path, tag: str = "") -> object:
    """What a server that starts with `path` gets as part "a"."""
    file, part = StateFile(str(path), tag), Part()
    file.restore("a", part.load_state)
    file._queue.put(None)
    return part.taken[0] if part.taken else None


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    file = StateFile(str(path))
    file.close({"a": {"x": [1.5, 2], "é": {}}, "b": 3})
    file.close({"a": "closed already"})
    assert read(path) == {"x": [1.5, 2], "é": {}}
    assert os.listdir(tmp_path) == ["state.json"]


def test_tool_times_come_back(tmp_path: Path) -> None:
    run = Asked(Ending.CALLS, ("run",))
    gaps, again = Gaps(), Gaps()
    for _ in range(20):
        gaps.arrived(gaps.begin(run, 0.0), 3.0)
    StateFile(str(tmp_path), "m").close({"gaps": run_to_end(gaps.to_state())})
    file = StateFile(str(tmp_path), "m")
    file.restore("gaps", again.load_state)
    file.close({})
    assert again.forecast(run).cdf == pytest.approx(gaps.forecast(run).cdf)


def test_it_is_due_at_once_and_then_once_a_minute() -> None:
    writer = Writer()
    file = StateFile("state.json", write=writer)
    assert file.is_due(5.0)
    file.save({"a": 1}, 5.0)
    assert file._idle.wait(60)
    assert not file.is_due(5.0 + SAVE_EVERY_S - 1)
    assert file.is_due(5.0 + SAVE_EVERY_S)
    file.close({"a": 2})
    assert writer.written == [
        b'{"version":1,"state":{"a":1}}\n',
        b'{"version":1,"state":{"a":2}}\n',
    ]


def test_a_large_state_is_copied_a_bite_per_step() -> None:
    writer, begun = Writer(), []
    file = StateFile("state.json", write=writer)

    def copied() -> Bites[dict[str, int]]:
        begun.append(len(begun))
        for _ in range(3):
            yield
        return {"a": begun[-1]}

    for step in range(3):
        file.new_step(copied, 5.0 + step)
    assert file._idle.is_set()  # nothing was handed over yet
    file.new_step(copied, 8.0)
    assert file._idle.wait(60)
    for now in (8.0, 8.0 + SAVE_EVERY_S - 1):
        file.new_step(copied, now)
    assert begun == [0]
    file.new_step(copied, 8.0 + SAVE_EVERY_S)
    assert begun == [0, 1]
    file.close({})
    assert writer.written == [b'{"version":1,"state":{"a":0}}\n', b'{"version":1,"state":{}}\n']


def test_nothing_is_due_while_the_disk_is_slow() -> None:
    writer = Writer()
    writer.go_on.clear()
    file = StateFile("state.json", write=writer)
    file.save({"a": 1}, 0.0)
    assert writer.began.wait(60)
    assert not file.is_due(1000.0)
    writer.go_on.set()
    assert file._idle.wait(60)
    assert file.is_due(1000.0)
    file.close({})


def test_without_a_path_nothing_happens() -> None:
    file = StateFile("")
    assert not file.is_due(1e9)
    file.save({"a": 1}, 0.0)
    file.close({"a": 1})
    assert file._thread is None


def test_a_directory_holds_one_file_for_each_tag(tmp_path: Path) -> None:
    for tag in ("meta-llama/Llama-3.1-8B NVIDIA H100", "../../etc/x", ""):
        StateFile(str(tmp_path), tag).close({"a": tag})
    assert sorted(os.listdir(tmp_path)) == [
        "continuum-etc-x.json",
        "continuum-meta-llama-Llama-3.1-8B-NVIDIA-H100.json",
        "continuum-state.json",
    ]
    assert read(tmp_path, "meta-llama/Llama-3.1-8B NVIDIA H100") is not None


def test_no_file_yet_is_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path / "state.json") is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b'{"version":1,"state":{"a":{"x"', "truncated"),
        (b"\xff\xfe\x00", ""),
        (b"[" * 100_000, ""),
        (b"[1, 2]", "not a state file"),
        (b'{"version":1}', "not a state file"),
        (b'{"version":1,"state":[]}', "not a state file"),
        (b'{"version":2,"state":{"a":1}}', "version is 2, not 1"),
        (b'{"state":{"a":1}}', "version is None, not 1"),
    ],
)
def test_a_file_that_is_not_ours_is_one_warning_and_a_fresh_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    assert read(path) is None
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert reason in warning.getMessage()
    assert str(path) in warning.getMessage()
    StateFile(str(path)).close({"a": 7})
    assert read(path) == 7
    assert (tmp_path / "state.json.unusable").read_bytes() == content, "it may be somebody's"


def test_what_was_put_aside_is_not_replaced_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in (b"somebody's", b'{"version":2,"state":{}}', b"another's"):
        path.write_bytes(content)
        assert read(path) is None
    kept = [(tmp_path / f"state.json.unusable{end}").read_bytes() for end in ("", ".1", ".2")]
    assert kept == [b"somebody's", b'{"version":2,"state":{}}', b"another's"]


def test_a_file_too_large_to_be_ours_is_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "MAX_BYTES", 10)
    (tmp_path / "state.json").write_bytes(b'{"version":1,"state":{"a":1}}')
    assert read(tmp_path / "state.json") is None
    assert "larger than 10 bytes" in caplog.text


def test_a_file_that_may_not_be_read_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(state_file, "open", refuse, raising=False)
    assert read(tmp_path / "state.json") is None
    (warning,) = caplog.records
    assert "Permission denied" in warning.getMessage()


def test_parts_that_do_not_fit_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "state.json"
    StateFile(str(path)).close({"a": 1})
    file = StateFile(str(path))
    file.restore("a", Part(num_dropped=3).load_state)
    file.close({})
    (warning,) = caplog.records
    assert "3 entries of 'a'" in warning.getMessage()


def test_a_full_disk_is_told_once_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    writer.error = OSError(errno.ENOSPC, "No space left on device")
    file = StateFile("state.json", write=writer)
    for now in (0.0, 60.0, 120.0):
        assert file.is_due(now)
        file.save({"a": 1}, now)
        assert file._idle.wait(60)
    assert [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]
    writer.error = None  # there is room again
    file.close({"a": 2})
    assert len(writer.written) == 1


def test_what_cannot_be_encoded_is_told_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    writer = Writer()
    file = StateFile("state.json", write=writer)
    file.save({"a": object()}, 0.0)
    assert file._idle.wait(60)
    assert "cannot be written" in caplog.text
    file.close({"a": 1})
    assert len(writer.written) == 1


def test_a_missing_directory_is_told_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    StateFile(str(tmp_path / "no" / "state.json")).close({"a": 1})
    assert "cannot be written" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    StateFile(str(path)).close({"a": 1})

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_file.os, "fsync", fail)
    StateFile(str(path)).close({"a": 2})
    assert os.listdir(tmp_path) == ["state.json"]
    assert read(path) == 1


def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "continuum-model.json")
    monkeypatch.setattr(state_file, "open", lambda *_: pytest.fail("opened"), raising=False)
    with pytest.raises(ConfigError, match=r"continuum-model.json' is a named pipe, so what"):
        StateFile(str(tmp_path), "model")


def test_a_link_to_state_stays_one_whatever_is_in_it(tmp_path: Path) -> None:
    link, target = tmp_path / "state.json", tmp_path / "kept"
    link.symlink_to(target)
    for old in (None, b'{"version":1,"state":{"a":1}}', b"somebody's"):
        if old is not None:
            target.write_bytes(old)
        StateFile(str(link)).close({"a": 2})
        assert link.is_symlink()
        assert read(link) == 2
    assert (tmp_path / "kept.unusable").read_bytes() == b"somebody's"
