"""What is asked of vLLM's own worker by name reaches our half: other weights, sleep."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.lora import worker_manager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from bench.sim import versions
from continuum_connector.errors import TransferError
from continuum_connector.vllm import worker_calls
from continuum_connector.vllm.worker_calls import CHANGING, WorkerCalls, find_worker

# Public methods of a worker that sound like weights, adapters or sleep and are not: they read,
# prepare, or only choose. `init_weight_transfer_engine` opens a connection; `remove_lora` leaves an
# adapter's blocks to its name, and add_lora is told when that comes again; `elastic_ep_execute`
# moves experts, whose weights are the same elsewhere.
HARMLESS = {
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine", "compute_weight_checksums"),
    *("supports_draft_weight_updates", "get_draft_model", "get_model", "get_model_inspection"),
    *("list_loras", "pin_lora", "remove_lora", "elastic_ep_execute", "execute_model"),
    *("update_config", "update_environment_variables", "update_max_model_len"),
    *("compile_or_warm_up_model", "save_tensorized_model", "sleep_mode_backend"),
    *("checkpoint_restore", "checkpoint_prepare", "get_simple_cpu_offload_num_cpu_blocks"),
}
SOUNDS = ("weight", "load", "lora", "model", "update", "sleep", "wake", "discard", "restore")


class Told:
    """What was told, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def new_weights(self, how: str) -> None:
        self.log.append(how)

    def unregister_kv_caches(self) -> None:
        self.log.append("asleep")

    def restore_kv_caches(self) -> None:
        self.log.append("awake")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def load_weights(self, weights: Any) -> set[str]:
        return {name for name, _ in weights}


class Runner:
    """A model runner, as far as a worker's methods ask it."""

    def __init__(self) -> None:
        self.model = Model()
        self.drafts = Model()
        self.lora: list[str] = []

    def get_model(self) -> Any:
        return self.model

    def get_draft_model(self) -> Any:
        return self.drafts

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model.load_weights([("layer.weight", None)])

    def load_model(self, **kwargs: Any) -> None:
        self.model = Model()

    def add_lora(self, request: Any) -> bool:
        self.lora.append(request.lora_name)
        return True

    def reset_lora_state(self) -> None: ...


class Extension:
    """As trainers mix one in."""

    def update_weights_from_ipc(self) -> str:
        return "done"

    def report_device_id(self) -> str:
        return "cpu"


@pytest.fixture
def of_vllm() -> Iterator[Any]:
    """vLLM's CPU worker around a runner that computes nothing; all its methods are its own."""
    worker = object.__new__(type("Mixed", (CPUWorker, Extension), {}))
    worker.vllm_config = versions.vllm_config(block_size=16)
    worker.parallel_config = worker.vllm_config.parallel_config
    worker.model_config = worker.vllm_config.model_config
    worker.model_runner = Runner()
    worker.weight_transfer_engine = None
    with set_current_vllm_config(worker.vllm_config):
        yield worker


def alone(is_so: bool) -> bool:
    return is_so


def listening(worker: Any, told: Told, anyone: Callable[[bool], bool] = alone) -> WorkerCalls:
    return WorkerCalls(worker, told.new_weights, told, anyone)


