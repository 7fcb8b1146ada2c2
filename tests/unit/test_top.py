"""`continuum top` against a small HTTP server that answers /metrics as a vLLM server does."""

from __future__ import annotations

import io
import json
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

from continuum_connector.observe.metric import Kind
from continuum_connector.observe.metric_table import METRICS, WIRE_KEYS
from continuum_connector.tools.cli.app import app
from continuum_connector.tools.cli.rates import Numbers, Scrape, numbers
from continuum_connector.tools.cli.server import CommandError, Server
from continuum_connector.tools.cli.top import WINDOW_S, Watch
from continuum_connector.tools.cli.top_view import screen

ROOT = Path(__file__).resolve().parents[2]
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
    "forecasts{90-100}": 100,
    "forecasts_true{90-100}": 93,
    "forecasts{40-50}": 20,
    "forecasts_true{40-50}": 15,
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


def two(later: dict[str, float], vllm: dict[str, float] | None = None) -> Numbers:
    """The numbers of a server on which `later` happened within two seconds."""
    before = Scrape.parse(text_of(VLLM, ours({})), 10.0)
    return numbers(before, Scrape.parse(text_of(VLLM | (vllm or {}), ours(later)), 12.0))


# --- numbers ----------------------------------------------------------------------------
def test_two_scrapes_become_rates_and_shares() -> None:
    shown = two(LATER | {"store_seconds": 4.0, "hook_seconds{get_finished}": 2.0})
    kept = shown["kept"]
    assert kept is not None
    assert (shown["interval_s"], shown["served"]["num_running"], shown["served"]["models"]) == (
        2.0,
        3,
        ["tiny"],
    )
    against = {"only_ours": 0.6, "stock_too": 0.15, "only_stock": 0.02, "unknown": 0.0}
    assert kept["hit"] == {"vram": 0.5, "dram": 0.25, "disk": 0.0, "computed": 0.25} | against
    assert (kept["pinned"], kept["held_for_stores"], kept["num_pins"]) == (0.2, 0.1, 2)
    assert (kept["dram_used"], kept["dram_used_bytes"]) == (0.5, 25 * 2**20)
    assert kept["decisions_per_s"] == {"pin": 1.5, "offload": 0.0, "free": 0.5}
    assert kept["pins_ended"]["returned"] == 3
    assert (kept["stores"]["per_s"], kept["stores"]["bytes_per_s"], kept["stores"]["mean_s"]) == (
        2.0,
        2e9,
        0.25,
    )
    assert (kept["stores"]["in_flight"], kept["stores"]["num_bad"], kept["loads"]["mean_s"]) == (
        1,
        1,
        None,
    )
    assert [(one["name"], one["num"], one["share"]) for one in kept["worst"]] == [
        ("pin never", 3, 0.3),
        ("free recomputed", 1, 0.1),
    ]
    assert [(hook["name"], hook["busy"], hook["mean_s"]) for hook in kept["hooks"]] == [
        ("get_finished", 0.25, 0.25)
    ]


def test_the_worst_forecasts_are_those_that_add_most_to_the_error() -> None:
    """By hand: 93 of 100 are 90 to 100 %; 15 of 20 are 5 more than 50 %: so 5 of 120."""
    kept = two(LATER)["kept"]
    assert kept is not None
    worst = {"worst": "40-50", "came": 0.75, "num_worst": 20}
    assert kept["forecasts"] == {"num": 120, "error": pytest.approx(5 / 120), **worst}
    none = two({})["kept"]
    assert none is not None
    assert none["forecasts"] is None
    good = two(LATER | {"forecasts_true{40-50}": 9})
    assert "all 120 came as often as predicted" in "\n".join(drawn(good))


def test_of_a_disk_it_says_how_full_it_is_what_it_moves_and_what_is_left_to_write() -> None:
    kept = two(LATER | DISK)["kept"]
    assert kept is not None
    disk = kept["disk"]
    assert disk is not None
    of_tiers = {"vram": 0.5, "dram": 0.1, "disk": 0.15, "computed": 0.25}
    assert kept["hit"].items() >= of_tiers.items()
    assert (disk["used"], disk["used_bytes"]) == (0.25, 25 * 2**30)
    assert (disk["budget_fill"], disk["unsaved_per_s"], disk["num_down"]) == (0.4, 12.0, 0)
    assert (disk["reads"]["bytes_per_s"], disk["reads"]["in_flight"], disk["reads"]["num_bad"]) == (
        3e9,
        2,
        1,
    )
    assert (disk["writes"]["bytes_per_s"], disk["writes"]["mean_s"]) == (1e9, 0.25)
    text = "\n".join(drawn(two(LATER | DISK)))
    assert "disk        █████░░░░░░░░░░░░░░░  25 %  25 GiB  read 3 GB/s  written 1 GB/s" in text
    assert "            budget 40 %  12 lost unwritten/s" in text
    assert "VRAM 50 %  DRAM 10 %  disk 15 %  computed 25 %" in text


