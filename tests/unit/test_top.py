"""`continuum top` against a small HTTP server that answers /metrics as a vLLM server does."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner, Result

from continuum_connector.errors import ToldError
from continuum_connector.observe.account import METRICS, WIRE_KEYS, Kind
from continuum_connector.tools.cli.app import app
from continuum_connector.tools.cli.server import Scrape, Server
from continuum_connector.tools.cli.top import WINDOW_S, Watch, screen

ROOT = Path(__file__).resolve().parents[2]
MAIN = "from continuum_connector.tools.cli import main; main()"
HOST = 'engine="0",model_name="tiny"'
VLLM = {
    f"vllm:num_requests_running{{{HOST}}}": 3.0,
    f"vllm:num_requests_waiting{{{HOST}}}": 2.0,
    f"vllm:kv_cache_usage_perc{{{HOST}}}": 0.6,
    f"vllm:prompt_tokens_total{{{HOST}}}": 0.0,
    f"vllm:generation_tokens_total{{{HOST}}}": 0.0,
    f"vllm:prefix_cache_queries_total{{{HOST}}}": 0.0,
    f"vllm:prefix_cache_hits_total{{{HOST}}}": 0.0,
}
LATER: dict[str, float] = {  # two seconds after zero
    "prompt_tokens": 1000,
    "hit_tokens{vram}": 500,
    "hit_tokens{dram}": 250,
    "tokens_against_stock{only_ours}": 600,
    "tokens_against_stock{stock_too}": 150,
    "tokens_against_stock{only_stock}": 20,
    "decisions{pin}": 3,
    "decisions{free}": 1,
    "pins_started": 3,
    "pins_live": 2,
    "switched_on": 1,
    "vram_blocks": 100,
    "pinned_blocks": 20,
    "held_blocks": 30,
    "pins_ended{returned}": 3,
    "pins_ended{expired}": 1,
    "tier_up": 1,
    "dram_capacity_blocks": 50,
    "dram_wanted_blocks": 100,
    "dram_blocks{ready}": 20,
    "dram_blocks{writing}": 5,
    "dram_used_bytes": 25 * 2**20,
    "transfers_in_flight{store}": 1,
    "stores{done}": 4,
    "stores{failed}": 1,
    "stored_bytes": 4_000_000_000,
    "outcomes{pin_in_time}": 6,
    "outcomes{pin_never}": 3,
    "outcomes{free_recomputed}": 1,
}


DISK: dict[str, float] = {  # and with a disk
    "hit_tokens{dram}": 100,
    "hit_tokens{disk}": 150,
    "disk_wanted_bytes": 100 * 2**30,
    "disk_up": 1,
    "disk_capacity_blocks": 1000,
    "disk_blocks{ready}": 240,
    "disk_blocks{writing}": 10,
    "disk_used_bytes": 25 * 2**30,
    "disk_budget_fill": 0.4,
    "disk_unsaved_blocks": 24,
    "disk_read_bytes": 6_000_000_000,
    "disk_written_bytes": 2_000_000_000,
    "reads{done}": 9,
    "reads{cancelled}": 1,
    "read_seconds": 10,
    "transfers_in_flight{read}": 2,
    "writes{done}": 4,
    "write_seconds": 4,
}


def ours(values: dict[str, float], labels: str = HOST) -> dict[str, float]:
    """Every series of the connector, at 0 but for `values`, by wire key."""
    found: dict[str, float] = {}
    for text, key in WIRE_KEYS.items():
        own = f',{key.metric.label}="{key.label}"' if key.label else ""
        value = float(values.get(text, 0.0))
        name = key.metric.full_name
        if key.metric.kind is Kind.HISTOGRAM:
            found[f"{name}_count{{{labels}{own}}}"] = value
            found[f"{name}_sum{{{labels}{own}}}"] = value * 0.25
        else:
            total = "_total" if key.metric.kind is Kind.COUNTER else ""
            found[f"{name}{total}{{{labels}{own}}}"] = value
    return found


def text_of(*samples: dict[str, float]) -> str:
    merged = {name: value for each in samples for name, value in each.items()}
    return "".join(f"{name} {value}\n" for name, value in merged.items())


Seen = tuple[Scrape, Scrape]


def between(before: str, after: str, interval_s: float = 2.0) -> Seen:
    """What a Watch shows that saw these two answers."""
    first, now = Scrape.parse(before, 10.0), Scrape.parse(after, 10.0 + interval_s)
    return now, now.since(first)


def two(later: dict[str, float], vllm: dict[str, float] | None = None) -> Seen:
    """A server on which `later` happened within two seconds."""
    return between(text_of(VLLM, ours({})), text_of(VLLM | (vllm or {}), ours(later)))


def of_engines(one: dict[str, float], other: dict[str, float], usage: float = 0.6) -> Seen:
    """A server of two engines, with what happened to either within two seconds."""
    labels = HOST.replace('"0"', '"1"')
    vllm = {name.replace('engine="0"', 'engine="1"'): value for name, value in VLLM.items()}
    vllm[f"vllm:kv_cache_usage_perc{{{labels}}}"] = usage
    return between(text_of(VLLM), text_of(VLLM, vllm, ours(one), ours(other, labels)))


def drawn(seen: Seen | None, trouble: str = "", width: int = 80) -> list[str]:
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    console.print(screen("http://gpu-7:8000", seen, trouble))
    return [line.rstrip() for line in console.export_text().splitlines()]


def said(seen: Seen) -> str:
    """All words of the screen."""
    return " ".join(" ".join(drawn(seen)).split())


# --- the screen -------------------------------------------------------------------------
GOLDEN = """\
continuum top  http://gpu-7:8000  tiny  on