def ask(worker: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """As collective_rpc does."""
    return run_method(worker, method, args, kwargs)


def test_every_method_that_sounds_like_weights_or_sleep_is_seen_or_known_to_be_harmless(
    of_vllm: Any,
) -> None:
    """What a new vLLM adds turns up here."""
    seen = listening(of_vllm, Told()).names
    there = {name for name in (*dir(Worker), *dir(CPUWorker)) if not name.startswith("_")}
    sounding = {name for name in there if any(word in name for word in SOUNDS)}
    assert sounding - HARMLESS <= seen
    asked_by_trainers = {"reload_weights", "update_weights", "sleep", "wake_up", "apply_model"}
    assert asked_by_trainers | {"start_weight_update", "finish_weight_update", "add_lora"} <= seen
    assert set(CHANGING) - there <= {"reset_weights"}, "vLLM >= 0.32 has it"


@pytest.mark.parametrize(
    ("method", "args"),
    [("reload_weights", ()), ("apply_model", (type,)), ("update_weights_from_ipc", ())],
)
def test_a_call_that_changes_weights_is_told_once_whatever_it_calls(
    of_vllm: Any, method: str, args: tuple[Any, ...]
) -> None:
    told = Told()
    listening(of_vllm, told)
    ask(of_vllm, method, *args)
    assert told.log == [method]


class Subclass(CPUWorker):
    """As trainers name one by `worker_cls`; it needs no extension."""

    @property
    def weight_of_now(self) -> str:
        raise RuntimeError("not asked yet")

    def broadcast_param(self) -> None: ...


def test_a_trainers_own_methods_are_seen_however_it_brings_its_class(of_vllm: Any) -> None:
    """An extension may be named otherwise than in the module that it is written in."""
    told = Told()
    of_vllm.__class__ = type("Mixed", (Subclass, Extension), {})
    listening(of_vllm, told)
    ask(of_vllm, "broadcast_param")
    ask(of_vllm, "update_weights_from_ipc")
    assert told.log == ["broadcast_param", "update_weights_from_ipc"]


def test_weights_that_an_extension_gives_the_model_itself_are_told(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    assert of_vllm.model_runner.model.load_weights([("a", None)]) == {"a"}
    of_vllm.model_runner.drafts.load_weights([])
    of_vllm.model_runner.reload_weights()
    assert told.log == ["load_weights", "load_weights", "reload_weights"]


def test_a_call_that_fails_half_way_has_changed_weights(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    with pytest.raises(RuntimeError, match="eight transfer not configured"):
        ask(of_vllm, "update_weights", {})
    assert told.log == ["update_weights"]


def test_a_model_that_is_loaded_anew_is_followed(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    before = of_vllm.get_model()
    of_vllm.model_runner.load_model()
    assert told.log == ["load_model"]
    of_vllm.get_model().load_weights([])
    assert of_vllm.get_model() is not before
    assert told.log == ["load_model", "load_weights"]


def test_what_only_asks_is_not_told(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    assert ask(of_vllm, "report_device_id") == "cpu"
    of_vllm.get_model()
    assert told.log == []


def test_an_adapter_is_told_when_its_name_comes_again(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    for name, inplace in (("a", False), ("b", False), ("a", False), ("c", True)):
        request = LoRARequest(name, 1, "/adapters")
        request.load_inplace = inplace
        assert ask(of_vllm, "add_lora", request)
    assert of_vllm.model_runner.lora == ["a", "b", "a", "c"]
    assert told.log == ["add_lora", "add_lora"]


class AdapterSlots:
    """What vLLM's manager of adapters keeps them in: as many as fit, the oldest leave."""

    lora_slots = capacity = 2

    def __init__(self) -> None:
        self.there: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.there)

    def list_adapters(self) -> dict[int, Any]:
        return dict(self.there)

    def remove_adapter(self, adapter: int) -> bool:
        return self.there.pop(adapter, None) is not None

    def remove_oldest_adapter(self) -> None:
        del self.there[next(iter(self.there))]

    def add_adapter(self, lora: Any) -> bool:
        self.there[lora.id] = lora
        return True

    def get_adapter(self, adapter: int) -> Any:
        return self.there.get(adapter)

    def activate_adapter(self, adapter: int) -> None: ...

    def set_adapter_mapping(self, mapping: Any) -> None: ...


class Adapters(LoRAModelRunnerMixin):  # type: ignore[misc]
    """vLLM's own way from a step's turns, and from add_lora, to an adapter that is read."""

    lora_config = SimpleNamespace(max_loras=2)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_manager, "LRUCacheLoRAModelManager", AdapterSlots)
        self.lora_manager = object.__new__(LRUCacheWorkerLoRAManager)
        self.lora_manager._adapter_manager = AdapterSlots()
        self.read: list[str] = []
        self.lora_manager._load_adapter = self._load

    def _load(self, request: LoRARequest) -> Any:
        if "missing" in request.lora_path:
            raise ValueError(request.lora_path)
        self.read.append(request.lora_name)
        return SimpleNamespace(id=request.lora_int_id)

    def compute(self, *adapters: LoRARequest) -> None:
        """A step of turns with these adapters."""
        ids = tuple(each.lora_int_id for each in adapters)
        self._set_active_loras(ids, ids, set(adapters))


@pytest.fixture
def with_adapters(of_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    adapters = Adapters(monkeypatch)
    runner = of_vllm.model_runner
    runner.lora_manager, runner.compute = adapters.lora_manager, adapters.compute
    runner.add_lora, runner.read = adapters.add_lora, adapters.read
    return of_vllm


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "adapter_model.safetensors").write_text(name)
        return tmp_path / name

    return write


def test_an_adapter_that_the_forward_pass_reads_under_an_old_name_is_told(
    with_adapters: Any,
) -> None:
    """An offline trainer sends LoRARequest("policy", step, path) with each batch, and never calls
    add_lora. Its files may be gone by now, or be on another machine."""
    told = Told()
    calls = listening(with_adapters, told)
    runner = with_adapters.model_runner
    for step in (1, 2, 3):
        runner.compute(LoRARequest("policy", step, f"/nowhere/step{step}"))
        runner.compute(LoRARequest("policy", step, f"/nowhere/step{step}"))  # it is there by now
        assert told.log == ["add_lora"] * (step - 1)
    assert ask(with_adapters, "add_lora", LoRARequest("policy", 4, "/nowhere/step4"))
    assert told.log == ["add_lora"] * 3
    with pytest.raises(ValueError, match="missing"):
        runner.compute(LoRARequest("policy", 5, "/missing"))
    assert told.log == ["add_lora"] * 3, "nothing was read"
    calls.end()
    runner.compute(LoRARequest("policy", 6, "/nowhere/step6"))
    assert told.log == ["add_lora"] * 3


def test_adapters_that_take_turns_in_memory_begin_no_epoch_until_one_is_trained_again(
    with_adapters: Any, adapter: Callable[[str], Path]
) -> None:
    """More adapters than fit: each is read again and again, always the same."""
    told = Told()
    listening(with_adapters, told)
    runner = with_adapters.model_runner
    requests = [
        LoRARequest(name, number, str(adapter(name)))
        for number, name in enumerate(("a", "b", "c", "d"), 1)
    ]
    for _ in range(3):
        for request in requests:
            runner.compute(request)
    assert len(runner.read) == 12
    assert told.log == []
    adapter("b")  # written anew in the same place
    runner.compute(requests[0])
    assert told.log == []
    runner.compute(requests[1])
    assert told.log == ["add_lora"]
    runner.compute(LoRARequest("c", 3, str(adapter("e"))))
    assert told.log == ["add_lora"] * 2


def test_an_adapter_that_was_written_while_it_was_read_may_be_either(
    with_adapters: Any, adapter: Callable[[str], Path]
) -> None:
    runner = with_adapters.model_runner
    inner = runner.lora_manager._load_adapter
    runner.lora_manager._load_adapter = lambda request: (adapter("a"), inner(request))[1]
    told = Told()
    listening(with_adapters, told)
    for _ in range(2):
        assert told.log == []
        runner.compute(LoRARequest("a", 1, str(adapter("a"))))
        runner.lora_manager._adapter_manager.there.clear()
    assert told.log == ["add_lora"]


def test_the_names_of_adapters_are_forgotten_with_all_that_they_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_calls, "_MAX_NAMES", 2)
    names = worker_calls.AdapterNames()
    said = [names.read(LoRARequest(name, 1, "/nowhere"), ()) for name in "abcd"]
    assert said == [False, False, True, False]


def test_the_kv_cache_is_let_go_before_sleep_and_taken_again_with_its_tag(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    ask(of_vllm, "sleep", level=1)
    ask(of_vllm, "wake_up", tags=["weights"])
    assert told.log == ["asleep"]
    ask(of_vllm, "wake_up", tags=["kv_cache"])
    assert told.log == ["asleep", "awake"]


def test_where_another_rank_refuses_no_rank_sleeps(of_vllm: Any) -> None:
    """vLLM takes itself for awake then, and would wake nobody."""
    told, said = Told(), []
    listening(of_vllm, told, lambda is_so: said.append(is_so) or True)  # type: ignore[func-returns-value]
    with pytest.raises(TransferError, match="another rank keeps copies"):
        ask(of_vllm, "sleep", level=1)
    assert told.log == ["asleep", "awake"]
    assert said == [False]


@pytest.mark.parametrize("kind", [TransferError, ValueError])
def test_a_rank_that_refuses_to_sleep_tells_the_others(of_vllm: Any, kind: type[Exception]) -> None:
    class Busy(Told):
        def unregister_kv_caches(self) -> None:
            raise kind("copies are under way")

    told, said = Busy(), []
    listening(of_vllm, told, lambda is_so: said.append(is_so) or is_so)  # type: ignore[func-returns-value]
    with pytest.raises(kind, match="copies are under way"):
        ask(of_vllm, "sleep", level=1)
    assert (told.log, said) == ([], [True])


RANK = """
import sys
import torch.distributed as dist
from continuum_connector.worker.worker import anyone

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=4)
across = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
down = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
mine = [across[rank // 2], down[rank % 2]]
print([anyone(mine, rank == busy) for busy in range(5)], anyone([], False), anyone([], True))
"""


def test_what_one_rank_of_four_says_all_hear(tmp_path: Path) -> None:
    """Two by two, as tensor and pipeline parallelism lay them out."""
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(n), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    said = {rank.communicate(timeout=120)[0].strip() for rank in ranks}
    assert said == {"[True, True, True, True, False] False True"}


def test_weights_that_sleep_threw_away_are_other_ones(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    ask(of_vllm, "sleep", level=2)
    ask(of_vllm, "wake_up", ["kv_cache"])
    ask(of_vllm, "wake_up", ["weights"])
    ask(of_vllm, "sleep", 1)
    ask(of_vllm, "wake_up")
    assert told.log == ["asleep", "awake", "wake_up", "asleep", "awake"]


@pytest.mark.skipif(not hasattr(Worker, "discard"), reason="vLLM <= 0.31")
def test_a_kv_cache_that_was_not_discarded_is_still_there(of_vllm: Any) -> None:
    told = Told()
    listening(of_vllm, told)
    with pytest.raises(RuntimeError, match="not supported on CPU"):
        ask(of_vllm, "discard", ("kv_cache",))
    assert told.log == ["asleep", "awake"]


def test_at_the_end_the_worker_is_as_it_was(of_vllm: Any) -> None:
    told = Told()
    holders = of_vllm, of_vllm.model_runner, of_vllm.model_runner.model
    before = [dict(vars(holder)) for holder in holders]
    calls = listening(of_vllm, told)
    kept = of_vllm.reload_weights
    assert [dict(vars(holder)) for holder in holders] != before
    calls.end()
    assert [dict(vars(holder)) for holder in holders] == before
    kept()
    assert told.log == []


def test_the_worker_is_found_from_where_it_gives_a_connector_its_kv_cache(of_vllm: Any) -> None:
    connector = SimpleNamespace(register_kv_caches=lambda caches: find_worker())

    class Asking(CPUWorker):
        def initialize_from_config(self, kv_cache_config: Any) -> Any:
            return connector.register_kv_caches({})

    worker = object.__new__(Asking)
    assert worker.initialize_from_config(None) is worker
    assert connector.register_kv_caches({}) is None
