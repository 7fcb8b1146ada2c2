"""WorkerCalls: the calls to a vLLM worker that a cache below VRAM must know of.

No vLLM up to 0.33 tells a connector that the weights under it have changed, and none before 0.33
that its KV cache is about to be taken away. Trainers call the worker by name for both, through
`collective_rpc`, which looks the name up on the worker (v1/serial_utils.py, run_method). So the
methods are wrapped on the one worker that has our connector, and on its model; no class is touched.

A change without such a call cannot be seen, for instance by a function that was sent to the worker
and writes tensors itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from continuum_connector.errors import TransferError
from continuum_connector.vllm import compat

# Methods of a worker that may change its weights (v1/worker/gpu_worker.py); apply_model runs a
# function of the caller's on the model. Not every release has all of them.
CHANGING = (
    *("reload_weights", "reset_weights", "apply_model"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
# A trainer may add any methods, by `worker_extension_cls` or `worker_cls`; those with such a word
# in their name are taken to change weights. A false alarm costs what is below VRAM, a change that
# is missed makes wrong answers.
_OF_WEIGHTS = ("weight", "param", "lora", "update", "refit")
_ANOTHER_REFUSED = (
    "another rank keeps copies of the KV cache under way, so it is taken away on none; "
    "ask again, or restart the server"
)
_MAX_NAMES = 4096  # of adapters
_Files = tuple[tuple[Any, ...], ...]


class _Wrap(NamedTuple):
    holder: Any
    name: str
    outer: Callable[..., Any]
    before: Any  # the holder's own attribute of that name, or None


def find_worker() -> Any:
    """The worker that is being given its KV cache further up this stack, or None.

    initialize_from_config <- ... <- register_kv_caches: a connector is not told its worker.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    return next((each for each in compat.callers() if isinstance(each, WorkerBase)), None)