VRAM        ████████████░░░░░░░░  60 %:  requests 30 %  stores 10 %  pins 20 %
DRAM        ██████████░░░░░░░░░░  50 %  25.0 MiB  50 of 100 blocks wanted
prompts     ████████████████████  VRAM 50 %  DRAM 25 %  computed 25 %

requests    3 running  2 waiting  0 done/s  0 preempted/s
tokens/s    500 of prompts  7 generated  only ours 60 %  stock too 15 %
decisions/s 2:  pin 1.5  offload 0  free 0.5
pins        2 live  1.5 new/s  returned 75 %  expired 25 %
stores      1 in flight  2/s  2 GB/s  0.25 s each  1 not done
loads       0 in flight  0/s  0 GB/s
lost by     pin never 30 %  free recomputed 10 %  of 10 decisions
our hooks   25 % of the time

Rates are of the last 2 s. Ctrl-C ends.
"""


def test_two_scrapes_become_a_screen_of_rates_and_shares() -> None:
    grown = {f"vllm:{name}_tokens_total{{{HOST}}}": num for name, num in TOKENS.items()}
    before = {"hook_seconds{get_finished}": 8.0, "pins_started": 5, "prompt_tokens": 100}
    later = (
        LATER
        | {"store_seconds": 4.0}
        | {name: LATER.get(name, 2.0) + n for name, n in before.items()}
    )
    seen = between(text_of(VLLM, ours(before)), text_of(VLLM | grown, ours(later)))
    assert drawn(seen) == GOLDEN.splitlines()


TOKENS = {"prompt": 1000.0, "generation": 14.0}


def test_what_was_lost_is_told_or_that_nothing_was() -> None:
    assert "lost by nothing of 6 decisions" in said(two({"outcomes{pin_in_time}": 6}))
    assert "lost by nothing of 0 decisions" in said(two({}))


def test_of_a_disk_it_says_how_full_it_is_what_it_moves_and_what_is_left_to_write() -> None:
    text = "\n".join(drawn(two(LATER | DISK)))
    assert "disk        █████░░░░░░░░░░░░░░░  25 %  25.0 GiB  read 3 GB/s  written 1 GB/s" in text
    assert "            budget 40 %  12 lost unwritten/s" in text
    assert "VRAM 50 %  DRAM 10 %  disk 15 %  computed 25 %" in text


def test_without_a_disk_nothing_is_said_of_one() -> None:
    assert "disk" not in said(two(LATER))


def test_the_gate_is_told_of_where_it_follows_programs() -> None:
    assert "gate" not in said(two(LATER))
    held = {"gate_held": 2, "gate_opened{fits}": 5, "gate_opened{deadline}": 7}
    held |= {"working_set_programs": 12, "working_set_blocks": 140}
    text = said(two(LATER | held))
    assert "gate 12 under way want 140 % of VRAM a cycle 2 held deadline 7 fits 5" in text
    few = {"working_set_programs": 1, "working_set_blocks": 5}
    assert "gate 1 under way want 5.0 % of VRAM a cycle 0 held" in said(two(LATER | few))


def test_a_disk_that_is_silent_wrong_or_gone_says_so() -> None:
    bad = {"disk_oldest_op_seconds": 31, "disk_failures{corrupt}": 1, "disk_failures{eio}": 2}
    assert "silent for 31 s 3 errors" in said(two(LATER | DISK | bad))
    assert "silent" not in said(two(LATER | DISK | {"disk_oldest_op_seconds": 0.5}))
    gone = said(two(LATER | DISK | {"disk_up": 0}))
    assert "disk none: the log says why; CONTINUUM_DISK_BYTES sets its size" in gone


def test_of_several_engines_the_disk_that_is_worst_off_is_told() -> None:
    worse = LATER | DISK | {"disk_up": 0, "disk_budget_fill": 0.1, "disk_oldest_op_seconds": 9}
    text = said(of_engines(LATER | DISK, worse))
    assert "budget 10 %" in text
    assert "silent for 9 s" in text
    assert "none on 1 of 2 engines" in text


def test_whether_it_is_switched_off_is_counted_by_engine() -> None:
    assert "tiny  off: the server's log says why" in drawn(two({}))[0]
    assert "tiny  on" in drawn(two({"switched_on": 1}))[0]
    half = drawn(of_engines(LATER, LATER | {"switched_on": 0}))[0]
    assert "tiny  2 engines  off on 1: the server's log" in half


def test_a_counter_that_fell_began_anew() -> None:
    before, after = (text_of(VLLM, ours({"decisions{pin}": num})) for num in (100, 6))
    assert "decisions/s 3: pin 3" in said(between(before, after))


def test_engines_are_summed_and_their_usage_is_a_mean() -> None:
    text = said(of_engines(LATER, LATER, usage=0.2))
    assert "40 %: requests 10 % stores 10 % pins 20 %" in text
    assert "6 running" in text
    assert "50.0 MiB 100 of 200 blocks wanted" in text


def test_an_engine_without_its_tier_is_counted_and_is_not_a_tier_that_grows() -> None:
    up = LATER | {"dram_capacity_blocks": 100}
    text = said(of_engines(up, up | {"tier_up": 0, "dram_capacity_blocks": 0}))
    assert "100 of 200 blocks wanted" in text
    assert "none on 1 of 2 engines" in text
    assert "none on" not in said(two(LATER))
    assert "DRAM none: the log says why" in said(two({}))


def test_a_turn_that_is_looked_up_twice_leaves_nothing_below_zero() -> None:
    twice = LATER | {"hit_tokens{vram}": 900, "hit_tokens{dram}": 200}
    assert "VRAM 90 % DRAM 20 % computed 0 %" in said(two(twice))


def test_every_metric_that_is_read_is_one_that_is_published() -> None:
    """A renamed metric would be a 0 for ever."""
    published = {metric.name for metric in METRICS}
    source = (ROOT / "continuum_connector" / "tools" / "cli" / "top.py").read_text()
    read = set(re.findall(r'"continuum:(\w+?)(?:_total|_sum|_count)?"', source))
    assert len(read) > 12
    assert read <= published


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(ToldError, match="not in Prometheus' format"):
        Scrape.parse("<html>a page</html>", 0.0)


def test_what_is_no_sample_is_left_out_however_long_its_line() -> None:
    labels = ",".join(f'a{index}="b"' for index in range(200_000))
    odd = [f"continuum:programs{{{labels}}} 1", "continuum:programs NaN", "vllm:x 1e300", "oops"]
    odd += ["# HELP continuum:programs x", '{"error": 1}', 'continuum:pins_live{engine="0" 7']
    text = "\n".join([*odd, 'continuum:pins_live{engine="0",model_name="a\\"}, b"} 3 1700000000'])
    found = Scrape.parse(text, 0.0)
    assert found.total("continuum:pins_live", engine="0") == 3.0
    assert found.total("continuum:programs") == 1.0
    assert {*found.samples} == {"continuum:programs", "continuum:pins_live"}


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits_a_narrow_terminal_at_its_fullest(width: int) -> None:
    causes = {f"pins_ended{{{cause}}}": 12345.0 for cause in ("returned", "expired", "pressure")}
    hooks = {"hook_seconds{get_num_new_matched_tokens}": 9, "hook_seconds{request_finished}": 8}
    lines = drawn(two(LATER | DISK | causes | hooks), "no answer\nSo since", width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    assert lines[1:3] == ["no answer", "So since"]


# --- watching ---------------------------------------------------------------------------
class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.num_scrapes = 0
        self.seen = threading.Event()
        self.status = 200
        self.answer: Callable[[int], str] = lambda n: text_of(VLLM, ours({"decisions{pin}": n}))
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.server.num_scrapes += 1
        body = self.server.answer(self.server.num_scrapes).encode()
        self.send_response(self.server.status if self.path == "/metrics" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.server.seen.set()

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """`top` sets handlers of its own, which a process that goes on must not keep."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def test_a_server_that_goes_is_missed_since_then_and_found_again(server: FakeServer) -> None:
    watch = Watch(Server(server.url, timeout_s=5.0))
    watch.look(0.0, "12:00:00")
    watch.look(2.0, "12:00:02")
    assert watch.shown is not None
    assert not watch.trouble
    before, port = watch.shown, server.server_port
    server.close()
    watch.look(4.0, "12:00:04")
    watch.look(9.0, "12:00:09")
    assert "no answer from" in watch.trouble
    assert watch.shown is before
    assert watch.trouble.endswith("\nSo since 12:00:04; asking again.")
    again = FakeServer(port)
    watch.look(11.0, "12:00:11")
    watch.look(13.0, "12:00:13")
    again.close()
    assert not watch.trouble
    assert watch.shown is not before
    assert watch.shown[1].at == 2.0


