"""The options of `continuum bench`, each with its help; commands.py says who has which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Workload = Annotated[
    str,
    Option(
        help="sweep (8 turns to 13K tokens), pressure (6 x 4, one at a time), "
        "claude-code:FILE[,scale=8,pauses=8,longest=32768], your own FILE.toml, or a FILE that "
        "others recorded: Mooncake, Bailian, Weka, SWE-agent, mini-swe-agent, OpenHands."
    ),
]
ArrivalsText = Annotated[
    str,
    Option(
        help="poisson:RATE, closed:PROGRAMS or turns (one request at a time). "
        "Empty: what the workload says."
    ),
]
Rates = Annotated[
    str,
    Option(
        help="Programs per second, like 1,3,6: one server per arm for all of them, emptied in "
        "between; a folder each, OUT/rate-1 and so on. Wants --dram as a size."
    ),
]
Duration = Annotated[
    float, Option(min=0, max=1e7, help="Seconds in which programs begin. 0: the workload's.")
]
Programs = Annotated[int, Option(min=0, max=10**7, help="At most so many. 0: the workload's.")]
Seed = Annotated[
    int, Option(min=-(2**31), max=2**31, help="Of arrivals, sizes, pauses and token ids.")
]
Out = Annotated[Path | None, Option(help="Result folder. Default: below runs/, named by the time.")]

Url = Annotated[str, Argument(help="The server's address, like http://localhost:8000.")]
ModelName = Annotated[str, Option(help="Which model, if it serves several.")]
Hints = Annotated[bool, Option(help="Say program and last turn in vllm_xargs.")]
Reset = Annotated[
    bool, Option(help="Empty all caches first, a connector's too (VLLM_SERVER_DEV_MODE=1).")
]
ApiKey = Annotated[str, Option(envvar="VLLM_API_KEY", help="If it wants one.")]

ArmNames = Annotated[
    str,
    Option(
        help="Comma-separated; the first is what the others are compared with. ARM+KEY=VALUE: one "
        "of ours with a config key; router+ARM: behind vLLM's router, which holds programs back."
    ),
]
DramText = Annotated[str, Option(help="Live KV / DRAM, like 0.5,1,2,4; or a size, like 64GiB.")]
DiskText = Annotated[str, Option(help="Bytes on a drive, for arms that use one.")]
DiskPath = Annotated[Path | None, Option(help="Folder on that drive. Default: .cache/disk.")]
Repeats = Annotated[int, Option(min=1, max=1000, help="Of everything, each with its own seed.")]
ModelFolder = Annotated[Path | None, Option(help="A model's folder. Empty: a tiny random Llama.")]
Dtype = Annotated[str, Option(help="float32, bfloat16 or float16.")]
Blocks = Annotated[int, Option(min=0, max=10**9, help="VRAM pool, in blocks. 0: all there is.")]
BlockSize = Annotated[int, Option(min=1, max=10**6, help="Tokens in a block.")]
BatchTokens = Annotated[int, Option(min=1, max=10**9, help="vLLM's --max-num-batched-tokens.")]
Seqs = Annotated[int, Option(min=1, max=10**9, help="vLLM's --max-num-seqs.")]
MaxLen = Annotated[int, Option(min=0, max=10**9, help="vLLM's --max-model-len. 0: what fits.")]
Eager = Annotated[bool, Option(help="Without CUDA graphs.")]
ServerArgs = Annotated[
    str,
    Option(
        help="More for every vllm serve; files with their whole path. Not --max-model-len: "
        "--max-len says it."
    ),
]
Shims = Annotated[Path | None, Option(envvar="BENCH_SHIMS", help="CPU shims of rivals (arms.py).")]
Rivals = Annotated[
    Path | None, Option(help="LMCache's folder. Default: where bench.serve.rivals puts it.")
]
StartTimeout = Annotated[
    float,
    Option(min=1, max=1e6, help="Seconds for a server to start; a large model may need more."),
]
ClientName = Annotated[
    str,
    Option("--client", help="Who asks: agents (ours), or aiperf (NVIDIA's, in chats)."),
]
DryRun = Annotated[
    bool, Option("--dry-run", help="Start nothing: print what would be started, how long.")
]

Result = Annotated[Path, Argument(help="A result folder.")]
Results = Annotated[list[Path], Argument(help="Result folders, of one load each.")]
Page = Annotated[
    Path | None,
    Option("-o", "--out", help="The page. Default: report.html in the first folder."),
]
