"""The options of `continuum bench`, each with its help; commands.py says who has which."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Workload = Annotated[
    str,
    typer.Option(
        help="sweep (8 turns to 13K tokens), pressure (6 x 4, one at a time), "
        "claude-code:FILE[,scale=8,pauses=8,longest=32768], your own FILE.toml, or a FILE that "
        "others recorded: Mooncake, Bailian, Weka, SWE-agent, mini-swe-agent, OpenHands."
    ),
]
ArrivalsText = Annotated[
    str,
    typer.Option(
        help="poisson:RATE, closed:PROGRAMS or turns (one request at a time). "
        "Empty: what the workload says."
    ),
]
Rates = Annotated[
    str,
    typer.Option(
        help="Programs per second, like 1,3,6: one server per arm for all of them, emptied in "
        "between; a folder each, OUT/rate-1 and so on. Wants --dram as a size."
    ),
]
Duration = Annotated[
    float, typer.Option(min=0, max=1e7, help="Seconds in which programs begin. 0: the workload's.")
]
Programs = Annotated[
    int, typer.Option(min=0, max=10**7, help="At most so many. 0: the workload's.")
]
Seed = Annotated[
    int, typer.Option(min=-(2**31), max=2**31, help="Of arrivals, sizes, pauses and token ids.")
]
Out = Annotated[
    Path | None, typer.Option(help="Result folder. Default: below runs/, named by the time.")
]

Url = Annotated[str, typer.Argument(help="The server's address, like http://localhost:8000.")]
ModelName = Annotated[str, typer.Option(help="Which model, if it serves several.")]
Hints = Annotated[bool, typer.Option(help="Say program and last turn in vllm_xargs.")]
Reset = Annotated[
    bool, typer.Option(help="Empty all caches first, a connector's too (VLLM_SERVER_DEV_MODE=1).")
]
ApiKey = Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="If it wants one.")]

ArmNames = Annotated[
    str,
    typer.Option(
        help="Comma-separated; the first is what the others are compared with. ARM+KEY=VALUE: one "
        "of ours with a config key; router+ARM: behind vLLM's router, which holds programs back."
    ),
]
DramText = Annotated[
    str, typer.Option(help="Live KV / DRAM, like 0.5,1,2,4; or a size, like 64GiB.")
]
DiskText = Annotated[str, typer.Option(help="Bytes on a drive, for arms that use one.")]
DiskPath = Annotated[Path | None, typer.Option(help="Folder on that drive. Default: .cache/disk.")]
Repeats = Annotated[
    int, typer.Option(min=1, max=1000, help="Of everything, each with its own seed.")
]
ModelFolder = Annotated[
    Path | None, typer.Option(help="A model's folder. Empty: a tiny random Llama.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Blocks = Annotated[
    int, typer.Option(min=0, max=10**9, help="VRAM pool, in blocks. 0: all there is.")
]
BlockSize = Annotated[int, typer.Option(min=1, max=10**6, help="Tokens in a block.")]
BatchTokens = Annotated[
    int, typer.Option(min=1, max=10**9, help="vLLM's --max-num-batched-tokens.")
]
Seqs = Annotated[int, typer.Option(min=1, max=10**9, help="vLLM's --max-num-seqs.")]
MaxLen = Annotated[
    int, typer.Option(min=0, max=10**9, help="vLLM's --max-model-len. 0: what fits.")
]
Eager = Annotated[bool, typer.Option(help="Without CUDA graphs.")]
ServerArgs = Annotated[
    str,
    typer.Option(
        help="More for every vllm serve; files with their whole path. Not --max-model-len: "
        "--max-len says it."
    ),
]
Shims = Annotated[
    Path | None, typer.Option(envvar="BENCH_SHIMS", help="CPU shims of rivals (arms.py).")
]
Rivals = Annotated[
    Path | None, typer.Option(help="LMCache's folder. Default: where bench.serve.rivals puts it.")
]
StartTimeout = Annotated[
    float,
    typer.Option(
        min=1, max=1e6, help="Seconds for a server to start; a large model may need more."
    ),
]
ClientName = Annotated[
    str,
    typer.Option("--client", help="Who asks: agents (ours), or aiperf (NVIDIA's, in chats)."),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Start nothing: print what would be started, how long.")
]

Result = Annotated[Path, typer.Argument(help="A result folder.")]
Results = Annotated[list[Path], typer.Argument(help="Result folders, of one load each.")]
Page = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="The page. Default: report.html in the first folder."),
]