def test_rates_are_of_the_last_seconds_however_short_the_interval(server: FakeServer) -> None:
    watch = Watch(Server(server.url))
    for tenth in range(300):
        watch.look(tenth / 10, "")
    assert watch.shown is not None
    assert watch.shown[1].at == pytest.approx(WINDOW_S)


# --- the command ------------------------------------------------------------------------
def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["top", *args])


def test_where_the_output_is_no_terminal_there_is_one_look(server: FakeServer) -> None:
    result = run(server.url, "--interval", "0.1")
    assert result.exit_code == 0
    assert "decisions/s" in result.output
    assert server.num_scrapes == 2


def test_no_server_is_one_sentence_and_status_1() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        result = run(f"http://127.0.0.1:{probe.getsockname()[1]}", "--once")
    assert result.exit_code == 1
    assert result.output.startswith("continuum top: no answer from")


def test_without_the_connector_it_says_how_to_get_it(server: FakeServer) -> None:
    server.answer = lambda _: text_of(VLLM)
    result = run(server.url, "--once")
    assert result.exit_code == 1
    assert "ContinuumConnector does not run there" in result.output
    assert "--kv-transfer-config" in result.output


def test_a_server_without_metrics_is_named(server: FakeServer) -> None:
    server.status = 404
    result = run(server.url, "--once")
    assert result.exit_code == 1
    assert "HTTP 404; is this a vLLM server?" in result.output