def rank_groups() -> list[Any]:
    """The CPU process groups of this rank that together span its engine, asked one after the other;
    none if it is alone. The world's group may have other engines in it, of data parallelism."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return []
    names = ("get_tp_group", "get_pp_group", "get_pcp_group")
    groups = [getattr(parallel_state, name)() for name in names]
    return [group.cpu_group for group in groups if group.world_size > 1]


class WorkerCalls:
    """Wraps the methods of one worker, from its constructor on until `end`."""

    def __init__(
        self,
        worker: Any,
        new_weights: Callable[[str], None],
        sleep: Any,
        anyone: Callable[[bool], bool],
    ) -> None:
        """`new_weights` gets the name of the call that changed the weights, once that has returned.
        `sleep` has the hooks with which vLLM >= 0.33 tells a connector of sleep. `anyone` says
        whether its argument is true on any rank; every rank must call it."""
        self._worker, self._anyone = worker, anyone
        self._new_weights, self._sleep = new_weights, sleep
        self._wraps: list[_Wrap] = []
        self._depth = 0  # of calls that change weights: reload_weights calls load_weights
        self._adapters = AdapterNames()
        self._is_empty = False  # the weights were thrown away
        for name in dict.fromkeys((*CHANGING, *_of_trainer(worker))):
            self._wrap(worker, name, self._changing(name))
        self._follow_models(worker)
        # Extensions call the runner's methods as well, and these do more than load_weights.
        for holder in (worker, worker.model_runner):
            self._wrap(holder, "load_model", self._loading)
        self._wrap(worker.model_runner, "reload_weights", self._changing("reload_weights"))
        self._follow_adapters(worker)
        self._wrap(worker, "sleep", self._sleeping)
        self._wrap(worker, "wake_up", self._waking)
        self._wrap(worker, "discard", self._discarding)

    @property
    def names(self) -> frozenset[str]:
        """The methods that this release has."""
        return frozenset(wrap.name for wrap in self._wraps)

    def end(self) -> None:
        """Leave the worker as it was; from now on nothing is reported."""
        for holder, name, outer, before in reversed(self._wraps):
            if vars(holder).get(name) is not outer:
                continue  # somebody has wrapped it again
            if before is None:
                delattr(holder, name)
            else:
                setattr(holder, name, before)
        self._wraps.clear()

    def _wrap(self, holder: Any, name: str, around: Callable[..., Any]) -> None:
        """On the object, not its class: other workers of this process keep vLLM's own."""
        inner = getattr(holder, name, None)
        if not callable(inner):
            return

        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            return around(inner, *args, **kwargs) if self._wraps else inner(*args, **kwargs)

        self._wraps.append(_Wrap(holder, name, outer, vars(holder).get(name)))
        setattr(holder, name, outer)

    def _follow_models(self, worker: Any) -> None:
        """Wrap the models, and again after they are loaded again: then they are new objects."""
        known = [wrap.holder for wrap in self._wraps]
        for model in _models(worker):
            if not any(model is each for each in known):
                self._wrap(model, "load_weights", self._changing("load_weights"))

    def _follow_adapters(self, worker: Any) -> None:
        """Wrap what reads adapters. Calls of the worker's add_lora lead there, and so does the
        forward pass (lora/worker_manager.py). A release without it has add_lora alone."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        reads = (manager, "_load_adapter") if hasattr(manager, "_load_adapter") else None
        holder, name = reads or (worker, "add_lora")
        if not any(wrap.holder is holder and wrap.name == name for wrap in self._wraps):
            self._wrap(holder, name, self._adding)

    def _loading(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaded = self._changing("load_model")(inner, *args, **kwargs)
        self._follow_models(self._worker)
        self._follow_adapters(self._worker)
        return loaded

    def _changing(self, name: str) -> Callable[..., Any]:
        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return inner(*args, **kwargs)
            finally:  # also if it failed: some weights may be new
                self._depth -= 1
                if not self._depth:
                    self._new_weights(name)

        return around

    def _adding(self, inner: Callable[..., Any], lora_request: Any, *args: Any, **kw: Any) -> Any:
        """The hashes of an adapter's blocks cover its name, but not its weights."""
        before = _files(str(lora_request.lora_path))
        loaded = inner(lora_request, *args, **kw)
        if self._adapters.read(lora_request, before) and not self._depth:
            self._new_weights("add_lora")
        return loaded

    def _sleeping(self, inner: Callable[..., Any], level: int = 1, *args: Any, **kw: Any) -> Any:
        self._is_empty = self._is_empty or level >= 2
        return self._taking(inner, level, *args, **kw)

    def _discarding(self, inner: Callable[..., Any], tags: Any, *args: Any, **kw: Any) -> Any:
        self._is_empty = self._is_empty or "weights" in tags
        if "kv_cache" in tags:
            return self._taking(inner, tags, *args, **kw)
        return inner(tags, *args, **kw)

    def _taking(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take the KV cache away; if that is refused, as on a CPU, it is still there."""
        self._unregister()
        try:
            return inner(*args, **kwargs)
        except BaseException:
            self._sleep.restore_kv_caches()
            raise

    def _unregister(self) -> None:
        """Take the KV cache from all ranks or from none: vLLM cannot wake only some of them."""
        refusal: Exception | None = None
        try:
            self._sleep.unregister_kv_caches()
        except Exception as error:  # whatever it is, the other ranks wait for this one
            refusal = error
        if not self._anyone(refusal is not None):
            return
        if refusal is None:
            self._sleep.restore_kv_caches()
            refusal = TransferError(_ANOTHER_REFUSED)
        raise refusal

    def _waking(self, inner: Callable[..., Any], tags: Any = None, *args: Any, **kw: Any) -> Any:
        done = inner(tags, *args, **kw)
        if tags is None or "kv_cache" in tags:
            self._sleep.restore_kv_caches()
        if self._is_empty and (tags is None or "weights" in tags):
            self._is_empty = False
            self._new_weights("wake_up")
        return done


def _of_trainer(worker: Any) -> Iterator[str]:
    """The methods whose names sound like weights, in those of the worker's classes that are not
    vLLM's own. vLLM mixes `worker_extension_cls` in (worker_base.py, init_worker)."""
    for base in type(worker).__mro__:
        if not base.__module__.startswith("vllm."):
            for name, what in vars(base).items():
                is_method = callable(what) or isinstance(what, classmethod)
                if (
                    is_method
                    and name[0] != "_"
                    and any(word in name.lower() for word in _OF_WEIGHTS)
                ):
                    yield name


def _models(worker: Any) -> Iterator[Any]:
    """The model, and its draft model if the runner has one to give, asked for as vLLM does."""
    yield worker.get_model()
    draft = getattr(worker.model_runner, "get_draft_model", lambda: None)()
    if draft is not None:
        yield draft


class AdapterNames:
    """Says whether an adapter that vLLM reads is another than its name meant when it was last read:
    by its id, path, and the files there.

    A block's hash has the name of its adapter, and from vLLM 0.32 on the path, but never the
    weights. vLLM reads an adapter when a trainer adds it, and in the forward pass whenever a turn
    of the step has one that is not in memory: the first time, or again after others took its place.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str, _Files]] = {}

    def read(self, lora_request: Any, before: _Files) -> bool:
        """The adapter has been read; return whether its name may have meant another until now.
        `before`: what `_files` said before it was read.

        The same id, path and files are the same adapter. One without files, as of tensors that a
        trainer sends, is never known to be the same.
        """
        name, path = str(lora_request.lora_name), str(lora_request.lora_path)
        after = _files(path)
        is_whole = before in ((), after)  # not there before: vLLM has fetched it
        found = int(lora_request.lora_int_id), path, after if is_whole else ()
        is_full = name not in self._known and len(self._known) >= _MAX_NAMES
        if is_full:  # an epoch begins, so nothing is left that an older name could mean
            self._known.clear()
        known = self._known.get(name)
        self._known[name] = found
        if is_full or getattr(lora_request, "load_inplace", False):
            return True
        return known is not None and (known != found or not found[2] or before != after)


def _files(path: str) -> _Files:
    """What changes whenever a file of the adapter does; empty if there is none on this node."""
    try:
        seen = [(each.name, each.stat()) for each in Path(_folder(path)).iterdir()]
    except OSError:
        return ()
    return tuple(
        (name, at.st_dev, at.st_ino, at.st_size, at.st_mtime_ns, at.st_ctime_ns)
        for name, at in sorted(seen, key=lambda each: each[0])
    )


def _folder(path: str) -> str:
    """Where vLLM reads it (lora/utils.py, get_adapter_absolute_path), without asking a network.
    OSError if it is not on this node."""
    local = Path(path).expanduser()
    if local.is_absolute() or local.exists():
        return str(local)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except HFValidationError as error:
        raise FileNotFoundError(path) from error
