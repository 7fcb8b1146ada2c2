"""How every command ends: with one sentence on stderr about what went wrong, and a status.

It needs no other package, because it also ends commands whose packages are missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

from continuum_connector.errors import ToldError, shown

DONE = 0
FAILED = 1  # because of an input, a file or a server: the sentence says which
USAGE = 2  # the command line itself is wrong
UNSEEN = 3  # `check` found no error, but could not see everything
BUG = 70  # in our own code
STOPPED = 130  # by Ctrl-C

OURS = ("bench", "continuum_connector")
TRACEBACK = "CONTINUUM_TRACEBACK"
LACKS = (
    "this needs the package {}, which is not installed or cannot be imported; in a clone, "
    "pip install '.[cli]' installs what commands need, '.[bench]' what benches do"
)
MOST = 1000  # characters of a sentence, because a value in it may have any length
_PASSWORDS = re.compile(r"(?:(?<=//)|\b[\w.+%-]+:(?!//))\S*@")
_KEYS = re.compile(r"([?&][\w-]*(?:key|token|secret|password)[\w-]*=)[^&\s'\"]*", re.IGNORECASE)
_SIZES = {"COLUMNS": 20, "LINES": 5, "TERMINAL_WIDTH": 20}  # each with the least we can draw on


def tell(who: str, what: str) -> None:
    """Print one line on stderr, without passwords and without anything that moves the cursor."""
    line = shown(hidden(" ".join(what.split())))
    if len(line) > MOST:
        line = f"{line[: MOST - 200]} ... {line[-200:]}"
    with contextlib.suppress(OSError, ValueError):  # nobody reads stderr
        print(f"{who}: {line}", file=sys.stderr, flush=True)


def hidden(text: str) -> str:
    """The text, with the passwords and keys in its addresses replaced."""
    return _KEYS.sub(r"\1***", _PASSWORDS.sub("***@", text))


def run(work: Callable[[], object], who: str) -> int:
    """Do the work and return the status. Whatever it raises becomes a sentence on stderr.

    The code that finds a mistake of the user words it. Here is what may happen anywhere: a file
    that cannot be used, a closed output, a missing package, Ctrl-C.
    """
    prepare()
    status = _status(work, who)
    try:
        sys.stdout.flush()
    except OSError as error:
        _drop_output()
        if not isinstance(error, BrokenPipeError):  # its reader has seen enough
            tell(who, why(error))
            status = status or FAILED
    except ValueError:  # closed
        pass
    return status


def _status(work: Callable[[], object], who: str) -> int:
    try:
        raise SystemExit(work())
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or DONE
        tell(who, end.code)  # as Python does with a text
    except KeyboardInterrupt:
        return STOPPED
    except BrokenPipeError:  # `| head` has seen enough
        return DONE
    except ToldError as error:
        tell(who, str(error))
    except OSError as error:
        if not error.filename and error.errno == errno.ENOSPC:
            _drop_output()
        tell(who, why(error))
    except MemoryError:
        tell(who, "the memory does not suffice for that much; ask for less")
    except Exception as error:  # the only place that may catch this: the user is told of a bug
        package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        # A name of this project is no package: what lacks it is ours.
        if isinstance(error, ImportError) and package not in OURS:
            tell(who, LACKS.format(package))
            return FAILED
        if os.environ.get(TRACEBACK):
            raise
        what = f"{type(error).__name__}: {error}"
        tell(who, f"a bug of ours ({what}); {TRACEBACK}=1 shows where it is")
        return BUG
    return FAILED


def why(error: OSError) -> str:
    """What the system said, and about which file."""
    said = error.strerror or str(error) or type(error).__name__
    if error.filename:
        return f"{error.filename} cannot be used ({said})"
    if error.errno == errno.ENOSPC:
        return f"what it prints cannot be written ({said})"
    return said


def _drop_output() -> None:
    """Discard what is left, or it would be tried again, and fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare() -> None:
    """Ignore impossible sizes of the terminal, and make every character printable."""
    for name, least in _SIZES.items():
        size = os.environ.get(name, "")
        if not (re.fullmatch("[0-9]{1,4}", size) and int(size) >= least):
            os.environ.pop(name, None)
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def leave(work: Callable[[], object], who: str) -> None:
    """`run`, then end the process, so that a late Ctrl-C cannot print a traceback."""
    status = run(work, who)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(status)