def test_without_a_disk_nothing_is_said_of_one() -> None:
    kept = two(LATER)["kept"]
    assert kept is not None
    assert kept["disk"] is None
    assert not [line for line in drawn(two(LATER)) if "disk" in line]


def test_epochs_are_told_of_where_there_were_any() -> None:
    assert not [line for line in drawn(two(LATER)) if "epochs" in line]
    begun = {"epochs{weights}": 3, "epochs{reset}": 1}
    assert "epochs weights 3 reset 1" in " ".join(" ".join(drawn(two(LATER | begun))).split())


def test_the_gate_is_told_of_where_it_follows_programs() -> None:
    assert not [line for line in drawn(two(LATER)) if "gate" in line]
    held = {"gate_held": 2, "gate_opened{fits_dram}": 5, "gate_opened{deadline}": 7}
    held |= {"working_set_programs": 12, "working_set_blocks": 140}
    text = " ".join(" ".join(drawn(two(LATER | held))).split())
    assert "gate 12 under way want 140 % of VRAM a cycle 2 held deadline 7 fits_dram 5" in text
    few = {"working_set_programs": 1, "working_set_blocks": 5}
    text = " ".join(" ".join(drawn(two(LATER | few))).split())
    assert "gate 1 under way want 5.0 % of VRAM a cycle 0 held" in text


def test_a_disk_that_is_silent_wrong_or_gone_says_so() -> None:
    bad = {"disk_oldest_op_seconds": 31, "disk_failures{corrupt}": 1, "disk_failures{eio}": 2}
    text = " ".join(" ".join(drawn(two(LATER | DISK | bad))).split())
    assert "silent for 31 s 3 errors" in text
    assert "silent" not in " ".join(drawn(two(LATER | DISK | {"disk_oldest_op_seconds": 0.5})))
    gone = " ".join(drawn(two(LATER | DISK | {"disk_up": 0})))
    assert "none yet, or it was given up: the server's log says which" in gone


def test_of_several_engines_the_disk_that_is_worst_off_is_told() -> None:
    other = HOST.replace('"0"', '"1"')
    vllm = {name.replace('engine="0"', 'engine="1"'): value for name, value in VLLM.items()}
    worse = LATER | DISK | {"disk_up": 0, "disk_budget_fill": 0.1, "disk_oldest_op_seconds": 9}
    scrape = Scrape.parse(text_of(VLLM, vllm, ours(LATER | DISK), ours(worse, other)), 0.0)
    shown = numbers(Scrape(-1.0, {}), scrape)
    assert shown["kept"] is not None
    assert shown["kept"]["disk"] is not None
    assert (shown["kept"]["disk"]["budget_fill"], shown["kept"]["disk"]["oldest_op_s"]) == (
        0.1,
        9.0,
    )
    assert "none on 1 of 2 engines" in " ".join(" ".join(drawn(shown)).split())


def test_whether_it_is_switched_off_is_counted_by_engine() -> None:
    for on, off in ((1, 0), (0, 1)):
        kept = two({"switched_on": on})["kept"]
        assert kept is not None
        assert kept["num_switched_off"] == off
    assert "tiny  off: the server's log says why" in drawn(two({}))[0]
    assert "tiny  on" in drawn(two({"switched_on": 1}))[0]


def test_a_counter_that_fell_began_anew() -> None:
    before = Scrape.parse(text_of(VLLM, ours({"decisions{pin}": 100})), 0.0)
    after = Scrape.parse(text_of(VLLM, ours({"decisions{pin}": 6})), 2.0)
    kept = numbers(before, after)["kept"]
    assert kept is not None
    assert kept["decisions_per_s"]["pin"] == 3.0


def test_engines_are_summed_and_their_usage_is_a_mean() -> None:
    other = HOST.replace('"0"', '"1"')
    vllm = {name.replace('engine="0"', 'engine="1"'): value for name, value in VLLM.items()}
    vllm[f"vllm:kv_cache_usage_perc{{{other}}}"] = 0.2
    one = Scrape.parse(text_of(VLLM, vllm, ours(LATER), ours(LATER, other)), 0.0)
    shown = numbers(Scrape(-1.0, {}), one)
    assert shown["kept"] is not None
    assert (shown["served"]["num_engines"], shown["served"]["num_running"]) == (2, 6)
    assert shown["served"]["vram_used"] == pytest.approx(0.4)
    assert shown["kept"]["pinned"] == 0.2