def test_ctrl_c_ends_it_without_a_traceback(server: FakeServer) -> None:
    words = [sys.executable, "-c", MAIN, "top", server.url, "--interval", "60"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert server.seen.wait(60)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


FINALIZED = """
import signal, sys
from continuum_connector.tools.cli import server
class Response:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
parse = server.Scrape.parse
server.Scrape.parse = lambda *args: (Response(), parse(*args))[1]
sys.unraisablehook = lambda *_: None  # files drop it silently
"""


def test_ctrl_c_ends_it_also_while_python_drops_what_is_raised(server: FakeServer) -> None:
    words = [sys.executable, "-c", FINALIZED + MAIN, "top", server.url, "--interval", "60"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, capture_output=True, env=environ, text=True, timeout=50)
    assert (ended.returncode, ended.stdout + ended.stderr) == (130, "")


# --- a real terminal --------------------------------------------------------------------
class Terminal:
    """tmux, on a socket of its own. `until` reads the screen until it looks so."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-f", os.devnull, "-S", str(folder / "tmux")]

    def start(self, command: str, size: tuple[int, int] = (80, 24)) -> None:
        """A shell that runs `command` and then says how it ended."""
        line = f"trap : INT; {command}; echo ended with $?; read never"
        width, height = map(str, size)
        self._do("new-session", "-d", "-x", width, "-y", height, "sh", "-c", line)

    def until(self, looks: Callable[[str], bool], alternate: bool | None = None) -> str:
        deadline = time.monotonic() + 30
        while True:
            text = self._do("capture-pane", "-p")
            is_alternate = self._do("display-message", "-p", "#{alternate_on}").strip() == "1"
            if looks(text) and alternate in (None, is_alternate):
                return text
            assert time.monotonic() < deadline, text

    def keys(self, *keys: str) -> None:
        self._do("send-keys", *keys)

    def cursor_is_shown(self) -> bool:
        return self._do("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def child(self) -> int:
        """The process that the shell runs."""
        shell = self._do("display-message", "-p", "#{pane_pid}").strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)

    def _do(self, *what: str) -> str:
        done = subprocess.run([*self._tmux, *what], check=True, capture_output=True, text=True)
        return done.stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")
    one = Terminal(tmp_path)
    yield one
    one.close()


def command(*args: str) -> str:
    return f"PYTHONPATH={ROOT} {sys.executable} -c '{MAIN}' top {' '.join(args)}"


def test_in_a_terminal_it_lives_survives_the_server_and_leaves_it_clean(
    server: FakeServer, terminal: Terminal
) -> None:
    terminal.start(command(server.url, "--interval", "0.1"))
    text = terminal.until(lambda text: "decisions/s" in text, alternate=True)
    assert "3 running  2 waiting" in text
    assert "Ctrl-C ends" in text
    port = server.server_port
    server.close()
    text = terminal.until(lambda text: "So since" in text, alternate=True)
    assert "no answer from" in text
    assert "3 running  2 waiting" in text
    again = FakeServer(port)
    terminal.until(lambda text: "So since" not in text, alternate=True)
    terminal.keys("C-c")
    text = terminal.until(lambda text: "ended with 130" in text, alternate=False)
    again.close()
    assert "Traceback" not in text
    assert "decisions/s" not in text
    assert terminal.cursor_is_shown()


def test_sigterm_leaves_the_terminal_clean_too(server: FakeServer, terminal: Terminal) -> None:
    terminal.start(command(server.url))
    terminal.until(lambda text: "VRAM" in text, alternate=True)
    os.kill(terminal.child(), signal.SIGTERM)
    assert "Traceback" not in terminal.until(lambda text: "ended with 143" in text, alternate=False)
