"""How long a hostile body stops the API server, with the middleware and without, in one server.

While one connection posts the body, others ask for /health and for a chat of two tokens as often as
they are answered; the slowest answer counts. A busy machine makes that anything, so the event
loop's thread is asked for its CPU time too. Stock and ours take turns within a repeat, and who is
first changes with each.
Run from the repository root:

    python -m bench.bodies.run
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.bodies.either import STOCK, Either
from bench.cli import positive, start, teaching_parser
from bench.serve.server import SERVED_NAME, VllmServer
from bench.serve.tiny_model import make_model
from continuum_connector.middleware import (
    CONTAINER_COST,
    MAX_BODY_BYTES,
    MAX_BODY_COST,
    MAX_MARKED_BYTES,
)

HEAD = b'{"model":"%s","prompt":"hello","max_tokens":2,"job_id":"x"' % SERVED_NAME.encode()
MARK = b',"cache_control":{"type":"ephemeral"}'
MARKED = b"{%s}," % MARK[1:]
COST_OF_MARKED = 2 * CONTAINER_COST + 1
CHAT = {"model": SERVED_NAME, "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
JSON = {"Content-Type": "application/json"}


def filled(before: bytes, unit: bytes, size: int, after: bytes = b"1]}") -> bytes:
    return before + unit * ((size - len(before) - len(after)) // len(unit)) + after


MB = 10**6
ATTACKS: dict[str, bytes] = {
    "45 MB of messages, marked": filled(HEAD + MARK + b',"messages":[', b"{},", 45 * MB),
    # for a model that is not there, or vLLM's engine is busy with them for a minute
    "50 MB of kv_transfer_params": filled(
        HEAD + b',"model":"none","kv_transfer_params":{"a":[', b"{},", 50 * MB, b"1]}}"
    ),
    "50 MB of text": filled(HEAD + b',"x":"', b"a", 50 * MB, b'"}'),
    "all that is read, of objects": filled(HEAD + b',"x":[', b"{},", MAX_BODY_BYTES),
    "all that is read, of lists": filled(HEAD + b',"x":[', b"[[[[]]]],", MAX_BODY_BYTES),
    "all that is read, of text": filled(HEAD + b',"x":"', b"a", MAX_BODY_BYTES, b'"}'),
    "all that is searched for marks": filled(
        HEAD + MARK + b',"messages":[', b"{},", MAX_MARKED_BYTES
    ),
    "marks, as many as are read": filled(
        HEAD + b',"messages":[', MARKED, (MAX_BODY_COST // COST_OF_MARKED - 9) * len(MARKED)
    ),
    "no strict JSON, all that is read": filled(
        HEAD + b',"y":NaN,"x":[', b"1,", 2 * MAX_BODY_COST - 99
    ),
}


HEADER = """\
| body | MB | loop, ms CPU: stock | ours | ratio | /health, ms: stock | ours | ratio | \
a chat, ms: stock | ours | ratio | status |
|---|---|---|---|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Seen:
    """Seconds: the loop's CPU until the attack is answered, and the slowest answer of each kind."""

    loop_s: float
    health_s: float
    chat_s: float
    status: int


class Caller(threading.Thread):
    """Asks one thing again and again, on one connection, and keeps the slowest answer's time."""

    def __init__(self, url: str, method: str, path: str, body: bytes | None = None) -> None:
        super().__init__(daemon=True)
        self._ask: Callable[[], object] = lambda: post(url, path, body, {}, method)
        self._stopped = threading.Event()
        self.slowest_s = 0.0

    def run(self) -> None:
        while not self._stopped.is_set():
            began = time.perf_counter()
            self._ask()
            self.slowest_s = max(self.slowest_s, time.perf_counter() - began)
            self._stopped.wait(0.01)

    def stop(self) -> float:
        self._stopped.set()
        self.join()
        return self.slowest_s


def post(
    url: str, path: str, body: bytes | None, headers: dict[str, str], method: str = "POST"
) -> int:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=300)
    try:
        line.request(method, path, body, {**JSON, **headers})
        answer = line.getresponse()
        answer.read()
        return answer.status
    finally:
        line.close()


def loop_s(pid: int) -> float:
    """CPU seconds of a process's first thread, on which vLLM's API server runs its loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def attack(server: VllmServer, body: bytes, is_stock: bool) -> Seen:
    url = server.url
    headers = {STOCK.decode(): "1"} if is_stock else {}
    callers = [
        Caller(url, "GET", "/health"),
        Caller(url, "POST", "/v1/chat/completions", json.dumps(CHAT).encode()),
    ]
    for caller in callers:
        caller.start()
    began_s = loop_s(server.pid)
    status = post(url, "/v1/completions", body, headers)
    busy_s = loop_s(server.pid) - began_s
    health_s, chat_s = (caller.stop() for caller in callers)
    return Seen(busy_s, health_s, chat_s, status)


def measure(
    server: VllmServer, repeats: int, names: list[str]
) -> Iterator[tuple[str, list[Seen], list[Seen]]]:
    """Each attack with what stock and ours showed, repeat by repeat."""
    for name in names:
        found: dict[bool, list[Seen]] = {True: [], False: []}
        attack(server, ATTACKS[name], True)  # warm: memory of that size has been asked for once
        for repeat in range(repeats):
            for is_stock in (True, False) if repeat % 2 else (False, True):
                found[is_stock].append(attack(server, ATTACKS[name], is_stock))
        yield name, found[True], found[False]


def row(name: str, stock: list[Seen], ours: list[Seen]) -> str:
    """Medians, and the median of the ratios within a repeat."""
    cells = [name, f"{len(ATTACKS[name]) / MB:.1f}"]
    for field in ("loop_s", "health_s", "chat_s"):
        pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(stock, ours, strict=True)]
        cells += [f"{1e3 * statistics.median(side):.0f}" for side in zip(*pairs, strict=True)]
        cells.append(f"{statistics.median(b / a for a, b in pairs):.2f}")
    cells.append("/".join(str(status) for status in sorted({s.status for s in (*stock, *ours)})))
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = teaching_parser("python -m bench.bodies.run", __doc__)
    parser.add_argument("--repeats", type=positive, default=7, help="of each attack (7)")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument("--json", type=Path, help="write all samples here")
    args = parser.parse_args()
    middleware = ("--middleware", f"{Either.__module__}.{Either.__name__}")
    samples = {}
    with VllmServer(
        make_model(), "bodies", num_blocks=100, connector={}, args=middleware
    ) as server:
        print(HEADER)
        for name, stock, ours in measure(server, args.repeats, args.attacks):
            print(row(name, stock, ours), flush=True)
            samples[name] = {"stock": [*map(asdict, stock)], "ours": [*map(asdict, ours)]}
        unread = server.metrics()
        print()
        for (metric, labels), value in unread.items():
            if metric == "continuum:unread_bodies_total":
                print(f"{metric} {dict(labels)} {value:g}")
    if args.json:
        args.json.write_text(json.dumps(samples))


if __name__ == "__main__":
    start(main, "python -m bench.bodies.run")
