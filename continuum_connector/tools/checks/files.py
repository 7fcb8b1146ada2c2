"""Lines on the files that the connector writes, and the one that it obeys."""

from __future__ import annotations

import os
from collections.abc import Iterator

from continuum_connector import epoch_endpoint, switch_endpoint
from continuum_connector.endpoints import read_key
from continuum_connector.errors import ConfigError
from continuum_connector.switch import MEANINGS, read_switch
from continuum_connector.tools.checks.line import Line, error, ok, warning
from continuum_connector.tools.checks.machine import Machine
from continuum_connector.tools.checks.plan import Plan


def lines(machine: Machine, plan: Plan) -> Iterator[Line]:
    """Can they be written, or read? Nothing is said of those that are not asked for."""
    if path := plan.config.state_path:
        yield _state(machine, path)
    if path := plan.config.trace_path:
        yield _trace(machine, path)
    if path := plan.config.switch_path:
        yield _switch(machine, path)
    if switch_endpoint.MIDDLEWARE in plan.middleware:
        yield _switch_endpoint(machine)
    if epoch_endpoint.MIDDLEWARE in plan.middleware:
        yield _epoch_endpoint(machine)


def _state(machine: Machine, path: str) -> Line:
    if not machine.can_write(path):
        text = f"{path} cannot be written, so what is learned ends with the process"
        return warning("state_path", text, "name a file in a folder that exists and is writable")
    where = "a file of its own per model and device in it" if machine.is_folder(path) else path
    return ok("state_path", f"learned costs and tool times outlive a restart: {where}")


def _trace(machine: Machine, path: str) -> Line:
    if not machine.can_write(path):
        text = f"{path} cannot be written, so the server stops at start"
        cure = "name a file in a folder that exists and is writable, or leave it empty"
        return error("trace_path", text, cure)
    return ok("trace_path", f"one line per decision and outcome: {path}")


def _switch(machine: Machine, path: str) -> Line:
    folder = os.path.dirname(path) or "."
    if not machine.is_folder(folder):
        text = f"{folder} is no folder, so the server stops at start"
        return error("switch_path", text, "make the folder, or leave switch_path empty")
    place = machine.place(path)
    try:
        said = read_switch(place)
    except OSError as why:
        text = f"{path} cannot be read ({why.strerror}), so it would switch nothing"
        return warning("switch_path", text, "name a file that the server may read")
    if said not in MEANINGS:
        text = f"{path} says {said!r}, which is neither on nor off: the server starts switched on"
        return warning("switch_path", text, "write on or off into it")
    if not MEANINGS[said]:
        text = f"{path} says off, so the server starts switched off"
        return warning("switch_path", text, "write on into it, or remove it")
    why_on = "says so" if place.exists() else "is not there, which means on"
    return ok("switch_path", f"on: {path} {why_on}")


def _switch_endpoint(machine: Machine) -> Line:
    try:
        path, _ = switch_endpoint.read_settings(machine.environ)
    except ConfigError as why:
        text, _, cure = str(why).partition("; ")
        return error("switch endpoint", text, cure)
    text = f"{switch_endpoint.PATH} reads and writes {path}, for who has the key"
    return ok("switch endpoint", text)


def _epoch_endpoint(machine: Machine) -> Line:
    try:
        read_key(machine.environ, epoch_endpoint.PATH, epoch_endpoint.MIDDLEWARE)
    except ConfigError as why:
        text, _, cure = str(why).partition("; ")
        return error("epoch endpoint", text, cure)
    return ok("epoch endpoint", f"{epoch_endpoint.PATH} begins an epoch, for who has the key")
