"""`continuum bench agents`: from its options to a load, and from its run to a table."""

from __future__ import annotations

import json
from pathlib import Path

from bench.common.progress import Progress
from bench.serve import results, summary
from bench.serve.load import Load
from bench.serve.record import RunFolder, machine, versions
from bench.serve.results import ResultError, Run, State
from bench.serve.session import Manner, measure
from continuum_connector.errors import ToldError
from continuum_connector.tools.cli.server import Server
from continuum_connector.tools.cli.terminal import name as shown
from continuum_connector.tools.cli.terminal import terminal


def run(url: str, load: Load, manner: Manner, out: Path) -> State:
    """Run the load, show the table, leave the folder."""
    if (out / results.RUNS).exists():
        raise ResultError(f"{out} holds results already; give another --out")
    console = terminal()
    record = Run(
        name="agents",
        workload=load.workload.name,
        settings={
            "arrivals": load.arrivals.text,
            "duration_s": load.duration_s,
            "programs": load.programs,
            "hints": load.hints,
        },
        seed=load.tokens.seed,
        url=url,
        model=load.model,
        versions=versions(),
        machine=machine(),
        planned_programs=load.most_programs() or 0,
    )
    with Progress(console, load.workload.name, load.num_turns()) as progress:

        def tell(so_far: RunFolder) -> None:
            done = so_far.num_turns
            progress.update(done, f"{done} turns, {so_far.num_failed} failed")

        with RunFolder(out / results.RUNS / record.name, record, tell) as folder:
            state = measure(server_url(url), load, folder, manner)
    loaded = results.load(out)
    console.print(summary.table_of(loaded[0]))
    for each in [turn for turn in loaded[0].turns if turn.error][:3]:
        line = f"{each.program} turn {each.turn + 1}: {each.error}"
        console.print(line, style="red", markup=False)
    console.print(f"Written: {shown(str(out))}", soft_wrap=True)
    return state


def find_model(url: str, api_key: str, wanted: str) -> str:
    """The name of the model that was asked for, or of the only one that is served."""
    server = Server(url, api_key, timeout_s=60.0)
    status, content = server.get("/v1/models")
    if status == 401:
        raise ToldError(f"{server.url} wants a key; give it with --api-key or VLLM_API_KEY")
    try:
        served = [str(each["id"]) for each in json.loads(content)["data"]]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise ToldError(
            f"{server.url}/v1/models is no list of models (HTTP {status}); check host and path"
        ) from None
    if wanted and wanted not in served:
        raise ToldError(f"no model {wanted!r} is served here; there is: {', '.join(served)}")
    if not wanted and len(served) != 1:
        raise ToldError(f"{len(served)} models are served; choose by --model: {', '.join(served)}")
    return wanted or served[0]


def server_url(url: str) -> str:
    """The address without /v1, with its scheme."""
    return (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
