"""Plays conversations on a server and writes down every answer, for a control to answer again."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.serve.server import SERVED_NAME, VllmServer
from tests.server.helpers import eventually, in_flight, pins_live, reset, tokens_of
from tests.server.ladder.families import Family

# Of a request, what another server's answer does not depend on.
OURS = ("kv_transfer_params", "cache_salt")
GONE_S = 0.05  # a pin that is gone as soon as it is looked for


@dataclass
class Asked:
    """A request and its answer: token ids of each choice, and the logprobs of what was likely."""

    probe: str
    body: dict[str, Any]
    choices: list[list[int]]
    likely: list[list[dict[int, float]]]
    vram: int = 0
    dram: int = 0
    num_cached: int = 0  # as vLLM counts them, with or without a connector


def ask(server: VllmServer, probe: str, body: dict[str, Any]) -> Asked:
    answer = server.post("/v1/completions", body, timeout_s=600)
    told = (answer.get("kv_transfer_params") or {}).get("continuum", {}).get("cached_tokens", {})
    return Asked(
        probe,
        body,
        [choice["token_ids"] for choice in answer["choices"]],
        [likely_of(choice["logprobs"]["top_logprobs"]) for choice in answer["choices"]],
        told.get("vram", 0),
        told.get("dram", 0),
        (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def ask_cold(server: VllmServer, body: dict[str, Any], salt: str) -> Asked:
    """Where no cache has anything of this prompt."""
    found = ask(server, "cold", {**body, "cache_salt": salt})
    assert found.vram == found.dram == found.num_cached == 0
    return found


def likely_of(top_logprobs: Sequence[dict[str, float]]) -> list[dict[int, float]]:
    return [{int(name.partition(":")[2]): p for name, p in each.items()} for each in top_logprobs]


@dataclass
class Talk:
    """One program's conversation, in tokens."""

    player: Player
    name: str
    tokens: list[int]
    num_tools: int = 0

    def turn(self, num: int = 24, ttl_s: float | None = None, **fields: Any) -> Asked:
        """Ask, and go on from the answer. `ttl_s`: for how long it may be pinned."""
        continuum = {"program": self.name} | ({} if ttl_s is None else {"ttl_s": ttl_s})
        continuum |= fields.pop("continuum", {})
        asked = self.player.ask(
            self.tokens, num, kv_transfer_params={"continuum": continuum}, **fields
        )
        self.tokens = self.tokens + asked.choices[0]
        return asked

    def leave(self, num: int = 24, **fields: Any) -> Asked:
        """A turn that is soon in DRAM alone: others take VRAM once its pin has ended."""
        before = pins_live(self.player.server)
        asked = self.turn(num, ttl_s=GONE_S, **fields)
        self.player.others(num_pins=before)
        return asked

    def tool(self, num: int = 90) -> Talk:
        self.num_tools += 1
        self.tokens = self.tokens + tokens_of(num, f"{self.name} tool {self.num_tools}")
        return self

    def fork(self, name: str = "") -> Talk:
        return Talk(self.player, name or self.name, list(self.tokens), self.num_tools)


@dataclass
class Player:
    """A server, and what it was asked in each probe."""

    server: VllmServer
    family: Family
    folder: Path
    name: str = ""
    probe: str = ""
    asked: list[Asked] = field(default_factory=list)
    num_others: int = 0

    def begin(self, probe: str) -> None:
        self.probe = probe
        (self.folder / "fault").unlink(missing_ok=True)
        (self.folder / "switch").write_text("on\n")
        reset(self.server)

    def talk(self, name: str, num: int = 620) -> Talk:
        return Talk(self, name, tokens_of(num, f"{self.probe.partition(':')[2]} {name}"))

    def ask(self, tokens: Sequence[int], num: int = 24, **fields: Any) -> Asked:
        asked = ask(self.server, self.probe, self.body(tokens, num, **fields))
        self.asked.append(asked)
        return asked

    def body(self, tokens: Sequence[int], num: int, **fields: Any) -> dict[str, Any]:
        body = {"model": SERVED_NAME, "prompt": list(tokens), "max_tokens": num, "temperature": 0}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
        return {**body, "ignore_eos": True, **fields}

    def at_once(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(jobs)) as threads:
            return [each.result() for each in [threads.submit(job) for job in jobs]]

    def others(self, num_pins: int | None = None) -> None:
        """Others take all of VRAM that nobody holds, once no more than `num_pins` are left."""
        eventually(lambda: not in_flight(self.server))
        if num_pins is not None:
            eventually(lambda: pins_live(self.server) <= num_pins)
        final = {"continuum": {"final": True}}
        for _ in range(self.family.others):
            self.num_others += 1
            tokens = tokens_of(1300, f"other {self.num_others}")
            body = self.body(tokens, 1, kv_transfer_params=final)
            ask(self.server, "others", body)

    def fault(self, text: str) -> None:
        """To the next load. It removes the file: `happened`."""
        (self.folder / "fault").write_text(text)

    def happened(self) -> bool:
        return not (self.folder / "fault").exists()

    def switch(self, text: str) -> None:
        (self.folder / "switch").write_text(f"{text}\n")
        eventually(lambda: self.server.metric("continuum:switched_on") == float(text == "on"))

    def abandon(self, tokens: Sequence[int], num: int, num_chunks: int, name: str) -> None:
        """Ask, read so many pieces of the answer, and go away; return when vLLM has seen it."""
        body = self.body(tokens, num, kv_transfer_params={"continuum": {"program": name}})
        line = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        try:
            headers = {"Content-Type": "application/json"}
            line.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
            if num_chunks:
                answer = line.getresponse()
                for _ in range(2 * num_chunks):  # an empty line behind each
                    answer.readline()
        finally:
            line.close()
        eventually(lambda: not self.server.metric("vllm:num_requests_running"))
        eventually(lambda: not self.server.metric("vllm:num_requests_waiting"))
