"""Planned: what the installed vLLM is, and what it would make of a command line, for `continuum
check`. vLLM itself is asked, without GPU, weights or network: its parser reads the options, its
config is built, its layers on the meta device, its KV groups from them; then the functions are
called that our connector calls at a server's start.

Where vLLM raises, its own sentence is the answer. Like compat.py, it goes by feature. `kv` is only
for a process of its own: see pretend.py.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from continuum_connector import build
from continuum_connector.config import CONNECTOR_NAME
from continuum_connector.vllm import attach, compat, proven, served, touched
from continuum_connector.vllm.pretend import DEVICE, GPU_BYTES, no_memory, world_of

TRANSFER = ("kv_connector", "kv_role", "kv_connector_extra_config")
_MOST = 400  # characters of an answer of vLLM's


# --- what it is, can do and reads ----------------------------------------------------------
def about_vllm() -> dict[str, Any]:
    """What this vLLM is and can do, as the fields of tools/checks/machine.py VllmSeen."""
    import vllm
    from vllm.tool_parsers import ToolParserManager

    return {
        "version": vllm.__version__,
        "tested": [release for release, _ in compat.SUPPORTED],
        "platform": served.platform(),
        "has_layouts": compat.has_layouts(),
        "fails_by_request": compat.can_fail_by_request(),
        "mends_drafted_states": compat.mends_drafted_states(),
        **_lacks(),
        "tool_parsers": ToolParserManager.list_registered(),
    }


def _lacks() -> dict[str, Any]:
    """What this vLLM lacks, as a server's log would."""
    for_all = touched.why_not_loaded() or touched.why_aside(False, False)
    ranked, hybrid = touched.why_aside(True, False), touched.why_aside(False, True)
    some = (
        ("", touched.why_less()),
        ("with --scheduling-policy priority, ", ranked),
        ("for models with windows, chunks or states, and with drafts, ", hybrid),
        ("no DRAM tier: ", touched.why_no_copies()),
    )
    return {"lacks_all": for_all, "lacks": [who + why for who, why in some if why]}


def parse(words: Sequence[str]) -> Any:
    """The options as `vllm serve` reads them, from --config too. ValueError is vLLM's complaint."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    serve, top = ServeSubcommand(), Parser()
    serve.subparser_init(top.add_subparsers())
    options = top.parse_args(["serve", *words])
    serve.validate(options)
    options.model = getattr(options, "model_tag", None) or options.model
    return options


def read_by_vllm(words: Sequence[str], names: Iterable[str]) -> tuple[Any, dict[str, Any]]:
    """The options that vLLM's parser makes of these words, None if it refuses them; and what to say
    of them: why they are "refused", or else the "model" and those "options" of these names that
    this vLLM has, as JSON."""
    try:
        options = parse(words)
    except SystemExit:
        return None, {"refused": "they only print"}
    except Exception as error:  # from argparse, YAML or pydantic; it would end the server, too
        return None, {"refused": sentence(error)}
    told = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if (transfer := options.kv_transfer_config) is not None:
        told["kv_transfer_config"] = {name: getattr(transfer, name) for name in TRANSFER}
    return options, {"model": options.model, "options": told}


def sentence(error: BaseException) -> str:
    """What an exception says, on one line, without what pydantic puts around it."""
    text = " ".join(str(error).split())
    text = text.partition("Value error, ")[2] or text
    text = text.partition(" [type=")[0]
    return (text or type(error).__name__)[:_MOST]


# --- what it would make of the options -----------------------------------------------------
# Drafts that keep no KV, so that no layers of theirs are built.
NO_KV = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
LATER = (10, 0)  # a capability on which vLLM may do what it cannot on (9, 0)


class RefusedError(Exception):
    """vLLM refuses these options for this model."""


class NotSeenError(Exception):
    """What vLLM would do cannot be found out here: the step, and vLLM's sentence."""


def kv(options: Any) -> dict[str, Any]:
    """The fields of `Kv` for the server that these options start. RefusedError, NotSeenError."""
    try:
        return _on_device(options)
    except (RefusedError, NotSeenError) as first:
        DEVICE.capability = LATER
        try:
            return _on_device(options)
        except (RefusedError, NotSeenError):
            raise first from None


def _on_device(options: Any) -> dict[str, Any]:
    config = _config(options)
    with _step("layers"):
        # The first rank of each pipeline stage: the others of a stage have layers like its own.
        firsts = range(0, config.parallel_config.world_size, _ranks_per_stage(config))
        stages = (_stage(config, rank, is_last=rank == firsts[-1]) for rank in firsts)
        specs, layouts = zip(*stages, strict=True)
    with _step("KV groups", ValueError):
        at_workers, at_scheduler = _groups(config, specs, layouts)
    return _judged(config, specs, at_workers, at_scheduler)


@contextlib.contextmanager
def _step(name: str, *refusals: type[Exception]) -> Iterator[None]:
    """Whatever vLLM raises in this step is the answer: a refusal if it is one of `refusals`."""
    try:
        yield
    except refusals as why:
        raise RefusedError(sentence(why)) from None
    except (Exception, SystemExit) as why:  # a plugin's, a model's or torch's own
        raise NotSeenError(f"{name}: {sentence(why)}") from None


