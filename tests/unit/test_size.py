"""`continuum size`: the formula, what it advises, and the table of deploy/sizing.md."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner, Result

from continuum_connector.tools.cli import size as command
from continuum_connector.tools.cli.app import app
from continuum_connector.tools.cli.size import (
    Load,
    Need,
    Overflow,
    Place,
    mean_gap,
)
from tests.unit import fake_machine as fake

GIB = 2**30
SIZING = Path(__file__).resolve().parents[2] / "deploy" / "sizing.md"


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["size", *words])


def load(programs: float) -> Load:
    return Load(context=1000, new_tokens=10, gap_s=8.0, turn_s=2.0, programs=programs)


def place(num_gpus: int = 1) -> Place:
    return Place(GIB, GIB / 100, vram_bytes=10 * GIB, num_gpus=num_gpus, pcie=10 * GIB)


def test_live_programs_by_littles_law() -> None:
    found = Load(1000, 10, gap_s=8.0, turn_s=2.0, arrivals=0.5, turns=20.0)
    assert found.live == 0.5 * 20 * 10
    assert found.turns_per_s == pytest.approx(10.0)  # arrivals x turns


def test_what_fits_in_vram_needs_no_dram() -> None:
    found = Need(load(8), place())
    assert (found.dram_bytes, found.loads, found.stores, found.share_vram) == (0, 0, 0, 1)


def test_vram_that_is_nearly_full_needs_dram_beside_it() -> None:
    found = Need(load(9), place())
    assert (found.dram_bytes, found.share_vram, found.loads) == (9 * GIB / 0.8, 1, 0)


def test_dram_holds_all_live_kv_and_a_quarter_more() -> None:
    found = Need(load(40), place())
    assert vars(found) == {
        "live_bytes": 40 * GIB,
        "num_in_vram": 10,
        "share_vram": 0.25,
        "dram_bytes": 50 * GIB,
        "loads": 4.0 * 0.75 * GIB,  # 4 turns per second, 3 of 4 from DRAM
        "stores": 4.0 * GIB / 100,
        "load_s": 0.1,
        "is_too_fast": False,
    }


def test_gpus_share_vram_and_links() -> None:
    one, two = Need(load(40), place()), Need(load(40), place(2))
    assert two.share_vram == 2 * one.share_vram
    assert two.load_s == one.load_s / 2
    assert two.stores == one.stores / 2
    assert two.dram_bytes == one.dram_bytes, "per node, not per GPU"


def test_loads_beyond_the_link_are_said() -> None:
    assert Need(load(200), place()).is_too_fast


# --- a disk below it ----------------------------------------------------------------------
def test_a_disk_holds_all_live_kv_for_in_time_everybody_leaves_dram() -> None:
    found = Overflow(load(40), place(), dram_bytes=25 * GIB, drive=4 * GIB)
    assert vars(found) == {
        "share": 0.5,  # 0.8 x 25 of 40
        "disk_bytes": 50 * GIB,
        "reads": 4.0 * 0.5 * GIB,
        "read_s": 0.25,
        "written": 4.0 * GIB / 100 * 86_400,
        "is_too_slow": False,
    }
    assert Overflow(load(40), place(), 25 * GIB, drive=2.4 * GIB).is_too_slow


def test_what_dram_holds_needs_no_disk() -> None:
    found = Overflow(load(40), place(), dram_bytes=50 * GIB, drive=GIB)
    assert (found.share, found.disk_bytes, found.reads, found.written) == (0, 0, 0, 0)


def test_vram_larger_than_dram_counts_in_its_place() -> None:
    small = Overflow(load(40), place(), dram_bytes=GIB, drive=GIB)
    assert small.share == 1 - 0.8 * 10 / 40


def test_the_mean_of_a_gap() -> None:
    assert mean_gap(9.0, 9.0) == 9.0
    assert mean_gap(9.0, 72.0) == pytest.approx(33.6, abs=0.1)
    assert mean_gap(9.0, 1.0) == 9.0, "a P90 below the median is none"


# --- the command --------------------------------------------------------------------------
def test_pins_are_enough_for_few() -> None:
    result = run("--bytes-per-token", "128KiB", "--context", "13000", "--programs", "10")
    assert result.exit_code == 0
    assert "Pins in VRAM are enough" in result.stdout
    assert "loads per GPU" not in result.stdout


def test_json() -> None:
    found = json.loads(run("--bytes-per-token", "1KiB", "--programs", "4000", "--json").stdout)
    assert found["dram_bytes"] == 4000 * 1024 * 122_000 / 0.8
    assert found["live_programs"] == 4000


AGENTS = ("--bytes-per-token", "128KiB", "--programs", "40")


@pytest.mark.parametrize(
    ("words", "parts", "not_there"),
    [
        ([], ["Serve with CONTINUUM_DRAM_BYTES=745GiB"], "disk"),
        (["--dram", "800GiB"], ["CONTINUUM_DRAM_BYTES=800GiB: no disk is needed"], "disk reads"),
        (
            ["--dram", "400GiB", "--drive", "20"],
            ["CONTINUUM_DISK_PATH=FOLDER CONTINUUM_DISK_BYTES=745GiB; the default", "covers 2% of"],
            "would hold",
        ),
        (["--dram", "200GiB"], ["would hold it, but reads take more than 80% of a"], "Serve with"),
        (
            ["--dram", "200GiB", "--new-tokens", "30"],
            ["disk_bytes a day, covers 100% of all new KV"],
            "Serve with",
        ),
    ],
)
def test_a_disk_is_reckoned_where_it_is_said_how_much_dram_there_is(
    words: list[str], parts: list[str], not_there: str
) -> None:
    result = run(*AGENTS, *words)
    assert result.exit_code == 0
    assert [part for part in parts if part not in result.stdout] == []
    assert not_there not in result.stdout.replace("take more", "")


def test_few_agents_need_no_disk_whatever_dram_there_is() -> None:
    result = run("--bytes-per-token", "1KiB", "--programs", "4", "--dram", "1GiB")
    assert "Pins in VRAM are enough" in result.stdout
    assert "disk" not in result.stdout


def test_the_disk_in_json() -> None:
    assert json.loads(run(*AGENTS, "--json").stdout)["disk"] is None
    disk = json.loads(run(*AGENTS, "--dram", "1GiB", "--json").stdout)["disk"]
    assert disk["disk_bytes"] == 40 * 128 * 1024 * 122_000 / 0.8


def answered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **vllm: Any) -> list[tuple[str, ...]]:
    """A machine whose vLLM says this; what it was asked."""
    asked: list[tuple[str, ...]] = []
    machine = fake.make(tmp_path / "machine", vllm=vllm)

    def ask(about: str, *words: str) -> dict[str, Any]:
        asked.append(words)
        return machine.ask(about, *words)

    monkeypatch.setattr(command, "this_machine", lambda _environ: replace(machine, ask=ask))
    return asked


ONE = ["--programs", "1", "--context", "1024", "--json"]


def test_vllm_says_what_a_context_takes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answered(monkeypatch, tmp_path, **fake.VLLM, kv={**fake.KV, "num_ranks": 2})
    told = json.loads(run(*ONE, "--", "vllm", "serve", "m", "-tp", "2").stdout)
    assert told["context_bytes"] == 1024 * 32 * 4096
    assert told["rests_on"] == ("vLLM 0.32.0, its own layers on sm_90: 32 layers of full attention")
    assert told["num_gpus"] == 2
    assert asked == [("m", "-tp", "2")]


def test_a_pasted_command_is_asked_about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answered(monkeypatch, tmp_path, **fake.VLLM, kv=fake.KV)
    pasted = "docker run vllm/vllm-openai --model m -tp 2 -pp 2 --port $PORT"
    result = run("--programs", "1", "--", pasted)
    assert asked == [("--model", "m", "-tp", "2", "-pp", "2")]
    assert "KV as of" in result.stdout
    assert "not seen: $PORT" in result.stderr


def test_a_model_that_only_a_shell_knows_is_not_reckoned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered(monkeypatch, tmp_path, **fake.VLLM, kv=fake.KV, options={"model": "a/default"})
    result = run("--programs", "1", "--", "vllm serve $MODEL --enforce-eager")
    assert (result.exit_code, "give --model" in result.stderr) == (1, True)


def test_a_model_that_is_not_named_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered(monkeypatch, tmp_path, **fake.VLLM)
    result = run("--programs", "1", "--", "vllm serve")
    assert (result.exit_code, "model: none was named" in result.stderr) == (1, True)


@pytest.mark.parametrize(
    ("fields", "words", "part"),
    [
        ({"no_disk": "no disk tier for KV groups with windows"}, ["--dram", "1GiB"], "--dram out"),
        ({"aside": "KV group 1 is CrossAttentionSpec"}, [], "no DRAM would be used"),
        ({"no_tier": "no DRAM tier with nvfp4"}, [], "no DRAM would be used"),
    ],
)
def test_what_is_not_served_is_not_reckoned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: Any, words: list[str], part: str
) -> None:
    answered(monkeypatch, tmp_path, **fake.VLLM, kv={**fake.KV, **fields})
    result = run("--programs", "1", "--model", "m", *words)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert part in said
    assert next(iter(fields.values())) in said


SMALL = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 64}
SMALL |= {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("vllm", "part"),
    [
        (
            {"not_seen": "layers: No module named tilelang"},
            "this vLLM cannot say here what its layers keep: layers: No",
        ),
        ({"refused": "71 heads"}, "vLLM refuses this: 71 heads"),
    ],
)
def test_what_vllm_does_not_say_is_not_made_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, vllm: dict[str, str], part: str
) -> None:
    answered(monkeypatch, tmp_path, **fake.VLLM, **vllm)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    result = run("--programs", "1", "--model", str(tmp_path))
    assert (result.exit_code, part in result.stderr) == (1, True)


def test_without_vllm_config_json_says_what_it_proves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered(monkeypatch, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "llama"}))
    for dtype, num_bytes in (("auto", 1024), ("fp8", 512)):
        served = ["--", "vllm", "serve", str(tmp_path), "--kv-cache-dtype", dtype]
        told = json.loads(run(*ONE, *served).stdout)
        assert told["context_bytes"] == 1024 * num_bytes
        assert told["rests_on"] == "config.json alone, without vLLM"
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "model_type": "falcon_h1"}))
    result = run(*ONE, "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "only vLLM knows what its layers keep" in result.stderr


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--bytes-per-token", "1KiB"], "how many agents?"),
        (["--programs", "1"], "give --model, a command or --bytes-per-token"),
        (["--programs", "1", "--model", "m", "--bytes-per-token", "1"], "one of them"),
        (["--programs", "1", "--gpus", "2", "--", "vllm", "serve", "m"], "has its own number"),
        (["--programs", "1", "--bytes-per-token", "big"], "'big' is not a size"),
        (["--programs", "1", "--bytes-per-token", "0"], "'0' is not a size"),
        (["--programs", "1", "--model", "/nowhere"], "give --model, or --bytes-per-token instead"),
    ],
)
def test_what_cannot_be_reckoned_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], part: str
) -> None:
    answered(monkeypatch, tmp_path)
    result = run(*words)
    assert result.exit_code == 1
    assert part in result.stderr


# --- deploy/sizing.md ---------------------------------------------------------------------
def commands() -> list[list[str]]:
    """The `continuum size` of every fenced block: first the two whose output is shown, then one
    for each row of the table."""
    blocks = re.findall(r"```bash\n(.*?)```", SIZING.read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("continuum size")]


def test_the_rows_of_the_table_are_what_the_commands_print() -> None:
    rows = re.findall(r"^\| \d.*\|$", SIZING.read_text(), re.MULTILINE)
    found = []
    for number, words in enumerate(commands()[2:], start=1):
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, words
        found.append(row(number, json.loads(result.stdout)))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert [[line[0], *line[2:]] for line in cells] == found


def row(number: int, found: dict[str, float]) -> list[str]:
    """A row of the table, without its second cell, which says who they are."""
    dram = -(-found["dram_bytes"] // GIB)
    return [
        str(number),
        f"{found['context_bytes'] / GIB:.1f} GiB",
        f"{found['live_programs']:.0f}",
        f"{found['live_bytes'] / GIB:.0f} GiB",
        f"{found['share_vram']:.0%}",
        f"{dram:.0f} GiB",
        f"{found['loads'] / 1e9:.2f}",
        f"{found['load_s']:.2f} s",
    ]


def test_the_outputs_that_are_shown_are_what_is_printed() -> None:
    shown = re.findall(r"```text\n(.*?)```", SIZING.read_text(), re.DOTALL)
    assert len(shown) == 2
    for words, text in zip(commands(), shown, strict=False):
        printed = CliRunner().invoke(app, words).stdout
        assert [line.rstrip() for line in printed.splitlines()] == text.rstrip().splitlines()


@pytest.mark.parametrize("line", re.findall(r"continuum size (.*)", command.size.__doc__ or ""))
def test_the_examples_in_its_help_run(
    line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered(monkeypatch, tmp_path, **fake.VLLM, kv=fake.KV)
    result = run(*shlex.split(line.replace("MODEL", str(tmp_path))))
    assert result.exit_code == 0
    assert "live programs" in result.stdout