def test_an_engine_without_its_tier_is_counted_and_is_not_a_tier_that_grows() -> None:
    other = HOST.replace('"0"', '"1"')
    vllm = {name.replace('engine="0"', 'engine="1"'): value for name, value in VLLM.items()}
    up = LATER | {"dram_capacity_blocks": 100}
    down = up | {"tier_up": 0, "dram_capacity_blocks": 0}
    scrape = Scrape.parse(text_of(VLLM, vllm, ours(up), ours(down, other)), 0.0)
    shown = numbers(Scrape(-1.0, {}), scrape)
    assert shown["kept"] is not None
    assert shown["kept"]["num_without_tier"] == 1
    text = " ".join(" ".join(drawn(shown)).split())
    assert "100 of 200 blocks wanted" in text
    assert "no tier on 1 of 2 engines" in text
    assert "no tier on" not in " ".join(drawn(two(LATER)))


def test_every_metric_that_is_read_is_one_that_is_published() -> None:
    """A renamed metric would be a 0 for ever."""
    published = {metric.name for metric in METRICS}
    source = (ROOT / "continuum_connector" / "tools" / "cli" / "rates.py").read_text()
    read = set(re.findall(r'"continuum:(\w+?)(?:_total|_sum|_count)?"', source))
    assert len(read) > 12
    assert read <= published


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(CommandError, match="not in Prometheus' format"):
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


# --- the screen -------------------------------------------------------------------------
def drawn(shown: Numbers | None, trouble: str = "", width: int = 80) -> list[str]:
    console = Console(width=width, height=24, record=True, file=io.StringIO())
    console.print(screen("http://gpu-7:8000", shown, trouble))
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_fits_a_narrow_terminal_at_its_fullest(width: int) -> None:
    causes = {f"pins_ended{{{cause}}}": 12345.0 for cause in ("returned", "expired", "pressure")}
    hooks = {"hook_seconds{get_num_new_matched_tokens}": 9, "hook_seconds{request_finished}": 8}
    lines = drawn(two(LATER | DISK | causes | hooks), "no answer\nGone since", width)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "VRAM        ████████████░░░░░░░░  60 %:  requests 30 %  stores 10 %  pins 20 %" in text
    assert "4.2 % off  worst: of 20 with 40-50 % 75 % came" in text
    assert "pin never" in text
    assert "50 of 100 blocks wanted" in text


def test_without_the_connector_vllms_part_is_shown_and_how_to_get_ours() -> None:
    grown = {f"vllm:prefix_cache_queries_total{{{HOST}}}": 100.0}
    grown[f"vllm:prefix_cache_hits_total{{{HOST}}}"] = 40.0
    before, after = text_of(VLLM), text_of(VLLM | grown)
    shown = numbers(Scrape.parse(before, 0.0), Scrape.parse(after, 1.0))
    text = " ".join(drawn(shown))
    assert shown["kept"] is None
    assert "3 running  2 waiting" in text
    assert "40 % found in VRAM" in text
    assert "ContinuumConnector does not run there" in text
    assert "--kv-transfer-config" in text


# --- watching ---------------------------------------------------------------------------
class FakeServer(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.num_scrapes = 0
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

    def log_message(self, *args: Any) -> None:
        """Say nothing."""


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
    assert watch.gone == "Gone since 12:00:04, for 5 s by now; asking again."
    again = FakeServer(port)
    watch.look(11.0, "12:00:11")
    watch.look(13.0, "12:00:13")
    again.close()
    assert not watch.trouble
    assert not watch.gone
    assert watch.shown is not before
    assert watch.shown["interval_s"] == 2.0


def test_rates_are_of_the_last_seconds_however_short_the_interval(server: FakeServer) -> None:
    watch = Watch(Server(server.url))
    for tenth in range(300):
        watch.look(tenth / 10, "")
    assert watch.shown is not None
    assert watch.shown["interval_s"] == pytest.approx(WINDOW_S)


# --- the command ------------------------------------------------------------------------
def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["top", *args])


def test_once_as_json_is_one_object(server: FakeServer) -> None:
    result = run(server.url, "--once", "--json", "--interval", "0.1")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["served"]["num_running"] == 3
    assert told["trouble"] == ""
    assert told["kept"]["decisions_per_s"]["pin"] * told["interval_s"] == pytest.approx(1.0)


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


def test_a_server_without_metrics_is_named(server: FakeServer) -> None:
    server.status = 404
    result = run(server.url, "--once")
    assert result.exit_code == 1
    assert "HTTP 404; is this a vLLM server?" in result.output


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


MAIN = "from continuum_connector.tools.cli.entry import main; main()"


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
    text = terminal.until(lambda text: "Gone since" in text, alternate=True)
    assert "no answer from" in text
    assert "3 running  2 waiting" in text
    again = FakeServer(port)
    terminal.until(lambda text: "Gone since" not in text, alternate=True)
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
