"""What is typed: values that are fine, and values that are not, by the kind of option."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tests.ab_results import FACTORS, measured, run_of
from tests.fuzz.commands import Param

DEEP = "[" * 100_000
LONG = "9" * 5000
NAMES = (
    ":smile:",
    "[red]",
    "[/]",
    "[/nope]",
    "\x1b[31mred",
    "two\nlines",
    "\u202egnp.exe",
    "\udcff",
)
NUMBERS = (
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1" + "0" * 30,
    LONG,
    "1e-320",
    "0x10",
    "²",
    "",
)
NUMBERS += ("1_000", "٣", "1,5", " 1 ", "--", "1e18")
TEXTS = (
    *NAMES,
    *NUMBERS,
    "x" * 5000,
    "{",
    DEEP,
    '{"a": ' + LONG + "}",
    "null",
    "[]",
    ",,,",
    "=",
    "a=b",
)
TEXTS += (
    '{"a":NaN}',
    "poisson:inf",
    "poisson:1e12",
    "closed:" + LONG,
    "closed:1e3",
    "trace:",
    "a:b:c",
)
TEXTS += (
    "'unbalanced",
    "../../etc",
    "max",
    "64GiB",
    "1e999GiB",
    "0,0",
    "1000:30000",
    "5:1",
    "/",
    ".",
)
TEXTS += (
    "turns=1e400",
    "turns=",
    'turns="x"',
    "gaps=[]",
    "stock,",
    "stock",
    "H100",
    "report",
    "0/0",
    "1/0",
)
URLS = (
    *(
        "",
        "localhost",
        "http://",
        "file:///etc/passwd",
        "http://127.0.0.1:0",
        "http://127.0.0.1:99999",
    ),
    *(
        "http://no-such-host.invalid",
        "http://user:geheim@127.0.0.1:9",
        "user:geheim@host:1",
        "//u:geheim@h",
    ),
    *(
        "http://u:ge/heim@h",
        "http://[::1",
        "http://[::1]:1",
        "http://[v1.x]:1",
        "ftp://h",
        "http://h\n.x",
    ),
    *(
        "http://" + "a" * 70 + ".de",
        "http://ü.invalid:1",
        "http://127.0.0.1:x",
        "http://127.0.0.1:-1",
    ),
    *(
        "http://127.0.0.1:1/ü",
        "http://127.0.0.1:1/a b",
        "http://127.0.0.1:1/\udcff",
        "http://..:1",
        "http://%",
    ),
    *(
        "http://h:" + LONG,
        "http://127.0.0.1:1/?api_key=geheim",
        "https://127.0.0.1:1",
        "http://:80",
        "\x1b[31m",
    ),
    *("HTTP://127.0.0.1:1", "http:/127.0.0.1", "http://127.0.0.1:²", "http://xn--a.invalid"),
)
WIDTHS = ("0", "1", "-5", "80", "x", "²", "1" + "0" * 30, LONG, "", "5000", "200")

RECORD: dict[str, Any] = {
    "t": 1.0,
    "now": 1.0,
    "event": "arrive",
    "program": "p",
    "turn": 1,
    "tokens": 10,
    "gap_s": 1.0,
    "decision": "pin",
    "ttl_s": 3.0,
    "then": "store",
    "blocks": 2,
    "waited_s": 0.1,
    "held_s": 1.0,
    "outcome": "in_time",
    "hit_tokens": {"vram": 1, "dram": 2},
    "against_stock": {"only_ours": 1, "stock_too": 2, "only_stock": 3},
    "horizon_s": 9.0,
    "saved_s": 1.0,
    "known": {"p_in_time": 0.5, "tools": ["a"], "price": 1.0, "gaps_seen": 3, "prefill": 1.0},
    "values": {"pin": 1.0, "free": 0.0, "offload": 0.5},
    "cause": "returned",
    "reasons": ["x"],
    "policy": "adaptive",
    "block_bytes": 10,
    "seconds": 1.0,
    "why": "because",
    "steps": 7,
    "free_blocks": 90,
    "waiting": 3,
    "load_blocks": 5,
    "hook_s": 0.002,
    "hook_max_s": 0.001,
    "reason": "r",
    "on": True,
}
EVENTS = (
    "start",
    "arrive",
    "return",
    "admit",
    "preempt",
    "readmit",
    "decision",
    "outcome",
    "pin_end",
)
EVENTS += ("store", "load", "write", "read", "epoch", "tier_down", "switch")
EVENTS += ("disk_down", "stop", "nobody", "steps")
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    -1e308,
    10**18,
    10**30,
    "x",
    "",
    [],
    {},
    [1],
    {"a": 1},
    0.5,
)
ODD += (
    NAMES[0],
    NAMES[4],
    NAMES[5],
    NAMES[6],
    [None],
    {"vram": "x", "dram": -1},
    {"": None},
    2**53,
)


def odd(rng: random.Random, value: Any, chance: float = 0.15) -> Any:
    """The value with some of its parts turned into something else."""
    if rng.random() < chance:
        return rng.choice(ODD)
    if isinstance(value, dict):
        return {key: odd(rng, each, chance) for key, each in value.items() if rng.random() > 0.05}
    return [odd(rng, each, chance) for each in value] if isinstance(value, list) else value


def records(rng: random.Random, chance: float) -> str:
    """A trace of some programs: the kinds in an order of life, with odd values by chance."""
    lines = []
    for number in range(rng.randint(1, 40)):
        record = {
            **RECORD,
            "event": EVENTS[number % len(EVENTS)],
            "now": float(number),
            "turn": number // 9,
        }
        record |= {"program": rng.choice(("p", "job:q", *NAMES[:7]))}
        lines.append(json.dumps(odd(rng, record, chance)))
    return "\n".join(lines) + "\n"


CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "vocab_size": 30_000,
    "sliding_window": 128,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "sliding_window_pattern": 2,
    "text_config": {},
    "quantization_config": {"kv_cache_scheme": {"num_bits": 8}},
    "kv_lora_rank": None,
    "qk_rope_head_dim": 64,
    "index_topk": None,
    "use_sliding_window": True,
}


class Files:
    """Files, folders and other things that a path may name, below one folder."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self._folder, self._rng = folder, rng
        self.traces = [
            self._put(f"trace{i}.jsonl", records(rng, 0.0 if i < 2 else 0.03 * i))
            for i in range(12)
        ]
        self.traces.append(
            self._put("timestamps", json.dumps({"p": [{"job_arrival_time": 1.0}], "q": 3}))
        )
        self.models = [self._model(i) for i in range(12)]
        self.results = [self._result(i) for i in range(6)]
        self.workloads = [self._put(f"own{i}.toml", text) for i, text in enumerate(_TOML)]
        self.odd = self._odd()

    def _put(self, name: str, text: str | bytes) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))
        return path

    def _model(self, number: int) -> Path:
        text = json.dumps(odd(self._rng, CONFIG, 0.06 * number))
        text = {9: DEEP, 10: f'{{"num_hidden_layers": {LONG}}}', 11: "\x00{"}.get(number, text)
        return self._put(f"model{number}/config.json", text).parent

    def _result(self, number: int) -> Path:
        root = self._folder / f"result{number}"
        for arm in [*FACTORS][:2]:
            folder = measured(root, run_of(arm, repeat=0), FACTORS[arm])
            for name in (
                "run.json",
                "turns.jsonl",
                "programs.jsonl",
                "before.prom",
            ):
                if number and self._rng.random() < 0.2 * number:
                    self._spoil(folder / name)
        return root

    def _spoil(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(1 + len(data) // 200):
            if data:
                data[self._rng.randrange(len(data))] = self._rng.choice(b'\xff{}[]",:0e9\n-N')
        path.write_bytes(bytes(data))

    def _odd(self) -> list[Path]:
        put = self._put
        deep_record = b'{"event":"arrive","now":1,"x":' + b"[" * 100_000 + b"\n"
        good = self.traces[0].read_bytes()
        made = [
            *(put("empty", ""), put("newlines", "\n" * 99), put("binary", bytes(range(256)) * 99)),
            *(
                put("deep", DEEP),
                put("deep.jsonl", good + deep_record),
                put("giant", "x" * 3_000_000),
            ),
            *(
                put("digits", LONG),
                put("digits.jsonl", b'{"event":"x","now":' + LONG.encode() + b"}\n" + good),
            ),
            *(
                put(
                    "huge.jsonl", '{"event":"arrive","now":1e400}\n{"event":"arrive","now":1e308}\n'
                ),
            ),
            *(
                put("nan.json", '{"p": [{"job_arrival_time": NaN}]}'),
                put("list.json", "[]"),
                put("utf16", "\ufeffa".encode("utf-16")),
            ),
            *(
                put("name [red] :smile: \x1b[31m", good),
                put("lone\udcff", good) if os.name == "posix" else put("n", good),
            ),
            *(
                put("closed", good),
                put("x.gz", b"\x1f\x8b" + b"z" * 50),
                put("x.toml", "x = " + DEEP[:20_000]),
            ),
        ]
        (self._folder / "closed").chmod(0)
        pipe = self._folder / "pipe"
        os.mkfifo(pipe)
        (self._folder / "folder").mkdir()
        far = self._folder / "nowhere" / "x"
        loop = self._folder / "loop"
        loop.symlink_to(loop)
        long = self._folder / ("n" * 300)
        special = map(
            Path, ("/dev/full", "/dev/null", "/dev/zero", "/proc/self/mem", "/", "", "/dev/full/x")
        )
        return [*made, pipe, self._folder / "folder", far, loop, long, *special]


_TOML = (
    'name = "a"\nturns = 2\nfirst_tokens = 50\nprograms = 1\narrivals = "turns"\n',
    'workload = "agents"\nturns = 2\n',
    "workload = 3\n",
    'name = "a"\nturns = [1, 99999999999999999999]\n',
    'name = "a"\npause_s = nan\nduration_s = inf\n',
    'name = "a"\npause_s = {median = inf, sigma = nan}\n',
    'name = "a"\narrivals = "poisson:nan"\nprograms = 999999999999\n',
    "x = " + "[" * 5000,
    "x = 9" * 9,
    "",
    "\x00",
)

Pool = Sequence[str]


class Words:
    """Draws the words of a command."""

    def __init__(self, rng: random.Random, files: Files, servers: Pool) -> None:
        self._rng, self._files, self._servers = rng, files, servers

    def of(self, params: Sequence[Param]) -> list[str]:
        """What must be given mostly is; of the rest a few. Half of the values are fine ones."""
        rng = self._rng
        words: list[str] = []
        for param in params:
            if rng.random() < (0.97 if param.required else min(0.5, 3 / len(params))):
                words += self._one(param)
        if rng.random() < 0.03:
            words.append(
                rng.choice(("--no-such-option", "--help", "extra", "-", "--", "-x", "--=", ""))
            )
        return [word.replace("\x00", "") for word in words]  # no process can be given one

    def _one(self, param: Param) -> list[str]:
        rng = self._rng
        if param.kind == "flag":
            return [param.flag]
        values = [self._value(param) for _ in range(rng.randint(1, 3) if param.many else 1)]
        if not param.flag:
            return values
        return [param.flag, *values] if rng.random() < 0.9 else [f"{param.flag}={values[0]}"]

    def _value(self, param: Param) -> str:
        rng = self._rng
        if rng.random() < 0.04:
            return rng.choice(TEXTS)
        if param.kind in ("int", "float"):
            fine = (param.default or "2", "1", "3", "40")
            return rng.choice(fine) if rng.random() < 0.5 else rng.choice(NUMBERS)
        if param.kind == "choice":
            return rng.choice((*param.choices, "", ":smile:", LONG))
        if param.name in ("url",):
            return rng.choice(URLS) if rng.random() < 0.4 else rng.choice(list(self._servers))
        return (
            self._path(param) if param.kind == "path" or rng.random() < 0.15 else self._text(param)
        )

    def _path(self, param: Param) -> str:
        files, rng = self._files, self._rng
        if rng.random() < 0.4:
            return str(rng.choice(files.odd))
        if param.name in ("out", "report", "json", "plot", "folder"):
            return f"new{rng.randrange(10**9)}" + rng.choice(("", ".html", ".png", ".json", ".svg"))
        pools: Mapping[str, Sequence[Path]] = {
            **dict.fromkeys(("first", "second", "folders"), files.results),
            "model": files.models,
            "results": files.traces,
        }
        return str(rng.choice(pools.get(param.name, files.traces)))

    def _text(self, param: Param) -> str:
        files, rng = self._files, self._rng
        if rng.random() < 0.35:
            return rng.choice(TEXTS)
        if param.name == "model":
            return str(rng.choice([*files.models, "nobody/none", "tiny", "fake"]))
        if param.name == "workload":
            own = [str(each) for each in files.workloads]
            return rng.choice(
                [
                    *own,
                    "sweep",
                    "pressure",
                    f"claude-code:{files.traces[0]}",
                    "agents",
                    "claude-code:",
                ]
            )
        if param.name == "program":
            return rng.choice(("", "p", "q", "job:q", *NAMES))
        if param.name == "kv_transfer_config":
            ours = {
                "kv_connector": "ContinuumConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"ttl": 1},
            }
            return json.dumps(odd(rng, ours))
        if param.name == "command":
            return rng.choice(
                (
                    "vllm",
                    "serve",
                    "vllm serve m",
                    "-tp",
                    "2",
                    "--kv_transfer_config.kv_role",
                    "A=b",
                    "'",
                )
            )
        if param.name == "arrivals":
            return rng.choice(("poisson:3", "closed:2", "turns"))
        return param.default or rng.choice(TEXTS)
