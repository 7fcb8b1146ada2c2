"""Do answers stay the same with the connector? A real `vllm serve`, twice, greedy, token by token.

Exit status 0: every answer is the same and KV was loaded from DRAM. 1: it was not loaded, or a
load failed, or an answer differs. 2: answers differ, but the comparison says nothing: stock vLLM
asked twice does not agree with itself, or one of the two found more of the prompts than the other.
Or graphs were asked for and nothing was captured. With --overwrite, 0: the comparison noticed that
DRAM was overwritten, and checksums noticed it first; 1: one of them did not; 2: as above.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli import teaching_parser
from bench.serve.live import kv_bytes_per_token
from bench.serve.package import on_cpu
from bench.serve.server import LOGS, ServerOptions, VllmServer
from bench.serve.tiny_model import SHAPES, make_model
from continuum_connector.memory import parse_bytes
from tests.server.helpers import (
    BLOCK,
    Dialog,
    dialogs,
    dram_hits,
    eventually,
    in_flight,
    overwrite_dram,
    play,
)
from tests.server.mamba2_cpu import plugin_path

ANSWER = 24  # tokens of each
SPARE = 8  # vLLM's null block, and what a step reserves
CAPTURED = "Graph capturing finished"  # vLLM's own words
FLASH = ("--attention-backend", "FLASH_ATTN")  # vLLM refuses to start where it cannot have it
SLEEP = () if on_cpu() else ("--enable-sleep-mode",)  # a CPU's cache stays where it is
MAMBA2, DELTA_NETS = "granite_hybrid", "qwen3_next"  # families of tiny models that keep states
# Another policy may find that a fast GPU computes these prompts sooner than it loads them.
CONNECTOR = {"policy": "lru_offload"}

DIFFERS = (
    "NO VERDICT: stock vLLM, asked twice, differs from itself, so its kernels do not always round "
    "alike here; use --dtype float32, or another --attention-backend"
)

Answers = list[list[list[int]]]

TEACH = """\
what happens
  Programs of several turns take turns on a VRAM pool that holds about half of them, so that
  their blocks leave VRAM and come back from DRAM. The first arm is stock vLLM with VRAM for all
  of them, so that both arms compute the same tokens in the same pieces: in 16 bit, prompts cut
  in other pieces round to other tokens. It answers twice, to see whether it agrees with itself.
  The second arm is the small server with the connector; it must find as much of each prompt.

what each run proves
  python -m tests.gpu.serve_equal
      In float32, eager: copies bring back every byte. vLLM's FlashAttention takes no float32,
      so another backend reads the blocks.
  python -m tests.gpu.serve_equal --graphs
      The same compiled and in CUDA graphs: copies keep out of the way of captured steps.
  python -m tests.gpu.serve_equal --flash
      As people serve: bfloat16, FlashAttention, CUDA graphs.
  python -m tests.gpu.serve_equal --overwrite
      That the runs above would notice: all of DRAM is overwritten before the last turns. As it
      is, answers must differ; with checksum_every=1 they must be equal, each wrong block found.
  python -m tests.gpu.serve_equal --sleep
      That both tiers follow a KV cache which vLLM unmaps before the last turns and maps again.
  python -m tests.gpu.serve_equal --model FOLDER --dtype bfloat16 -- --load-format dummy
      A model of your own. Dummy weights can answer one token over and over; the number of
      different tokens is printed.
"""


@dataclass(frozen=True)
class Seen:
    """What a server with the connector answered, and what its DRAM tier says of it."""

    answers: Answers
    num_hit: float  # prompt tokens from DRAM
    found: tuple[int, ...] = ()  # of each prompt, tokens that were cached somewhere
    num_failed: float = 0.0  # loads
    num_corrupt: float = 0.0  # transfers whose checksums did not agree


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms; the exit status says whether they are as they must be."""
    options = parse(argv)
    run = Run(options, options.model or make_model(SHAPES[options.shape]))
    if options.dry_run:
        print("\n".join(run.shown()))
        return 0
    try:
        expected, again, found = run.expected()
        if options.overwrite:
            as_is, summed = (run.seen(arm) for arm in run.arms)
            return verdict_overwritten(expected, again, as_is, summed)
        (ours,) = (run.seen(arm) for arm in run.arms)
        return verdict(expected, again, found, ours)
    except NoVerdictError as error:
        print(f"NO VERDICT: {error}")
        return 2


class NoVerdictError(Exception):
    """The run says nothing; the message says why."""


