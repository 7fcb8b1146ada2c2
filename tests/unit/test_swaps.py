"""What vLLM did not hand us: walks up the stack, and methods and fields of its objects that we set.

Each is listed with the hook that would end it, by its number in docs/upstream.md, or with why none
would. Names that we only read or call are in touched.py.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import continuum_connector
from continuum_connector.vllm.touched import TOUCHED

PACKAGE = Path(continuum_connector.__file__).parent
NAMES = {name for touch in TOUCHED for name in touch.any_of}
OBJECTS = {"request", "scheduler", "pool", "block", "manager", "coordinator"}
WALKS = {"_getframe", "currentframe", "stack", "callers"}
# Of `continuum check`, whose config no server gets.
CHECKS_OWN = ("vllm/planned.py", "vllm/pretend.py")

LEFT = {
    "vllm/attach.py _check_args engine_args.kv_transfer_config": "a vLLM that cannot build us",
    "vllm/attach.py install engine_args_class.create_engine_config": 7,
    "vllm/attach.py prepare config.get_scheduler_cls": 7,
    "vllm/attach.py scheduler_cls config.scheduler_cls": "for one call, then as the user named it",
    "vllm/compat.py ask_to_recompute vllm_config.kv_transfer_config.kv_load_failure_policy": 6,
    "vllm/compat.py callers walks": "for those who ask it, each listed here",
    "vllm/compat.py count_no_backlog scheduler.prefill_capacity_bound": 9,
    "vllm/compat.py end_load request.status": 10,
    "vllm/compat.py find_wake walks": 2,
    "vllm/compat.py free_blocks_at_once scheduler.defer_block_free": 3,
    "vllm/compat.py look_up_as_without_connector scheduler.has_mamba_layers": "mends 0.26",
    "vllm/coordinator.py HitRule.__init__ coordinator.remove_skipped_blocks": 13,
    "vllm/coordinator.py Shadow.__init__ each.block_pool": "a copy's",
    "vllm/coordinator.py Shadow.__init__ self._coordinator.single_type_managers": "a copy's",
    "vllm/coordinator.py Shadow.keep_at request.shared_prefix_boundary": 15,
    "vllm/coordinator.py find walks": "0.26 to 0.29; later ones bind the manager",
    "vllm/coordinator.py hit_in_all_groups coordinator.find_longest_cache_hit_per_group": "0.26",
    "vllm/hooks.py Allocation.__init__ self._manager.allocate_slots": 11,
    "vllm/hooks.py Allocation._put_in_place self._manager.allocate_slots": 11,
    "vllm/hooks.py Order._give_back setattr(self._scheduler, name)": 14,
    "vllm/hooks.py Order.line_up running": 14,
    "vllm/hooks.py Order._take_over setattr(self._scheduler, name)": 14,
    "vllm/plugin.py _give_role KVTransferConfig.__post_init__": 7,
    "vllm/resets.py OlderTurns.__init__ self._manager.free": "only after a reset that was refused",
    "vllm/resets.py OlderTurns.end self._manager.free": "only after a reset that was refused",
    "vllm/resets.py _take_kv request.num_computed_tokens": 5,
    "vllm/resets.py _weight_version walks": 8,
    "vllm/resets.py as_if_free pool.get_num_free_blocks": 5,
    "vllm/worker_calls.py WorkerCalls._wrap setattr(holder, name)": 8,
    "vllm/worker_calls.py WorkerCalls.end delattr(holder, name)": 8,
    "vllm/worker_calls.py WorkerCalls.end setattr(holder, name)": 8,
    "vllm/worker_calls.py find_worker walks": 8,
}


def sites() -> Iterator[tuple[str, ast.AST]]:
    """(file, function and what it sets, function) of each such place in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file not in CHECKS_OWN:
            tree = ast.parse(path.read_text())
            yield from ((f"{file} {what}", where) for what, where in _within(tree, "", tree, file))


def _within(node: ast.AST, name: str, where: ast.AST, file: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = name and f"{name}." if isinstance(node, ast.ClassDef) else ""
            yield from _within(child, f"{inner}{child.name}", child, file)
            continue
        yield from ((f"{name} {what}", where) for what in _sets(child, file))
        yield from _within(child, name, where, file)


def _sets(node: ast.AST, file: str) -> Iterator[str]:
    if isinstance(node, ast.Name) and node.id == "callers":
        yield "walks"
    elif isinstance(node, ast.Attribute):
        if node.attr in WALKS and isinstance(node.ctx, ast.Load):
            yield "walks"
        elif isinstance(node.ctx, (ast.Store, ast.Del)) and _is_theirs(node, file):
            yield ast.unparse(node)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        if isinstance(node.value, ast.Name) and node.value.id in NAMES:  # running[:] = ...
            yield node.value.id
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        target, what = map(ast.unparse, node.args[:2])
        is_ours = target == "self" or re.fullmatch("_[A-Z]+", what)
        if file.startswith("vllm/") and not is_ours:
            yield f"{ast.unparse(node.func)}({target}, {what})"


def _is_theirs(node: ast.Attribute, file: str) -> bool:
    root = ast.unparse(node.value)
    is_object = file.startswith("vllm/") or root.rpartition(".")[2].strip("_") in OBJECTS
    return node.attr in NAMES and root != "self" and is_object


def test_each_walk_and_each_method_or_field_that_we_set_is_listed() -> None:
    assert {key for key, _ in sites()} == set(LEFT)


def test_its_reason_stands_beside_it() -> None:
    """In the words of its function, or of a comment there."""
    for key, where in sites():
        assert isinstance(where, (ast.FunctionDef, ast.ClassDef)), key
        source = (PACKAGE / key.split()[0]).read_text().splitlines()
        lines = source[where.lineno - 1 : where.end_lineno]
        assert ast.get_docstring(where) or any(" # " in f" {line}" for line in lines), key


def test_the_hooks_that_would_end_them_are_asked_for() -> None:
    page = (PACKAGE.parent / "docs" / "upstream.md").read_text()
    asked = {int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert {hook for hook in LEFT.values() if isinstance(hook, int)} <= asked
