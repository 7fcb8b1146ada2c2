"""What the server tests share: asking over each API, waiting, and reading what the server says."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.serve.apis import APIS
from bench.serve.metrics import Metrics, open_accounts
from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import LLAMA
from bench.serve.tokenizer import FIRST_WORD, words

BLOCK = 32
WAIT_S = 60.0  # how long `eventually` waits: a loaded machine is slow, a wrong one never right
POLL_S = 0.05

T = TypeVar("T")


def eventually(look: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """Return the first true answer of `look`; fail if none comes within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = look()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"still {answer!r} after {timeout_s:g} s"
        time.sleep(POLL_S)


# --- prompts ----------------------------------------------------------------------------
def text_of(num_words: int, seed: int | str) -> str:
    """Made-up words, each one token."""
    return "".join(" " + w for w in random.Random(seed).choices(words(LLAMA.vocab), k=num_words))


def tokens_of(num_tokens: int, seed: int | str) -> list[int]:
    """Ids of word tokens."""
    return random.Random(seed).choices(range(FIRST_WORD, LLAMA.vocab), k=num_tokens)


# --- asking ------------------------------------------------------------------------------
def ask(
    server: VllmServer,
    api: str,
    history: list[str],
    max_tokens: int = 4,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> dict[str, Any]:
    """Ask greedily; `history` alternates user and assistant texts. The answer's JSON."""
    where = APIS[api]
    body = {"model": SERVED_NAME, "temperature": 0, **where.body(history, max_tokens), **fields}
    try:
        answer = server.post(where.path, body, headers)
    except urllib.error.HTTPError as error:
        raise AssertionError(f"HTTP {error.code}: {error.read().decode()[:500]}") from error
    assert isinstance(answer, dict)
    return answer


def told(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What the response says of its program."""
    found = answer["kv_transfer_params"]["continuum"]
    assert isinstance(found, dict)
    return found


def last(**more: Any) -> dict[str, Any]:
    """Fields of a request that is its program's last: nothing is left pinned."""
    return {"kv_transfer_params": {"continuum": {"final": True, **more}}}


# --- the server's state -----------------------------------------------------------------
def usage(server: VllmServer) -> float:
    """Share of VRAM blocks in use."""
    return server.metric("vllm:kv_cache_usage_perc")


def pins_live(server: VllmServer) -> int:
    return int(server.metric("continuum:pins_live"))


def in_flight(server: VllmServer) -> float:
    return server.metric("continuum:transfers_in_flight")


def reset(server: VllmServer) -> None:
    """Start anew: no pin, no cached block in VRAM or DRAM, nothing in flight."""
    eventually(lambda: server.metric("vllm:num_requests_running") == 0)
    eventually(lambda: in_flight(server) == 0)
    eventually(lambda: server.post("/reset_prefix_cache") == {"success": True})
    eventually(lambda: pins_live(server) == 0 and usage(server) == 0.0)


def dram_hits(server: VllmServer) -> float:
    """Tokens that came from DRAM so far."""
    return server.metric("continuum:hit_tokens_total", tier="dram")


def terminate(server: VllmServer) -> int | None:
    """SIGTERM to the API server, as an operator's stop; its exit code, once its group is gone."""
    group = server.pid
    os.kill(group, signal.SIGTERM)
    eventually(lambda: not server.alive() and not _group_exists(group))
    return server.exit_code()


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def log_of(server: VllmServer) -> str:
    return server.log.read_text(errors="replace")


def pids_of(server: VllmServer, process: str) -> list[int]:
    """Ids of the server's "EngineCore" or "Worker" processes, as its log names them."""
    found = re.findall(rf"\({process}\w* pid=(\d+)\)", log_of(server))
    return [int(pid) for pid in dict.fromkeys(found)]


def find_mapping(pid: int, num_bytes: int) -> int:
    """Address of the process's only anonymous memory of this length, of one mapping or of
    neighbours: a driver that locks pages may leave one in pieces."""
    ends: dict[int, int] = {}
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        if inode == "0":
            begin, end = (int(each, 16) for each in span.split("-"))
            ends[begin] = end
    found = []
    for begin in ends:
        end = begin
        while end - begin < num_bytes and end in ends:
            end = ends[end]
        if end - begin == num_bytes:
            found.append(begin)
    assert len(found) == 1, f"mappings of {num_bytes} bytes: {found}"
    return found[0]


def overwrite_dram(server: VllmServer, num_bytes: int, dtype: str = "float32") -> None:
    """Write plausible but wrong values over the host pool, once nothing is copied any more.

    The pool is the worker's; at one rank on a GPU vLLM has no worker process, and EngineCore
    holds it. PermissionError where no process may write another one's memory.
    """
    eventually(lambda: in_flight(server) == 0)
    (process,) = pids_of(server, "Worker") or pids_of(server, "EngineCore")
    start = find_mapping(process, num_bytes)
    piece = _noise(dtype, 1 << 22)
    with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
        os.lseek(memory.fileno(), start, os.SEEK_SET)
        while num_bytes:
            num_bytes -= os.write(memory.fileno(), piece[:num_bytes])


def _noise(dtype: str, num_values: int) -> bytes:
    noise = np.random.default_rng(1).standard_normal(num_values, dtype=np.float32)
    if dtype == "bfloat16":  # numpy has none: the upper half of a float32
        return (noise.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return noise.astype(dtype).tobytes()


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Every record; a line that is no JSON object fails."""
    lines = path.read_text().split("\n")
    assert lines.pop() == "", "the last line is not complete"
    records = [json.loads(line) for line in lines]
    assert all(isinstance(record, dict) for record in records)
    return records


def count_by(records: Sequence[Mapping[str, Any]], event: str, field: str) -> dict[str, float]:
    """Records of one event, counted by one of their fields."""
    counts: dict[str, float] = {}
    for record in records:
        if record["event"] == event:
            counts[record[field]] = counts.get(record[field], 0.0) + 1.0
    return counts


def ledger_closes(samples: Metrics) -> bool:
    """Whether every pin and every transfer begun has ended or is still there."""
    return not open_accounts(samples)


# --- programs whose tokens are compared -------------------------------------------------
@dataclass
class Dialog:
    """One program: its first prompt, and what its tools return, in token ids."""

    name: str
    prompt: list[int]
    tools: list[list[int]]


def dialogs(num: int, rounds: int, first: int, tool: int) -> list[Dialog]:
    """`num` programs of `rounds` turns; `first` and `tool` are lengths in tokens."""
    return [
        Dialog(
            f"dialog-{i}",
            tokens_of(first + 13 * i, f"prompt {i}"),
            [tokens_of(tool + 7 * i, f"tool {i} {j}") for j in range(rounds - 1)],
        )
        for i in range(num)
    ]


def administer(server: VllmServer, path: str, key: str, text: str = "") -> dict[str, Any]:
    """PUT the text at `/continuum/PATH`, GET without one, as curl does in docs/switch-off.md; the
    answer's JSON."""
    request = urllib.request.Request(
        f"{server.url}/continuum/{path}",
        method="PUT" if text else "GET",
        data=text.encode() or None,
        headers={"Authorization": f"Bearer {key}"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found = json.loads(answer.read())
    assert isinstance(found, dict)
    return found


# About 45 blocks each in the end: together more than 128 of VRAM, less than DRAM's 397.
PROGRAMS = dialogs(4, rounds=3, first=700, tool=300)


def play(
    server: VllmServer,
    programs: Sequence[Dialog],
    max_tokens: int = 24,
    before_last: Callable[[], None] | None = None,
    cold: bool = False,
    salt: str = "",
    found: list[int] | None = None,
) -> list[list[list[int]]]:
    """Run all programs, turn about; every answer's token ids, by program and turn.

    `before_last` is called ahead of the last turns. `cold`: every request has a salt of its
    own, so that no cache has anything for it; `salt`: all have this one. `found`: each
    answer's number of cached prompt tokens is added to it.
    """
    contexts = [list(dialog.prompt) for dialog in programs]
    answers: list[list[list[int]]] = [[] for _ in programs]
    rounds = len(programs[0].tools) + 1
    for turn in range(rounds):
        if turn == rounds - 1 and before_last is not None:
            before_last()
        for i, dialog in enumerate(programs):
            if turn:
                contexts[i] += dialog.tools[turn - 1]
            salted = f"{dialog.name} {turn}" if cold else salt
            answer = server.post(
                "/v1/completions",
                {
                    "model": SERVED_NAME,
                    "prompt": contexts[i],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "return_token_ids": True,
                    "vllm_xargs": {"job_id": dialog.name},
                    **({"cache_salt": salted} if salted else {}),
                },
            )
            ids = answer["choices"][0]["token_ids"]
            assert len(ids) == max_tokens
            if found is not None:
                found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            answers[i].append(ids)
            contexts[i] += ids
    return answers


def play_at_once(server: VllmServer, programs: Sequence[Dialog]) -> list[list[list[int]]]:
    """As `play`, every program on a thread of its own."""
    with ThreadPoolExecutor(len(programs)) as threads:
        return list(threads.map(lambda dialog: play(server, [dialog])[0], programs))


def by_label(samples: Metrics, name: str, label: str) -> dict[str, float]:
    """The samples of `name` summed per value of one label."""
    sums: dict[str, float] = {}
    for (n, have), value in samples.items():
        key = dict(have).get(label)
        if n == name and key is not None:
            sums[key] = sums.get(key, 0.0) + value
    return sums


def install_plugin(folder: Path, name: str, source: str) -> str:
    """Make `source` a vLLM plugin for servers with the PYTHONPATH that this returns."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))
