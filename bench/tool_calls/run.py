"""What reading a finished turn's tool calls costs the scheduler's step, in microseconds.

    python -m bench.tool_calls.run [--rounds 200]

The tokenizer is a byte-level BPE of Hugging Face's fast kind, trained here on this
repository's own text (vLLM's 4 characters a token or so, and nothing to download), with the
formats' markers as special tokens. Each tail is prose, thinking, then a call from the corpus
of the unit tests, 512 tokens in all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomllib
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bench.cli import positive, start, teaching_parser
from bench.common.tables import markdown
from continuum_connector.toolcalls import BEGINNINGS, ENDS, TAIL_TOKENS, THINKING, ToolReader, parse

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "tests" / "unit" / "tool_outputs"
PROSE = (
    "The failing test compares two paths, and one of them has a trailing slash. I have read the "
    "function that joins them; it keeps what it is given. So either the caller strips it or the "
    "function does, and the second is the smaller change, for it has eleven callers. Before I "
    "edit anything I want to see the test fail for this reason and no other one. "
)
VOCABULARY = 16_384
COLUMNS = ("tail of 512 tokens", "characters", "decode us", "parse us", "read us (p99)")


def train() -> PreTrainedTokenizerFast:
    """Train a fast tokenizer on the repository's text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    own = "[!.]*/**"  # not .venv or .cache, whose text is a hundred times as much and not ours
    files = [*ROOT.glob(f"{own}/*.py"), *ROOT.glob(f"{own}/*.md"), *CORPUS.glob("*.toml")]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in files], trainer)
    markers = (*BEGINNINGS, *ENDS, *THINKING, *THINKING.values())
    known = [marker for marker in markers if marker[0] in "<[" and marker.count("<") <= 1]
    known += ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>"]
    tokenizer.add_tokens([AddedToken(marker, normalized=False) for marker in known])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def tails(tokenizer: Any) -> dict[str, list[int]]:
    """Per format a tail of 512 tokens that ends with the format's first sample."""
    found = {}
    for path in sorted(CORPUS.glob("*.toml")):
        call = tokenizer.encode(tomllib.loads(path.read_text())["sample"][0]["text"])
        prose = tokenizer.encode(PROSE * 20)
        found[path.stem] = [*prose[: TAIL_TOKENS - len(call)], *call][-TAIL_TOKENS:]
    script = "\n".join(
        f"grep -rn 'name_{i}' src/ | head -n {i} && make test_{i}" for i in range(60)
    )
    fenced = tokenizer.encode(f"Now.\n\n```bash\n{script}")[: TAIL_TOKENS - 8]
    found["a script of 500 tokens"] = [*fenced, *tokenizer.encode("\n```")]
    write = '{"name": "write_file", "arguments": {"text": "' + PROSE * 20
    found["a call of 500 tokens"] = tokenizer.encode("<tool_call>" + write)[:TAIL_TOKENS]
    repeated = {"tags": "<tool_call>{}", "commas": "[f(a=,", "brackets": "{\n[ARGS]<tool_call>"}
    for name, piece in repeated.items():
        found[f"{name} again and again"] = tokenizer.encode(piece * TAIL_TOKENS)[:TAIL_TOKENS]
    found["an answer"] = tokenizer.encode(PROSE * 20)[:TAIL_TOKENS]
    return found


def micros(what: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median and the 99th percentile of `what`, in microseconds of this thread's CPU time."""
    samples = []
    for _ in range(rounds):
        begin_s = time.thread_time()
        what()
        samples.append((time.thread_time() - begin_s) * 1e6)
    return statistics.median(samples), statistics.quantiles(samples, n=100)[98]


def main() -> None:
    """Print one line per format."""
    options = teaching_parser("python -m bench.tool_calls.run", __doc__)
    options.add_argument("--rounds", type=positive, default=200)
    rounds = options.parse_args().rounds
    tokenizer = train()
    not_read: list[str] = []
    reader = ToolReader(lambda: tokenizer, time.perf_counter, not_read.append)
    reader.start()
    reader.join()
    rows = []
    for name, token_ids in tails(tokenizer).items():
        text = tokenizer.decode(token_ids)
        decode, _ = micros(lambda ids=token_ids: tokenizer.decode(ids), rounds)
        parsing, _ = micros(lambda text=text: parse(text), rounds)

        def read(token_ids: list[int] = token_ids) -> None:
            reader.new_step()
            reader.read(token_ids)

        whole, worst = micros(read, rounds)
        cells = (f"{decode:.0f}", f"{parsing:.0f}", f"{whole:.0f} ({worst:.0f})")
        rows.append((name.replace("_", " "), len(text), *cells))
    print(markdown(COLUMNS, rows))
    assert not not_read, not_read


if __name__ == "__main__":
    start(main, "python -m bench.tool_calls.run")
