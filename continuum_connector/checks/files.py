"""Lines on the files that the connector writes."""

from __future__ import annotations

from collections.abc import Iterator

from continuum_connector.checks.line import Line, error, ok, warning
from continuum_connector.checks.machine import Machine
from continuum_connector.checks.plan import Plan


def lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Can they be written? Nothing is said of those that are not asked for."""
    if path := plan.config.state_path:
        yield _state(machine, path)
    if path := plan.config.trace_path:
        yield _trace(machine, path)


def _state(machine: Machine, path: str) -> Line:
    if not machine.can_write(path):
        text = f"{path} cannot be written, so what is learned ends with the process"
        return warning("state_path", text, "name a file in a folder that exists and is writable")
    where = "a file of its own per model and device in it" if machine.is_folder(path) else path
    return ok("state_path", f"learned costs and tool times outlive a restart: {where}")


def _trace(machine: Machine, path: str) -> Line:
    if machine.is_folder(path) or not machine.can_write(path):
        text = f"{path} cannot be written, so the server stops at start"
        cure = "name a file in a folder that exists and is writable, or leave it empty"
        return error("trace_path", text, cure)
    return ok("trace_path", f"one line per decision and outcome: {path}")