def _config(options: Any) -> Any:
    """The engine's config. If vLLM refuses the model with no other option as well, it is the model
    that cannot be read here, and no option is to blame."""
    try:
        return _made(options)
    except SystemExit as why:  # attach.py: our own part of the config
        raise RefusedError(sentence(why)) from None
    except ValueError as why:
        refusal = sentence(why)
    except Exception as why:
        raise NotSeenError(f"config: {sentence(why)}") from None
    if "No module named" not in refusal and _takes_model_alone(options):
        raise RefusedError(refusal)
    cause = f" ({sentence(DEVICE.trouble)})" if DEVICE.trouble else ""
    raise NotSeenError(f"config: {refusal}{cause}")


def _takes_model_alone(options: Any) -> bool:
    kept = ("tokenizer", "trust_remote_code", "revision", "hf_overrides", "hf_config_path")
    alone = parse(["--model", options.model, "--skip-tokenizer-init"])
    for name in kept:
        setattr(alone, name, getattr(options, name, None))
    try:
        _made(alone)
    except (Exception, SystemExit):
        return False
    return True


def _made(options: Any) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    args = AsyncEngineArgs.from_cli_args(options)
    args.load_format = "dummy"
    if args.kv_transfer_config is None:  # looked at as if it had ours
        args.kv_transfer_config = KVTransferConfig(kv_connector=CONNECTOR_NAME, kv_role="kv_both")
    # Files that it writes have lines of their own, and may lie in a container.
    with mock.patch.object(attach, "_check_folders"):
        return args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def _ranks_per_stage(config: Any) -> int:
    parallel = config.parallel_config
    return int(parallel.world_size // parallel.pipeline_parallel_size)


def _stage(config: Any, rank: int, is_last: bool) -> tuple[dict[str, Any], list[Any]]:
    """The spec of each layer of this rank, and the layouts that its attention takes."""
    import torch
    from vllm.config import CompilationMode, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker import workspace
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
    from vllm.v1.worker.worker_base import WorkerBase

    config.compilation_config.static_forward_context.clear()
    config.compilation_config.mode = CompilationMode.NONE  # nothing will run
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with set_current_vllm_config(config), dtype, world_of(config, rank):
        workspace.init_workspace_manager(torch.device("meta"), 1)
        with no_memory():
            initialize_model(config)
            if is_last:
                _add_drafts(config)
        current_platform.update_block_size_for_backend(config)
        of_worker = SimpleNamespace(vllm_config=config)
        layouts = WorkerBase.get_supported_kv_cache_layouts(of_worker)
        return get_kv_cache_spec(config), layouts


def _add_drafts(config: Any) -> None:
    """Build the layers of a draft model, which keep KV beside the model's own."""
    drafts = config.speculative_config
    if not drafts or drafts.draft_model_config is None or drafts.method in NO_KV:
        return
    from vllm.compilation.backends import set_model_tag
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_model_tag("eagle_head"):
        initialize_model(config, model_config=drafts.draft_model_config)


def _groups(config: Any, specs: Sequence[Any], layouts: Sequence[Any]) -> tuple[list[Any], Any]:
    """The KV cache of each stage's workers and that of the scheduler, as the engine makes them."""
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils as utils

    every = [spec for stage in specs for spec in stage.values()]
    resolve_kv_cache_layout(config, list(layouts), every)
    with contextlib.suppress(ImportError):
        from vllm.v1.kv_cache_spec_registry import register_all_kvcache_specs

        register_all_kvcache_specs(config)
    about_all = config, list(specs), [GPU_BYTES] * len(specs)
    try:
        from vllm.v1.core import kv_cache_planning as planning  # vLLM >= 0.33
    except ImportError:
        at_workers = utils.get_kv_cache_configs(*about_all)
    else:
        groups = planning.get_global_kv_cache_groups(config, list(specs))
        at_workers = planning.get_kv_cache_configs(*about_all, groups)
    found = utils.generate_scheduler_kv_cache_config(at_workers)
    if groups := found.kv_cache_groups:
        cached = [
            g.kv_cache_spec for g in groups if getattr(g.kv_cache_spec, "prefix_cacheable", 1)
        ]
        config.cache_config.block_size = min(spec.block_size for spec in cached)
        config.cache_config.num_gpu_blocks = found.num_blocks
        config.validate_block_size()
        found.hash_block_size = utils.resolve_kv_cache_block_sizes(found, config)[1]
    return at_workers, found


def _judged(
    config: Any, specs: Sequence[Any], at_workers: Sequence[Any], at_scheduler: Any
) -> dict[str, Any]:
    """What the server says at its start, of what vLLM made."""
    seen = served.server(config, at_scheduler)
    drafts = config.speculative_config
    # vLLM <= 0.31 has the second name for it.
    drops = getattr(drafts, "use_eagle_block_drop", None) or getattr(drafts, "use_eagle", None)
    groups = [served.group(each) for each in at_scheduler.kv_cache_groups]
    blocks = [served.bytes_per_block(each) for each in at_workers] if groups else []
    layers = Counter(
        (type(spec).__name__, _window(spec)) for each in specs for spec in each.values()
    )
    return {
        "device": DEVICE.name,
        "architecture": config.model_config.architecture,
        "aside": build.reason_to_step_aside(config, at_scheduler),
        "no_tier": proven.why_no_tier(seen),
        "no_disk": proven.why_no_disk(seen),
        "server": seen._asdict(),
        "layers": [[kind, window, number] for (kind, window), number in layers.most_common()],
        "groups": [[each.kind, each.block_size, each.window] for each in groups],
        "block_bytes": sum(blocks) * _ranks_per_stage(config),
        "num_ranks": config.parallel_config.world_size,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "drops_a_block": bool(drops and drops()),
    }


def _window(spec: Any) -> int | None:
    return getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
