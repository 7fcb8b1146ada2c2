"""ProgramEndpoint: who may end a program, what is asked of an engine, how mistakes are answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from continuum_connector.config import ADMIN_KEY
from continuum_connector.program_endpoint import ProgramEndpoint
from tests.unit import endpoint_calls
from tests.unit.endpoint_calls import Called

KEY = "s3cret"
OURS = SimpleNamespace(
    kv_connector="ContinuumConnector", kv_connector_extra_config={}, kv_role="kv_both"
)


def config(transfer: Any = OURS, **scheduler: Any) -> Any:
    scheduler = {"scheduler_cls": None} | scheduler
    return SimpleNamespace(
        kv_transfer_config=transfer, scheduler_config=SimpleNamespace(**scheduler)
    )


ATTACHED = config(get_scheduler_cls=object)  # as attach.prepare leaves it


def call(
    program: str = "job:run-17",
    method: str = "DELETE",
    key: str = KEY,
    failure: Exception | None = None,
    vllm_config: Any = ATTACHED,
) -> Called:
    """One engine knows job:run-17, and no other program."""
    return endpoint_calls.call(
        ProgramEndpoint,
        lambda *how: bool(how[1] != {"end_program": "job:run-17"}),
        method=method,
        path=ProgramEndpoint.path + program,
        key=key,
        failure=failure,
        vllm_config=vllm_config,
    )


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_KEY, KEY)


def test_a_known_program_ends() -> None:
    called = call()
    assert called.asked == [(False, {"end_program": "job:run-17"})]
    assert (called.status, called.json) == (200, {"program": "job:run-17", "ended": True})


@pytest.mark.parametrize("program", ["run-17", "a/b", "job:"])
def test_an_unknown_one_is_404_with_what_to_send(program: str) -> None:
    called = call(program)
    assert called.status == 404
    assert f"no program {program!r} is known" in called.json["error"]
    assert "kv_transfer_params.continuum.program" in called.json["error"]


def test_who_has_not_the_key_ends_nothing() -> None:
    called = call(key="guess")
    assert called.status == 401
    assert not called.asked


def test_another_method_and_no_program_are_not_served() -> None:
    assert call(method="GET").status == 405
    assert call("").passed == 1


def test_an_engine_that_fails_is_told_with_what_to_do() -> None:
    called = call(failure=RuntimeError("EngineCore is gone"))
    assert called.status == 503
    assert "RuntimeError: EngineCore is gone" in called.json["error"]
    assert "send it again" in called.json["error"]


@pytest.mark.parametrize(
    "vllm_config",
    [
        config(),
        config(scheduler_cls="their.Scheduler"),
        config(None, get_scheduler_cls=object),
    ],
    ids=["not attached", "theirs", "another connector"],
)
def test_an_engine_that_would_reset_its_cache_is_not_asked(vllm_config: Any) -> None:
    called = call(vllm_config=vllm_config)
    assert called.status == 503
    assert "not ours" in called.json["error"]
    assert not called.asked


def test_a_scheduler_that_is_named_is_ours() -> None:
    named = config(scheduler_cls="continuum_connector.scheduler_cls")
    assert call(vllm_config=named).status == 200
