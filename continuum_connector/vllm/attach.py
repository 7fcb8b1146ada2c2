"""Attach: puts our hooks into a subclass of the Scheduler that vLLM chose.

The subclass names a request's program before it is queued, and queues turns in program order.
Before each step it shows vLLM the turns that need not wait any more, ends loads that were lost, and
lines up preemption victims. It retries a failed allocation while pins give way, forgets the hashes
of blocks that a victim never computed, ends streaming sessions in order, and begins a new epoch
before the prefix cache is reset. `reset_prefix_cache` also carries an operator's end of a program.
Servers without our connector never see it: only a config that names our connector carries it, into
the engine's process, and no class of vLLM is changed there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from continuum_connector.config import ContinuumConfig

logger = logging.getLogger(f"vllm.{__name__}")

_MARK = "_continuum_wraps"
_SERVER = "OPENAI_API_SERVER"  # vLLM's UsageContext of `vllm serve`, also with `--headless`


def install(engine_args_class: Any) -> None:
    """Prepare each config that `EngineArgs` makes, if it names our connector. Idempotent.

    All servers, `--headless` nodes and offline LLMs make their config there, once, before any
    process or model is loaded (create_engine_config). If our part of it cannot work, `vllm serve`
    ends with the sentence that says why as its last line; any other caller gets the exception.
    """
    original = engine_args_class.create_engine_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        usage = kwargs.get("usage_context", args[0] if args else None)
        is_server = getattr(usage, "value", usage) == _SERVER
        with _in_one_sentence(is_server):
            # Before vLLM asks a hub what the model is, or replaces what the user named.
            _check_args(self)
        vllm_config = original(self, *args, **kwargs)
        with _in_one_sentence(is_server):
            prepare(vllm_config)
        return vllm_config

    setattr(create_engine_config, _MARK, original)
    engine_args_class.create_engine_config = create_engine_config


@contextmanager
def _in_one_sentence(is_server: bool) -> Iterator[None]:
    """End a server with the error's text alone, because SystemExit prints no traceback. Elsewhere
    the ConfigError passes: a notebook's kernel must not end. What else goes wrong comes of a config
    that this vLLM describes in another way, and ends nothing."""
    from continuum_connector.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        if is_server:
            raise SystemExit(f"ContinuumConnector: {error}") from None
        raise
    except Exception as error:
        from continuum_connector.vllm.touched import release

        what = f"{type(error).__name__}: {error}"
        logger.warning("ContinuumConnector cannot read the config of %s (%s)", release(), what)


def _check_args(engine_args: Any) -> None:
    """Refuse our part of the config if it cannot work, and an option that would replace us. Where
    vLLM could not even build our class, name no connector to it; as one of several, we leave that
    error to vLLM."""
    transfer: Any = getattr(engine_args, "kv_transfer_config", None)
    if our_config(transfer) is None:
        return
    from continuum_connector.config import CONNECTOR_NAME
    from continuum_connector.errors import ConfigError
    from continuum_connector.vllm import proven, touched

    if why := proven.why_replaced(getattr(engine_args, "kv_offloading_size", None)):
        raise ConfigError(why)
    if transfer.kv_connector == CONNECTOR_NAME and (why := touched.why_not_loaded()):
        engine_args.kv_transfer_config = None
        logger.warning("ContinuumConnector: %s, so turns are served as stock vLLM serves them", why)


def prepare(vllm_config: Any) -> None:
    """Make a config that names our connector carry how many ranks share a node and what it can
    spare, ask for failed loads to be misses (law 4), and choose our scheduler unless the user named
    one. Other configs stay as they are."""
    ours = our_config(getattr(vllm_config, "kv_transfer_config", None))
    if ours is None:
        return
    from continuum_connector import memory
    from continuum_connector.errors import ConfigError
    from continuum_connector.vllm import compat, served, touched

    if touched.why_aside(has_priorities=False, is_hybrid=False):
        return  # the connector says so
    parallel = vllm_config.parallel_config
    _check_folders(ours, parallel)
    served.keep_count(vllm_config)
    # Here, because the scheduler asks this config, not the one that a MultiConnector's child gets.
    compat.ask_to_recompute(vllm_config)
    if ours.dram_bytes is None:
        if ours.disk_path and parallel.nnodes > 1:
            raise ConfigError(
                f"disk_path = {ours.disk_path!r} on several nodes without dram_bytes would cut "
                "disk slots by each node's own memory, and no rank could read what the scheduler "
                "means; set dram_bytes"
            )
        if "ray" not in (parallel.distributed_executor_backend, parallel.data_parallel_backend):
            # Ray's workers may be elsewhere.
            served.keep_spare(vllm_config, memory.look(os.environ))
    config = vllm_config.scheduler_config
    if config.scheduler_cls is None:
        # On this instance alone, and pickled with it; v1/engine/core.py asks for it once.
        config.get_scheduler_cls = functools.partial(_our_class, config)


def _check_folders(ours: ContinuumConfig, parallel: Any) -> None:
    """Check the folders of the trace and the switch before weights are loaded, because the
    scheduler opens these files only after that. They are checked only if the scheduler is sure to
    run on this node: other nodes may have other folders."""
    is_here = parallel.data_parallel_size_local > 0 and parallel.data_parallel_backend != "ray"
    if not is_here or parallel.nnodes > 1:
        return
    from continuum_connector import switch_endpoint
    from continuum_connector.observe import trace

    if ours.trace_path:
        trace.check(ours.trace_path)
    if ours.switch_path:
        switch_endpoint.check(ours.switch_path)


def our_config(transfer: Any) -> ContinuumConfig | None:
    """Our config in vLLM's KVTransferConfig, also inside a MultiConnector's; None if that names
    only other connectors. ConfigError if our config cannot work."""
    connector = getattr(transfer, "kv_connector", None)
    if connector is None:
        return None
    from continuum_connector.config import load_config, our_part

    given = (getattr(transfer, f"kv_{name}", None) for name in ("connector_extra_config", "role"))
    extra = our_part(connector, *given)
    return None if extra is None else load_config(extra)


def is_in(vllm_config: Any) -> bool:
    """Whether our subclass is, or will be, the scheduler of a server with that config."""
    ours, config = our_config(vllm_config.kv_transfer_config), vllm_config.scheduler_config
    is_named = config.scheduler_cls == f"{__package__.partition('.')[0]}.scheduler_cls"
    return ours is not None and (is_named or "get_scheduler_cls" in vars(config))


def _our_class(config: Any) -> type:
    return subclass(type(config).get_scheduler_cls(config))  # type: ignore[no-any-return]


def scheduler_cls(*args: Any, **kwargs: Any) -> Any:
    """Stand in for a class: `--scheduler-cls continuum_connector.scheduler_cls`.

    It derives from the class that vLLM would have chosen, so that one name serves sync and async.
    """
    vllm_config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    config = vllm_config.scheduler_config
    named, config.scheduler_cls = config.scheduler_cls, None
    try:
        base = type(config).get_scheduler_cls(config)
    finally:
        config.scheduler_cls = named
    ours = our_config(vllm_config.kv_transfer_config)
    chosen = base if ours is None else subclass(base)
    return chosen(*args, **kwargs)


def __getattr__(name: str) -> Any:
    """Our subclasses of vLLM's own schedulers, by name: pickle looks for them here."""
    from continuum_connector.vllm import compat

    for base in compat.schedulers():
        if name == f"Continuum{base.__name__}":
            return subclass(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def subclass(base: Any) -> Any:
    """Return `base` with our hooks; one class per base."""
    from continuum_connector.connector import ContinuumConnector
    from continuum_connector.vllm import compat
    from continuum_connector.vllm.hooks import STOPPED, Hooks, ends_session

    class ContinuumScheduler(base):  # type: ignore[misc]
        """vLLM's scheduler with pins that yield and turns in program order.

        All that is ours is in `_continuum`, so that no name of vLLM's or of another subclass is
        taken. It is None if the scheduler has no connector of ours that can serve it.
        """

        _continuum: Hooks | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            ours = compat.find_ours(getattr(self, "connector", None), ContinuumConnector)
            if ours is not None and ours.ensure_bound():
                self._continuum = hooks = Hooks(self, ours)
                ours.attached(base.__name__, hooks.order and hooks.order.switch)

        def _select_waiting_queue_for_scheduling(self) -> Any:  # vLLM <= 0.30
            own = super()._select_waiting_queue_for_scheduling
            return own() if self._continuum is None else self._continuum.next_queue(own)

        def _handle_blocked_waiting_request(self, request: Any) -> Any:  # vLLM >= 0.31
            if self._continuum is not None:
                self._continuum.allocation.before_admission()
            return super()._handle_blocked_waiting_request(request)

        def add_request(self, request: Any) -> None:
            ours = None if self._continuum is None else self._continuum.acting
            known = self.requests.get(request.request_id)
            if ours is not None and known is None:
                ours.before_queued(request)
            if ours is not None and ends_session(known, request):
                self.finish_requests(request.request_id, STOPPED)
            else:
                super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            if self._continuum is None:
                return super().schedule(*args, **kwargs)
            self._continuum.before_step()
            step = super().schedule(*args, **kwargs)
            self._continuum.after_step()
            return step

        def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
            if self._continuum is not None:
                self._continuum.before_preemption(request)
            super()._preempt_request(request, *args, **kwargs)

        def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
            own = functools.partial(super().reset_prefix_cache, *args, **kwargs)
            name = kwargs.get("reset_connector", args[1] if len(args) > 1 else False)
            if isinstance(name, dict):  # no reset: program_endpoint.py asks for something else
                return self._continuum is None or not self._continuum.end_program(name)
            if self._continuum is None:
                return bool(own())
            return bool(self._continuum.resets.reset(own, name))

    ContinuumScheduler.__name__ = ContinuumScheduler.__qualname__ = f"Continuum{base.__name__}"
    return ContinuumScheduler
