"""SwitchFile: what its file may say, and that nothing else is ever done."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest

from continuum_connector.errors import ConfigError
from continuum_connector.switch_endpoint import AlwaysOn, SwitchFile, open_switch


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "switch"


def test_a_file_that_is_not_there_means_on(path: Path) -> None:
    switch = SwitchFile(str(path), None)
    assert switch.is_on
    path.write_text("off")
    switch.look()
    assert not switch.is_on
    path.unlink()
    switch.look()
    assert switch.is_on
    assert not path.exists()


def test_a_server_may_start_switched_off(path: Path) -> None:
    path.write_text("off\n")
    assert not SwitchFile(str(path), None).is_on


@pytest.mark.parametrize("text", ["off", "off\n", " OFF \r\n", "Off"])
def test_off_is_read_however_it_was_written(path: Path, text: str) -> None:
    path.write_text(text)
    assert not SwitchFile(str(path), None).is_on


@pytest.mark.parametrize("text", ["", "\n", "of", "0", "off on", "\x00\xff", "x" * 1000])
def test_anything_else_changes_nothing(path: Path, text: str) -> None:
    path.write_text("off")
    switch = SwitchFile(str(path), None)
    path.write_text(text, encoding="latin-1")
    switch.look()
    assert not switch.is_on


def test_what_cannot_be_read_is_said_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        switch = SwitchFile(str(path), None)
        switch.look()
    assert [record.message for record in caplog.records] == [
        f"switch_path = {path} cannot be read (Is a directory); ContinuumConnector stays on"
    ]
    path.rmdir()
    path.write_text("aus")
    switch.look()
    path.write_text("off")
    switch.look()
    path.write_text("aus")
    switch.look()
    said = f"switch_path = {path} says 'aus'; write on or off; ContinuumConnector stays"
    assert [record.message for record in caplog.records][1:] == [f"{said} on", f"{said} off"]


def test_a_folder_that_is_gone_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mount that went away is no operator who switches on."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    path = folder / "switch"
    path.write_text("off")
    switch = SwitchFile(str(path), None)
    path.unlink()
    folder.rmdir()
    with caplog.at_level(logging.WARNING):
        switch.look()
    assert not switch.is_on
    assert [record.message for record in caplog.records] == [
        f"switch_path = {path} cannot be read (its folder is gone); ContinuumConnector stays off"
    ]
    folder.mkdir()
    switch.look()
    assert switch.is_on


def test_the_thread_outlives_whatever_one_look_raises(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed, worked = threading.Event(), threading.Event()

    def wake() -> None:
        if switch.is_on:
            worked.set()
        else:
            failed.set()
            raise RuntimeError("no engine there")

    switch = open_switch(str(path), wake)
    path.write_text("off")
    assert failed.wait(30)
    path.write_text("on")
    assert worked.wait(30)
    switch.close()
    assert "failed (RuntimeError('no engine there'))" in caplog.text


def test_a_change_wakes_an_idle_engine_and_nothing_else_does(path: Path) -> None:
    woken: list[bool] = []
    switch = SwitchFile(str(path), lambda: woken.append(switch.is_on))
    for text in ("on", "off", "off", "", "on"):
        path.write_text(text)
        switch.look()
    assert woken == [False, True]


def test_the_thread_reads_by_itself_until_it_is_closed(path: Path) -> None:
    seen, before = threading.Event(), set(threading.enumerate())
    switch = open_switch(str(path), seen.set)
    path.write_text("off")
    assert seen.wait(30)
    assert not switch.is_on
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "continuum-switch"
    switch.close()
    switch.close()
    thread.join(60)  # close waits no longer than a second
    assert not thread.is_alive()


def test_a_switch_that_could_never_work_stops_the_server(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in no directory that exists"):
        open_switch(str(tmp_path / "nowhere" / "switch"), None)


def test_without_a_path_there_is_no_thread_and_no_file() -> None:
    before = set(threading.enumerate())
    switch = open_switch("", None)
    assert isinstance(switch, AlwaysOn)
    assert switch.is_on
    assert set(threading.enumerate()) <= before


def test_a_symlink_that_is_swapped_is_followed(path: Path) -> None:
    """Kubernetes changes a mounted ConfigMap that way."""
    for name in ("on", "off"):
        (path.parent / name).write_text(name)
    os.symlink("on", path)
    switch = SwitchFile(str(path), None)
    os.symlink("off", path.parent / "next")
    os.replace(path.parent / "next", path)
    switch.look()
    assert not switch.is_on