@dataclass(frozen=True)
class Run:
    """One call: the same model and load for every server."""

    options: argparse.Namespace
    model: Path

    @property
    def arms(self) -> list[dict[str, Any]]:
        """The connector's config, a server each."""
        if not self.options.overwrite:
            return [{**CONNECTOR, "dram_bytes": self.options.dram}]
        config = {**CONNECTOR, "dram_bytes": self.dram_bytes}
        return [config, {**config, "checksum_every": 1}]

    @property
    def dram_bytes(self) -> int:
        """Where it is to be overwritten: at most what was asked for, but an odd number of blocks,
        for no other memory of the server is as long."""
        block_bytes = BLOCK * kv_bytes_per_token(self.model, self.options.dtype)
        return ((parse_bytes(self.options.dram) // block_bytes - 1) | 1) * block_bytes

    @property
    def programs(self) -> list[Dialog]:
        """What all servers are asked."""
        return dialogs(self.options.programs, rounds=3, first=700, tool=300)

    @property
    def room(self) -> int:
        """Blocks of VRAM in which stock, asked twice, evicts nothing."""
        turns = ((each.prompt, *each.tools) for each in self.programs)
        blocks = (-(-sum(len(added) + ANSWER for added in each) // BLOCK) for each in turns)
        return max(self.options.blocks, 2 * sum(blocks) + SPARE)

    @property
    def longest(self) -> int:
        """Tokens of a context at its end: not all that VRAM holds, for a model with several groups
        of layers takes a block for each."""
        turns = ((each.prompt, *each.tools) for each in self.programs)
        return max(sum(len(added) + ANSWER for added in each) for each in turns)

    @property
    def env(self) -> dict[str, str]:
        """vLLM's CPU build serves Mamba2 with prefix caching by a plugin of our tests."""
        is_mamba2 = not self.options.model and SHAPES[self.options.shape].family == MAMBA2
        if not (is_mamba2 and on_cpu()):
            return {}
        LOGS.mkdir(parents=True, exist_ok=True)
        return {"PYTHONPATH": plugin_path(LOGS)}

    def fields(self, connector: Mapping[str, Any] | None) -> dict[str, Any]:
        """How a server is started; without a connector it has room for all programs."""
        options = self.options
        return {
            "num_blocks": options.blocks if connector else self.room,
            "max_model_len": self.longest,
            "block_size": BLOCK,
            "dtype": options.dtype,
            "eager": not options.graphs,
            "args": (*FLASH * options.flash, *SLEEP * options.sleep, *options.serve),
            "env": self.env,
            "start_timeout_s": 900.0,
        }

    def shown(self) -> Iterator[str]:
        """The servers that would be started."""
        for connector in (None, *self.arms):
            started = ServerOptions(connector=connector, **self.fields(connector))
            yield shlex.join(started.command(self.model, 8000))

    def expected(self) -> tuple[Answers, Answers, tuple[int, ...]]:
        """What stock vLLM answers, twice, the second time without what it has of the first; and how
        much it found of each prompt."""
        found: list[int] = []
        with VllmServer(self.model, "equal-stock", **self.fields(None)) as stock:
            before_last = self.before_last(stock)
            first = play(
                stock, self.programs, max_tokens=ANSWER, before_last=before_last, found=found
            )
            again = play(stock, self.programs, max_tokens=ANSWER, salt="again")
        return first, again, tuple(found)

    def before_last(self, server: VllmServer) -> Callable[[], None] | None:
        """What happens to a server ahead of the last turns: with --sleep it sleeps and wakes up."""

        def sleep() -> None:
            eventually(lambda: in_flight(server) == 0)
            server.post("/sleep?level=1")
            server.post("/wake_up")

        return sleep if self.options.sleep else None

    def seen(self, connector: Mapping[str, Any]) -> Seen:
        """Start a server with the connector, ask it, stop it."""
        options = self.options
        name = "equal-summed" if "checksum_every" in connector else "equal-continuum"
        fields = self.fields(connector)
        with VllmServer(self.model, name, connector=connector, **fields) as server:
            if options.graphs and CAPTURED not in server.log.read_text(errors="replace"):
                raise NoVerdictError("the server's log tells of no graph that was captured")
            if not options.overwrite:
                return ask_ours(server, self.programs, self.before_last(server))
            wanted = server, self.dram_bytes, options.dtype
            try:
                return ask_ours(server, self.programs, lambda: overwrite_dram(*wanted))
            except PermissionError as error:
                raise NoVerdictError(f"no process may write another's memory: {error}") from None


def ask_ours(
    server: VllmServer, programs: Sequence[Dialog], before_last: Callable[[], None] | None = None
) -> Seen:
    """What the server answers, and how its loads went.

    Counters travel with a step's statistics, so one more step brings the last.
    """
    found: list[int] = []
    answers = play(server, programs, max_tokens=ANSWER, before_last=before_last, found=found)
    eventually(lambda: in_flight(server) == 0)
    play(server, dialogs(1, rounds=1, first=40, tool=1))
    return Seen(
        answers,
        num_hit=dram_hits(server),
        found=tuple(found),
        num_failed=server.metric("continuum:loads_total", outcome="failed"),
        num_corrupt=server.metric("continuum:transfer_failures_total", reason="corrupt"),
    )


def verdict(expected: Answers, again: Answers, found: tuple[int, ...], ours: Seen) -> int:
    """Say what was seen; the exit status."""
    print(f"{described(expected)}, {ours.num_hit:.0f} prompt tokens from DRAM")
    print(f"prompt tokens found: {sum(ours.found):,}, by stock {sum(found):,}")
    print(f"equal, stock asked again:   {same(expected, again)}")
    print(f"equal, with the connector:  {same(expected, ours.answers)}")
    if ours.num_hit <= 0 or ours.num_failed:
        print(f"FAIL: nothing was loaded from DRAM, or {ours.num_failed:.0f} loads failed")
        return 1
    if ours.answers == expected:
        print("PASS")
        return 0
    if again != expected:
        print(DIFFERS)
        return 2
    if ours.found != found:
        print("NO VERDICT: answers differ, but so do the pieces that prompts were computed in")
        return 2
    print("FAIL: answers differ")
    return 1


def verdict_overwritten(expected: Answers, again: Answers, as_is: Seen, summed: Seen) -> int:
    """The same of the two servers whose DRAM was overwritten before the last turns."""
    print(f"{described(expected)}, DRAM overwritten before the last turns")
    print(f"equal, stock asked again:   {same(expected, again)}")
    print(f"equal, as it is:            {same(expected, as_is.answers)}, must differ")
    told = f"{summed.num_corrupt:.0f} corrupt, must be equal and noticed"
    print(f"equal, checksum_every=1:    {same(expected, summed.answers)}, {told}")
    if again != expected:
        print(DIFFERS)
        return 2
    if first_turns(as_is.answers) != first_turns(expected):
        print("FAIL: answers differ before anything was overwritten")
        return 1
    if as_is.answers == expected:
        print("FAIL: no answer differs: nothing was loaded after that, or nobody would notice")
        return 1
    if summed.answers != expected or not summed.num_corrupt:
        print("FAIL: checksums did not notice")
        return 1
    print("PASS")
    return 0


def described(answers: Answers) -> str:
    """How much there is to compare."""
    num_tokens = len({token for turns in answers for turn in turns for token in turn})
    return f"{sum(map(len, answers))} answers, {num_tokens} different tokens"


def first_turns(answers: Answers) -> Answers:
    """All but each program's last."""
    return [turns[:-1] for turns in answers]


def same(a: Answers, b: Answers) -> str:
    """How many answers are equal, of how many."""
    pairs = [
        left == right
        for turns, others in zip(a, b, strict=True)
        for left, right in zip(turns, others, strict=True)
    ]
    return f"{sum(pairs)} of {len(pairs)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; what follows `--` goes to `vllm serve`."""
    parser = teaching_parser("python -m tests.gpu.serve_equal", __doc__, TEACH)
    add = parser.add_argument
    add("--model", type=Path, help="folder of a model (the tiny Llama)")
    add("--shape", choices=SHAPES, default="llama", help="of the tiny model, if none is given")
    add("--dtype", help="of weights and KV (float32; bfloat16: --flash)")
    add("--programs", type=int, default=4, help="programs of three turns, 1,400 tokens each (4)")
    add("--blocks", type=int, help="in VRAM; stock has room (129; 49 larger ones with states)")
    add("--dram", default="2GiB", help="the connector's dram_bytes, at most (2GiB)")
    add("--graphs", action="store_true", help="compiled and in CUDA graphs (eager, to start soon)")
    add("--flash", action="store_true", help="FlashAttention, bfloat16, in CUDA graphs")
    add("--overwrite", action="store_true", help="would the comparison notice, and checksums?")
    add("--sleep", action="store_true", help="the servers sleep ahead of the last turns")
    add("--dry-run", action="store_true", help="print the servers that would be started")
    add("serve", nargs="*", help="after `--`: more arguments of `vllm serve`")
    options = parser.parse_args(argv)
    is_short = options.flash or SHAPES[options.shape].family == DELTA_NETS  # neither knows float32
    options.dtype = options.dtype or ("bfloat16" if is_short else "float32")
    has_states = SHAPES[options.shape].family in (MAMBA2, DELTA_NETS)
    options.blocks = options.blocks or (49 if has_states else 129)
    options.graphs = options.graphs or options.flash
    return options


if __name__ == "__main__":
    sys.exit(main())
