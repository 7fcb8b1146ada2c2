"""Servers that answer what no server should: one process-wide socket, a path for each answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from tests.fuzz.values import DEEP, LONG

GOOD = (
    'vllm:num_requests_running{engine="0",model_name=":smile:[red]"} 1\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\n'
    "continuum:programs 2\ncontinuum:vram_blocks 10\ncontinuum:pinned_blocks 2\n"
    'continuum:forecasts_total{chance="70-80"} 5\ncontinuum:decisions_total{decision="pin"} 3\n'
)
MODELS = '{"data": [{"id": ":smile:", "max_model_len": 4096}]}'
WRONG = {
    "nan": GOOD.replace(" 2\n", " NaN\n").replace(" 0.5", " NaN"),
    "inf": GOOD.replace(" 2\n", " +Inf\n").replace(" 3\n", " 1e308\n").replace(" 10\n", " -Inf\n"),
    "digits": GOOD.replace(" 3\n", f" {LONG}\n"),
    "words": GOOD.replace(" 2\n", " two\n"),
    "labels": GOOD.replace("70-80", "\\x").replace("pin", "\x1b[31m[/]:smile:\\n"),
    "deep": DEEP,
    "long": '{"data": [{"id": "x", "max_model_len": ' + LONG + "}]}",
    "types": '{"data": [{"id": 3, "root": [], "max_model_len": "inf"}]}',
    "floats": '{"data": [{"id": "m", "max_model_len": 1e400}]}',
    "nobody": '{"data": []}',
    "html": "<html><body>hello</body></html>",
    "empty": "",
    "binary": "\x00\xff\xfe{",
    "error": '{"error": {"message": "[red]\\u001b[31m\\nno"}}',
    "list": "[1, 2]",
    "null": "null",
}


class Servers:
    """`urls`: the server's address with each kind of answer as a path; every one is answered."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        port = self._socket.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        kinds = (
            *WRONG,
            "good",
            "status500",
            "redirect",
            "cut",
            "endless",
            "drip",
            "headers",
            "nohttp",
        )
        self.urls = [f"{self.base}/{kind}" for kind in kinds]
        self._ended = threading.Event()

    def serve(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _talk(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, IndexError):
            stream = connection.makefile("rb")
            while head := stream.readline().split():
                length = 0
                while (line := stream.readline().strip()) != b"":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                stream.read(length)
                if not self._answer(connection, head[1].decode()):
                    return

    def _answer(self, connection: socket.socket, path: str) -> bool:
        """Whether the connection is still good for more."""
        kind = path.strip("/").split("/")[0]
        if kind in ("cut", "endless", "drip", "headers", "nohttp"):
            self._never_ending(connection, kind)
            return False
        body = WRONG.get(kind, MODELS if path.endswith("models") else GOOD).encode(
            "latin-1", "replace"
        )
        status = {"status500": "500 [red]", "redirect": f"302 Found\r\nLocation: {path}"}.get(
            kind, "200 OK"
        )
        connection.sendall(
            f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        return True

    def _never_ending(self, connection: socket.socket, kind: str) -> None:
        if kind == "nohttp":
            connection.sendall(b"SSH-2.0-nothing\r\n")
            return
        if kind == "cut":
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:a 1\n")
            return
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        connection.sendall(b"X: 1\r\n" if kind == "headers" else b"\r\n")
        chunk = {"endless": b"vllm:a 1\n" * 10_000, "headers": b"X: 1\r\n"}.get(kind, b"v")
        while not self._ended.is_set():
            connection.sendall(chunk)
            if kind == "drip":
                self._ended.wait(0.05)


@contextlib.contextmanager
def servers() -> Iterator[Servers]:
    """They listen until the block is left."""
    made = Servers()
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join()
