"""What the storm's agents do, drawn from a seed: the same for every server it is fired at."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from bench.serve import tokenizer
from bench.serve.apis import APIS
from bench.serve.tiny_model import ModelShape

Fields = dict[str, Any]

# So small that a request costs the engine less than the API server: a storm is many requests.
MODEL = ModelShape(layers=2, hidden=256, heads=4, kv_heads=2, intermediate=512)

# How an agent says who it is, and how often. `shared`: one id for many agents at once.
WHO = {
    "job_id": 5,
    "continuum": 4,
    "session header": 3,
    "agent_hint": 2,
    "codex header": 2,
    "claude code": 2,
    "cache key": 2,
    "top level": 2,
    "nobody": 5,
    "shared": 1,
}
SYSTEM_WORDS = 64  # the same for all agents of a tenant: two blocks
STOPS = [" z", "v"]  # letters of the tiny tokenizer's words: most answers meet one


@dataclass(frozen=True)
class Turn:
    """One request. `abort_s`: hang up after so long; 0: read to the end."""

    text: str
    max_tokens: int
    pause_s: float
    abort_s: float = 0.0
    forks: bool = False
    compacts: bool = False
    spoiled: int = 0  # a seed for garbage; 0: none
    fields: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)  # of kv_transfer_params.continuum


@dataclass(frozen=True)
class Agent:
    """One program: which API, under which name, for which tenant, and its turns."""

    name: str
    api: str
    who: str
    salt: str
    turns: tuple[Turn, ...]

    def fields(self, last: bool) -> tuple[Fields, dict[str, str]]:
        """What a request says of its program: members of the body, and headers."""
        body: Fields = {"cache_salt": self.salt} if self.salt else {}
        headers: dict[str, str] = {}
        if self.who in ("job_id", "shared"):
            name = "everybody" if self.who == "shared" else self.name
            body["vllm_xargs"] = {"job_id": name, "is_last_step": int(last)}
        elif self.who == "continuum":
            body["kv_transfer_params"] = {"continuum": {"program": self.name, "final": last}}
        elif self.who == "agent_hint":
            hint = {"session_id": self.name, "expected_resume": not last}
            body["kv_transfer_params"] = {"agent_hint": hint}
        elif self.who == "cache key":
            body["prompt_cache_key"] = self.name
        elif self.who == "top level":
            body |= {"job_id": self.name, "is_last_step": last}
        elif self.who == "session header":
            headers["X-Session-ID"] = self.name
        elif self.who == "codex header":
            headers["session_id"] = self.name
        elif self.who == "claude code":
            headers["X-Claude-Code-Session-Id"] = self.name
        return body, headers


def draw_agent(seed: int, number: int) -> Agent:
    """Agent `number`: equal for equal seeds."""
    rng = random.Random(f"storm {seed}:{number}")
    api = rng.choices(list(APIS), (5, 4, 1, 1))[0]
    who = rng.choices(list(WHO), list(WHO.values()))[0]
    tenant = rng.choice(("", "", "red", "blue"))
    num_turns = rng.choices((1, 2, 3, 5, 8), (3, 3, 4, 3, 2))[0]
    system = text(random.Random(f"system {tenant}"), SYSTEM_WORDS)
    turns = tuple(_turn(rng, api, index, system) for index in range(num_turns))
    return Agent(f"agent-{seed}-{number}", api, who, tenant, turns)


def _turn(rng: random.Random, api: str, index: int, system: str) -> Turn:
    new = rng.randint(20, 150) if index else rng.randint(40, 400)
    if rng.random() < 0.01:
        new = 6000  # longer than the server takes: 400
    chance = rng.random
    return Turn(
        text=("" if index else system) + text(rng, new),
        max_tokens=rng.choice((1, 4, 8, 16, 32)),
        pause_s=_pause(rng) if index else 0.0,
        abort_s=rng.uniform(0.02, 0.5) if chance() < 0.1 else 0.0,
        forks=index > 0 and chance() < 0.1,
        compacts=index > 1 and chance() < 0.1,
        spoiled=rng.randrange(1, 2**31) if chance() < 0.15 else 0,
        fields=_fields(rng, api),
        hints=_hints(rng),
    )


def _pause(rng: random.Random) -> float:
    """Mostly a quick tool, at times one that takes longer than any pin lives."""
    low, high = rng.choices(((0.02, 0.4), (0.4, 2.0), (4.0, 12.0)), (75, 22, 3))[0]
    return rng.uniform(low, high)


def _fields(rng: random.Random, api: str) -> Fields:
    fields: Fields = {"temperature": 0}
    if rng.random() < 0.4:
        fields["stream"] = True
    if rng.random() < 0.1 and api in ("chat", "completions"):
        # Without a seed: a server on a CPU ends at the first one whose prefill is cut in two
        # (vllm/v1/worker/gpu_model_runner.py asks a CPU generator for its offset).
        fields |= {"n": 2, "temperature": 0.8}
    if rng.random() < 0.15 and api != "responses":
        fields["stop_sequences" if api == "messages" else "stop"] = STOPS
    if rng.random() < 0.03 and api == "completions":
        fields |= {"prompt_logprobs": 1, "stream": False}
    return fields


def _hints(rng: random.Random) -> Fields:
    """What a client that knows us says; nothing, mostly."""
    hints: Fields = {}
    if rng.random() < 0.1:
        hints["ttl_s"] = rng.choice((0, 0.5, 3, 60, 10_000))
    if rng.random() < 0.2:
        hints["tools"] = rng.choice((["bash"], ["read_file", "grep"], "search"))
    return hints


def text(rng: random.Random, num_words: int) -> str:
    """Made-up words, each one token."""
    return tokenizer.text(rng, words(), num_words)


@cache
def words() -> list[str]:
    """Of the model's vocabulary, by id."""
    return tokenizer.words(MODEL.vocab)
