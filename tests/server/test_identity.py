"""Whose turn it is: every source of identity on every API, and ids of every odd kind."""

from __future__ import annotations

import gzip
import http.client
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.serve.server import SERVED_NAME, VllmServer
from continuum_connector.middleware import MAX_BODY_BYTES
from tests.server.helpers import APIS, ask, eventually, pins_live, reset, text_of, told

SHORT = [text_of(8, "short")]  # fills no block: nothing to match, nothing to pin

# name: (fields of the body, headers, key, source in the metrics); {} is a fresh id
SOURCES: dict[str, tuple[dict[str, Any], dict[str, str], str, str]] = {
    "job_id": ({"job_id": "{}"}, {}, "job:{}", "job_id"),
    "vllm_xargs": ({"vllm_xargs": {"job_id": "{}"}}, {}, "job:{}", "job_id"),
    "kv_transfer_params": (
        {"kv_transfer_params": {"continuum": {"program": "{}"}}},
        {},
        "{}",
        "kv_transfer_params",
    ),
    "session_id": ({"session_id": "{}"}, {}, "session:{}", "session_id"),
    "X-Session-ID": ({}, {"X-Session-ID": "{}"}, "session:{}", "session_id"),
}


def filled(value: Any, name: str) -> Any:
    """`value` with every {} replaced."""
    if isinstance(value, dict):
        return {key: filled(each, name) for key, each in value.items()}
    return value.replace("{}", name) if isinstance(value, str) else value


def turns(server: VllmServer, source: str) -> float:
    return server.metric("continuum:turns_total", source=source)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_program_is_named_by(agents: VllmServer, api: str, source: str) -> None:
    name = f"{source}-on-{api}"
    fields, headers, key, counted = SOURCES[source]
    known = turns(agents, counted)
    answer = ask(agents, api, SHORT, headers=filled(headers, name), **filled(fields, name))
    assert told(answer)["program"] == key.replace("{}", name)
    eventually(lambda: turns(agents, counted) == known + 1)


@pytest.mark.parametrize("api", APIS)
def test_a_program_that_sends_nothing_is_known_by_its_blocks(agents: VllmServer, api: str) -> None:
    known = turns(agents, "lineage")
    history = [text_of(70, f"lineage {api}")]
    first = ask(agents, api, history, 120)
    history += [APIS[api].text(first), text_of(30, f"lineage tool {api}")]
    second = ask(agents, api, history, 120)
    history += [APIS[api].text(second), text_of(30, f"lineage tool 2 {api}")]
    third = ask(agents, api, history, 4)
    assert told(first)["program"] == told(second)["program"] == told(third)["program"]
    assert [told(answer)["turn"] for answer in (first, second, third)] == [1, 2, 3]
    assert told(second)["cached_tokens"]["vram"] > 150
    eventually(lambda: turns(agents, "lineage") == known + 2)


VENDORS = {
    "claude-code": (
        "messages",
        {"x-claude-code-session-id": "s-1", "x-claude-code-agent-id": "a-2"},
        {},
        "claude-code:s-1/a-2",
    ),
    "claude-code-metadata": (
        "messages",
        {},
        {"metadata": {"user_id": "user_ab12_account__session_5f0c-77"}},
        "claude-code:5f0c-77",
    ),
    "codex": ("responses", {"session-id": "5973b6c0", "originator": "codex"}, {}, "codex:5973b6c0"),
    "opencode": ("chat", {"x-opencode-session": "ses_1"}, {}, "opencode:ses_1"),
    "prompt_cache_key": ("responses", {}, {"prompt_cache_key": "k-1"}, "cache-key:k-1"),
}


@pytest.mark.parametrize("vendor", VENDORS)
def test_agents_are_known_by_what_they_send_anyway(agents: VllmServer, vendor: str) -> None:
    api, headers, fields, key = VENDORS[vendor]
    known = turns(agents, "vendor")
    answer = ask(agents, api, SHORT, headers=headers, **fields)
    assert told(answer)["program"] == key
    eventually(lambda: turns(agents, "vendor") == known + 1)


@pytest.mark.parametrize("job_id", [None, "", "  ", "None", [1], {"a": 1}, 2.5, True, -1])
def test_a_job_id_that_says_nothing_is_an_ordinary_request(agents: VllmServer, job_id: Any) -> None:
    for api in APIS:
        answer = ask(agents, api, SHORT, job_id=job_id)
        assert not told(answer)["program"].startswith("job:")
    assert agents.alive()


def test_a_job_id_of_10_kb_is_an_ordinary_one(agents: VllmServer) -> None:
    long = "x" * 10_000
    programs = {told(ask(agents, api, SHORT, job_id=long))["program"] for api in APIS}
    (key,) = programs
    assert key.startswith("job:xxx")
    assert len(key) <= 200
    other = told(ask(agents, "chat", SHORT, job_id=long + "y"))["program"]
    assert other != key


def test_requests_that_share_a_job_id_at_the_same_time_leave_a_pin_each(agents: VllmServer) -> None:
    """None continues another, so none takes from another."""
    reset(agents)

    def turn(i: int) -> dict[str, Any]:
        return ask(agents, "completions", [text_of(100, f"shared {i}")], 30, job_id="shared")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(turn, range(8)))
    assert {told(answer)["program"] for answer in answers} == {"job:shared"}
    assert sorted(told(answer)["turn"] for answer in answers) == list(range(1, 9))
    eventually(lambda: pins_live(agents) == 8)


def test_a_job_id_used_again_after_its_last_step_starts_anew(agents: VllmServer) -> None:
    numbers = []
    for last in (False, True, False, False):
        answer = ask(agents, "chat", SHORT, job_id="again", is_last_step=last)
        numbers.append(told(answer)["turn"])
    assert numbers == [1, 2, 1, 2]


SAID = {"model": SERVED_NAME, "prompt": "hi", "max_tokens": 2, "job_id": "unread"}
SENT = json.dumps(SAID).encode()
LONG = SENT[:-1] + b',"x":"%s"}' % (b"x" * MAX_BODY_BYTES)
# why it is left unread: body, headers, and vLLM's own answer
UNREAD: dict[str, tuple[bytes | Iterable[bytes], dict[str, str], int]] = {
    "long": (LONG, {}, 200),
    "compressed": (gzip.compress(SENT), {"Content-Encoding": "gzip"}, 400),
}


@pytest.mark.parametrize("why", UNREAD)
def test_a_body_that_is_left_unread_is_stocks_to_answer_and_counted(
    agents: VllmServer, why: str
) -> None:
    body, headers, status = UNREAD[why]
    name = "continuum:unread_bodies_total"
    before = agents.metric(name, reason=why)
    answered, found = posted(agents, body, headers)
    assert answered == status
    if status == 200:
        assert told(found)["program"].startswith("anonymous:")
    assert agents.metric(name, reason=why) == before + 1


def test_a_body_in_chunks_is_read_as_gateways_send_them(agents: VllmServer) -> None:
    status, found = posted(agents, (SENT[:9], SENT[9:]), {"Transfer-Encoding": "chunked"})
    assert (status, told(found)["program"]) == (200, "job:unread")


def posted(
    server: VllmServer, body: bytes | Iterable[bytes], headers: dict[str, str]
) -> tuple[int, dict[str, Any]]:
    """Status and answer of a completion, asked for with these bytes."""
    line = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    given = {"Content-Type": "application/json", **headers}
    line.request("POST", "/v1/completions", body, given, encode_chunked=True)
    answer = line.getresponse()
    found = json.loads(answer.read())
    line.close()
    return answer.status, found
