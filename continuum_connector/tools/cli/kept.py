"""Kept: how many bytes a server keeps of a context, for `continuum size`, and who says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from continuum_connector.tools.checks import kv as kvs
from continuum_connector.tools.checks.ask import KV
from continuum_connector.tools.checks.machine import Kv, see_vllm, this_machine
from continuum_connector.tools.checks.model_file import NoModelError, read_model_config
from continuum_connector.tools.checks.plan import Plan, UsageError, as_vllm_reads
from continuum_connector.tools.checks.shape import ShapeError, read_shape
from continuum_connector.tools.cli.pasted import looking, planned
from continuum_connector.tools.cli.server import CommandError
from continuum_connector.tools.cli.terminal import name, terminal


class Kept(NamedTuple):
    """What so many tokens of a context take, and what a turn of so many adds, over `num_gpus`."""

    context: Callable[[int], float]
    new: Callable[[int], float]
    num_gpus: int
    rests_on: str

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """What the other rows rest on, unless the user gave it."""
        gpus = f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"
        return [("KV as of", gpus, self.rests_on)] if self.rests_on else []

    def as_object(self) -> dict[str, object]:
        """The same for --json."""
        return {"rests_on": self.rests_on, "num_gpus": self.num_gpus}


def of_token(token: int, gpus: int, is_served: bool) -> Kept | None:
    """The bytes of a token that the user gives; None if the server gives them."""
    if is_served is bool(token):
        raise CommandError("give --model, a command or --bytes-per-token, one of them")
    if not token:
        return None
    return Kept(token.__mul__, token.__mul__, gpus or 1, "")


def of_server(command: list[str], options: Mapping[str, str], has_disk: bool) -> Kept:
    """What vLLM says of this server's KV; without a vLLM here, what config.json proves."""
    given = [word for name, value in options.items() if value for word in (name, value)]
    try:
        plan, environ = planned(command, given)
    except UsageError as error:
        raise CommandError(str(error)) from None
    if plan.why_no_server:
        raise CommandError(f"{plan.why_no_server}; paste all of `vllm serve MODEL ...`")
    machine = this_machine(environ)
    with looking():
        seen = see_vllm(machine, (KV, *plan.words))
    plan = as_vllm_reads(plan, seen.options, environ)
    if plan.unknown:
        _say_open(plan)
    if seen.kv is not None:
        return _of_kv(seen.kv, f"vLLM {seen.version}, its own layers on {seen.kv.device}", has_disk)
    if seen.refused:
        raise CommandError(f"vLLM refuses this: {seen.refused[:300]}; mend it")
    if seen.version and seen.not_seen:
        raise CommandError(
            f"not seen: vLLM {seen.version} cannot say here what is kept ({seen.not_seen[:300]}); "
            "give --bytes-per-token instead"
        )
    return _of_file(plan, environ, seen.trouble)


def _say_open(plan: Plan) -> None:
    shown = ", ".join(plan.unknown)[:200]
    text = f"not seen: {shown}; a default was taken, or none was given"
    terminal(stderr=True).print(name(text), soft_wrap=True)


def _of_kv(kv: Kv, rests_on: str, has_disk: bool) -> Kept:
    if why_not := kv.aside or kv.no_tier:
        raise CommandError(f"{why_not}; no DRAM would be used")
    if has_disk and kv.no_disk:
        raise CommandError(f"{kv.no_disk}; leave --dram out")
    return Kept(
        lambda tokens: kvs.context_bytes(kv, tokens),
        lambda tokens: kvs.new_bytes(kv, tokens),
        kv.num_ranks,
        f"{rests_on}: {kvs.in_words(kv)}",
    )


def _of_file(plan: Plan, environ: Mapping[str, str], trouble: str) -> Kept:
    """What config.json alone proves."""
    try:
        config = read_model_config(plan.model, environ)
        shape = read_shape(config, kv_cache_dtype=plan.kv_cache_dtype)
    except (NoModelError, ShapeError) as why:
        raise CommandError(f"{why}; give --bytes-per-token instead") from None
    ranks = plan.tensor_parallel
    return Kept(
        lambda tokens: shape.context_bytes(tokens, ranks),
        lambda tokens: shape.context_bytes(tokens, ranks),
        ranks * plan.pipeline_parallel,
        f"config.json alone, without vLLM{f' ({trouble[:80]})' if trouble else ''}",
    )
