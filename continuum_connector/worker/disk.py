"""WorkerDisk: one rank's file on a disk, from its open, on a thread, to its end.

    start -> opening (folder, room, namespace, file) -> serves -> given up, or ended

Opening takes as long as reading the model's weights once, so DRAM serves alone until then. The disk
only copies to and from DRAM's slots; whatever happens to it, DRAM stays. What may take as long as
the disk does is done by two threads: the one that opens or closes the file, and a DiskWatch.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from continuum_connector.config import ContinuumConfig
from continuum_connector.errors import TransferError
from continuum_connector.files import MIN_LEFT
from continuum_connector.messages import DiskSpent, ReadOrder, WorkerReport, WriteOrder
from continuum_connector.worker.abi import DiskTuning
from continuum_connector.worker.layout import DISK_UNIT, Layout
from continuum_connector.worker.native import NativeDisk, NativeEngine
from continuum_connector.worker.tier import LOOK_EVERY_S

logger = logging.getLogger(f"vllm.{__name__}")

HUNG_S = 60.0  # without an answer, a disk counts as hanging, ...
# ... if it is so at this many looks in a row. The time passes while the whole process is stopped,
# too (SIGSTOP, a frozen container, a machine that sleeps), and then the disk is not to blame.
HUNG_LOOKS = 3
MAX_FOUND = 512  # slots that one report says a restart has found
# Size of a disk slot. Larger reads are no faster, and what a chain has
# after its last whole slot is on no disk, so a slot should be a small part of DRAM.
SLOT_BYTES, DRAM_SHARE = 2 * 2**20, 64
_HEAD_BYTES = 2**20  # at the beginning of the file, before its slots
_FACTS_AT, _MAX_FACTS = 8192, 65536  # of the file; csrc/disk_format.h
_END_S = 2.0
LOOK_S = 30.0  # between two looks at the file's place
_PAGE = 256  # bytes of the file beside it: far less than what a disk writes at once
_LOCK_EVERY_S = 0.1

ENDED = "the server ended before its disk was open"

_CONSEQUENCE = "what leaves DRAM is computed again until the server is restarted"


class Namespace(NamedTuple):
    """What a block's bytes depend on: the digest of it, and the facts as JSON, for people."""

    digest: bytes
    facts: str


Prove = Callable[[Layout, Callable[[], bool]], Namespace]  # BLOCKS until done or told to stop


class DiskPlace(NamedTuple):
    """Which file is this rank's. `num_ranks`: how many share the node's `disk_bytes`."""

    engine: int
    rank: int
    num_ranks: int


class DiskShape(NamedTuple):
    """How many disk slots one rank has, and how many blocks each takes."""

    num_slots: int
    slot_blocks: int


def blocks_per_slot(config: ContinuumConfig, num_ranks: int, slot_bytes: int) -> int:
    """Blocks in a disk slot: as many host slots of `slot_bytes` as make up SLOT_BYTES, but a small
    part of what each of a node's `num_ranks` ranks has."""
    most = config.tier_bytes // num_ranks // DRAM_SHARE // slot_bytes
    return max(1, min(-(-SLOT_BYTES // slot_bytes), most))


def disk_shape(config: ContinuumConfig, num_ranks: int, slot_bytes: int) -> DiskShape:
    """The shape for one of a node's `num_ranks` ranks, whose host slots have `slot_bytes`."""
    slot_blocks = blocks_per_slot(config, num_ranks, slot_bytes)
    stride = DISK_UNIT + slot_blocks * slot_bytes  # a header before each slot
    room = config.disk_bytes // num_ranks - _HEAD_BYTES
    return DiskShape(max(0, room // stride), slot_blocks)


class WorkerDisk:
    """One thread calls everything but `end`, which another may call if nothing is in flight. Only
    `end` blocks. Orders that come while there is no file fail as "no_tier"."""

    def __init__(
        self,
        config: ContinuumConfig,
        place: DiskPlace,
        prove: Prove,
        clock: Callable[[], float] = lambda: 0.0,
        wall_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._config = config
        self._place = place
        self._prove = prove
        self._clock, self._wall_clock = clock, wall_clock
        self._file: NativeDisk | None = None
        self._shape = DiskShape(0, 0)
        self._thread: threading.Thread | None = None  # opens the file, or closes it
        self._opened: NativeDisk | str | None = None  # what the thread says: the file, or why not
        self._is_over = threading.Event()
        self._is_given_up = False
        self._is_reset = False  # a reset came before there was a file
        self._is_scanned = False
        self._num_in_flight = 0
        self._looked = float("-inf")
        self._num_hung = 0  # looks in a row at which it owed an answer for too long
        self._watch: DiskWatch | None = None  # while the file is open
        self._spent: DiskSpent | None = None  # what an earlier server left
        self._why_anew = ""  # if it is begun anew

    @property
    def path(self) -> Path:
        name = f"dp{self._place.engine}-rank{self._place.rank}.slab"
        return Path(self._config.disk_path, name)

    def start(self, engine: NativeEngine, layout: Layout) -> None:
        """Open the file on a thread; `layout` is that of the host slots."""
        self._shape = disk_shape(self._config, self._place.num_ranks, layout.slot_bytes)
        if not self._run(self._open, engine, layout):
            self._opened = f"the system has no thread to open {self.path}"

    @property
    def is_due(self) -> bool:
        """Whether `follow` has something to do."""
        if self._is_given_up:
            return False
        if self._file is None:
            return self._opened is not None
        return not self._is_scanned or self._clock() - self._looked >= LOOK_EVERY_S

    def follow(self, report: WorkerReport) -> None:
        """Take over the file once it is open, then what a restart finds; check it once a second."""
        if not self.is_due:
            return
        if self._file is None:
            assert self._opened is not None
            self._take(self._opened, report)
            return
        if not self._is_scanned:
            self._scan(self._file, report)
        if self._clock() - self._looked >= LOOK_EVERY_S:
            self._look(self._file, report)

    def reset(self, report: WorkerReport) -> None:
        """From here on, what is on the disk now is foreign, even if the file is not open yet. A
        disk that was given up gets nothing more, so what is on it stays right for a restart."""
        self._is_reset = True
        if self._file is None or self._is_given_up:
            return  # of one that was given up, another thread may be closing the file
        try:
            self._file.reset()
        except TransferError as error:
            self.give_up(str(error), report)

    def submit(self, order: WriteOrder | ReadOrder) -> str:
        """Give one order to the disk, or return in a word why not; TransferError if it is
        refused."""
        if self._file is None or self._is_given_up:
            return "no_tier"
        self._file.submit(order)
        self._num_in_flight += 1
        return ""

    def spent(self, num_bytes: int) -> None:
        """Keep for a restart how much of the write budget is spent."""
        if self._watch is not None:
            self._watch.spent(num_bytes)

    def settle(self) -> None:
        """An order that was submitted has ended."""
        self._num_in_flight -= 1
        if self._is_given_up:
            self._let_go()

    def give_up(self, why: str, report: WorkerReport) -> None:
        """Run without a disk from here on; never waits. What is in flight settles as it ends."""
        if self._is_given_up:
            return
        self._stop()
        report.lose_disk(f"{why.rstrip('.')}; {_CONSEQUENCE}")
        logger.warning("No disk on this rank: %s", report.disk_down)
        self._let_go()

    def end(self) -> bool:
        """BLOCK until the file is closed. A disk that does not answer in time is logged and left.

        False: the disk hangs while it is being opened, so the engine must not be closed under it.
        """
        self._stop()
        if self._thread is not None:
            self._thread.join(2 * _END_S)
            if self._thread.is_alive():
                logger.warning("the disk at %s hangs, so this process cannot end", self.path)
                return False
        self._stop()  # also what the thread has begun
        file = self._file or self._opened
        self._file = self._opened = None
        if file is not None and not isinstance(file, str):
            self._close(file)
        return True

    def _stop(self) -> None:
        """The disk is not used from here on."""
        self._is_given_up = True
        self._is_over.set()
        if self._watch is not None:
            self._watch.end()

    def _run(self, what: Callable[..., None], *args: object) -> bool:
        """Run on a thread. It is a daemon, because a hanging disk must not keep Python from
        ending."""
        self._thread = threading.Thread(target=what, args=args, name="continuum-disk", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread to give, for instance for lack of memory
            self._thread = None
        return self._thread is not None

    def _open(self, engine: NativeEngine, layout: Layout) -> None:
        """Open the file, on the thread. If anything fails here, there is no disk."""
        try:
            self._opened = self._made(engine, layout)
        except (TransferError, OSError) as error:
            self._opened = str(error)
        except Exception as error:
            logger.exception("the disk at %s was not opened", self.path)
            self._opened = f"{self.path} was not opened: {error!r}"

    def _made(self, engine: NativeEngine, layout: Layout) -> NativeDisk:
        config, (num_slots, slot_blocks) = self._config, self._shape
        slot_bytes = slot_blocks * layout.slot_bytes
        if num_slots == 0:
            raise TransferError(
                f"disk_bytes = {config.disk_bytes} over {self._place.num_ranks} rank(s) holds no "
                f"slot ({slot_bytes} bytes each per rank), so nothing would be written"
            )
        make_folder(config.disk_path)
        with only_one(config.disk_path, self._is_over):
            namespace = self._prove(layout, self._is_over.is_set)
            check_room(self.path, _HEAD_BYTES + num_slots * (DISK_UNIT + slot_bytes))
            tuning = DiskTuning(
                num_slots=num_slots,
                slot_blocks=slot_blocks,
                namespace=namespace.digest,
                facts=namespace.facts,
            )
            before = read_facts(self.path)
            file = engine.open_disk(str(self.path), tuning)
        self._why_anew = why_anew(before, namespace.facts)
        self._watch = DiskWatch(self.path, self._wall_clock)
        self._spent = self._watch.spent_before()
        self._watch.start()
        return file

    def _take(self, opened: NativeDisk | str, report: WorkerReport) -> None:
        self._opened = None
        if isinstance(opened, str):
            self.give_up(opened, report)
            return
        self._file = opened
        if self._is_reset:
            self.reset(report)
        if self._is_given_up:
            return
        report.disk_slots[self._place.rank] = self._shape.num_slots
        if self._spent is not None:
            report.disk_spent[self._place.rank] = self._spent
        state = opened.state()
        logger.info(
            "disk of %d slots of %d blocks at %s (%s; %s)",
            *self._shape,
            self.path,
            "direct" if state.is_direct else "through the page cache, which takes memory from DRAM",
            "looking for what was kept" if state.was_kept else f"begun anew {self._why_anew}",
        )

    def _scan(self, file: NativeDisk, report: WorkerReport) -> None:
        """Tell some of what a restart finds, and when that was the last of it."""
        if found := file.scan(MAX_FOUND):
            report.found.setdefault(self._place.rank, []).extend(found)
        self._is_scanned = file.state().is_scanned
        if self._is_scanned:
            report.disk_scanned.add(self._place.rank)

    def _look(self, file: NativeDisk, report: WorkerReport) -> None:
        self._looked = self._clock()
        state = file.state()
        self._num_hung = self._num_hung + 1 if state.oldest_op_s >= HUNG_S else 0
        if state.error:
            self.give_up(state.why, report)
        elif self._num_hung >= HUNG_LOOKS:
            self.give_up(
                f"{self.path} has not answered for {state.oldest_op_s:.0f} s, and until it does, "
                "this process, and so its GPU, cannot end",
                report,
            )

    def _let_go(self) -> None:
        """Have the file closed once nothing is in flight."""
        file = self._file
        if file is None or self._num_in_flight:
            return
        self._file = None
        if not self._run(self._close, file):
            self._file = file  # so that `end` closes it

    def _close(self, file: NativeDisk) -> None:
        if not file.close(_END_S):
            logger.warning(
                "the disk at %s does not answer; what it still has to do is left behind, and "
                "this process ends, and frees its GPU, only once it answers",
                self.path,
            )


# --- the folder of the files: its owner, its lock, its room, whose blocks are in it -----------
def make_folder(path: str) -> None:
    """Make the last folder of `path`, for us alone; TransferError if somebody else may write it."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise TransferError(
            f"disk_path = {path!r} lies in no folder that is there, so no file was made; see that "
            "its drive is mounted, or make the folder above it"
        ) from None
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        is_link = stat.S_ISLNK(found.st_mode)
        why = "is a symbolic link, which may be pointed elsewhere" if is_link else "is no folder"
    elif found.st_uid != os.geteuid():
        why = f"belongs to user {found.st_uid}, not to {os.geteuid()} who runs the server"
    elif found.st_mode & 0o022:
        why = f"may be written by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise TransferError(
        f"disk_path = {path!r} {why}, so what is read from it could be anybody's; name a folder in "
        "it that is not there yet, which is then made for this server alone"
    )


@contextmanager
def only_one(folder: str, is_over: threading.Event) -> Iterator[None]:
    """Let one rank at a time in. So the first reads the weights for all, and each sees how much
    room the others have taken."""
    lock = os.open(
        Path(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if is_over.wait(_LOCK_EVERY_S):
                raise TransferError(ENDED)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for a fork that has the descriptor, too
        os.close(lock)


def check_room(path: Path, num_bytes: int) -> None:
    """Raise TransferError if a file of `num_bytes` at `path` would leave its file system too full,
    or if something else is there, such as a link to a file elsewhere. A file that has all its room
    already takes none, so a server finds it again however full the rest is."""
    system = os.statvfs(path.parent)
    free, total = (n * system.f_frsize for n in (system.f_bavail, system.f_blocks))
    taken = 0
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise TransferError(f"{path} is no file, so nothing can be kept in it; remove it")
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise TransferError(
                f"{path} may be another user's to write; remove it, and it is made for us alone"
            )
        taken = found.st_blocks * 512
    if num_bytes > taken and free + taken - num_bytes < MIN_LEFT * total:
        raise TransferError(
            f"{path} of {num_bytes} bytes would leave less than {MIN_LEFT:.0%} of its file system, "
            f"which has {total} bytes and {free + taken} free; lower disk_bytes, or remove what is "
            "not needed there, such as the *.slab of ranks that are no more"
        )


def read_facts(path: Path) -> str:
    """The facts that the file's blocks depend on, as whoever made it wrote them; "" if none are
    there."""
    with suppress(OSError), open(path, "rb") as file:
        return (
            os.pread(file.fileno(), _MAX_FACTS, _FACTS_AT).split(b"\0")[0].decode(errors="replace")
        )
    return ""


def why_anew(before: str, facts: str) -> str:
    """Why a file whose facts were `before` is begun anew for `facts`, for the log."""
    if not before:
        return "for the first time"
    try:
        old, new = json.loads(before), json.loads(facts)
        changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    except (ValueError, TypeError, AttributeError):
        return "because what is on it is of another server"
    if not changed:
        return "because its slots had another size, or the last server was reset"
    return f"because of other {', '.join(sorted(changed))}"


class DiskWatch:
    """A thread beside the open file at `path`. In a small file beside it, it keeps how much of the
    write budget is spent, so that a server that is killed again and again writes no more than one
    that lives; and it looks whether the file is still in its place. Only `start`, `spent_before`
    and `look` touch the disk.

    `clock`: seconds of the wall clock, the only one that goes on while nothing runs. Where it was
    put back meanwhile, no time has passed.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path, self._spent_path = path, path.with_suffix(".spent")
        self._clock = clock
        self._is_over = False
        self._awake = threading.Event()  # there is something to do
        self._said: deque[int] = deque()  # bytes spent, not yet on the disk
        self._file: os.stat_result | None = None  # the one that we opened, until it is gone
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="continuum-disk-watch", daemon=True)

    def start(self) -> None:
        """BLOCKS as long as the disk does. Without a thread for it there is no watch."""
        with suppress(OSError):  # a disk that fails says so when it is used
            self._file = os.stat(self._path)
        with suppress(RuntimeError):  # the system has none to give
            self._thread.start()

    def spent_before(self) -> DiskSpent | None:
        """What an earlier server left; None if there was none, or it left nothing that we know.
        BLOCKS as long as the disk does."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            descriptor = os.open(self._spent_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = json.loads(file.read(_PAGE))
            num_bytes, at = float(found["spent_bytes"]), float(found["at"])
            if isfinite(num_bytes) and isfinite(at) and num_bytes >= 0:
                return DiskSpent(int(num_bytes), max(0.0, self._clock() - at))
        return None

    def spent(self, num_bytes: int) -> None:
        """So much is spent: it will be on the disk soon."""
        self._said.append(num_bytes)
        self._awake.set()

    def end(self) -> None:
        """Have the thread end, which nobody waits for."""
        self._is_over = True
        self._awake.set()

    def look(self) -> None:
        """Do what there is to do. BLOCKS as long as the disk does."""
        while self._said:
            self._keep(self._said.popleft())
        if self._file is not None and self._is_gone(self._file):
            self._file = None
            logger.warning(
                "%s is no longer the file that this server uses: it was removed, or its drive "
                "unmounted. The server goes on with it, and its room stays taken, until it ends; "
                "a restart finds none of it. Restart the server to begin a new file",
                self._path,
            )

    def _is_gone(self, file: os.stat_result) -> bool:
        try:
            return not os.path.samestat(os.stat(self._path), file)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # a disk that fails says so when it is used
            return False

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._awake.wait(LOOK_S)
            self._awake.clear()
            is_over = self._is_over  # before the look, so that it is the last
            try:
                self.look()
            except Exception:  # the top of a thread
                logger.exception("the watch over %s has ended", self._path)
                return

    def _keep(self, num_bytes: int) -> None:
        try:
            self._write(num_bytes)
        except OSError as error:
            if not self._has_failed:
                logger.warning(
                    "%s cannot be written (%s), so a restart will not know how much of "
                    "disk_write_budget is spent, and may write a day's once more",
                    self._spent_path,
                    error.strerror,
                )
            self._has_failed = True

    def _write(self, num_bytes: int) -> None:
        """In place, so that it needs no room on a disk that is full."""
        text = json.dumps({"spent_bytes": num_bytes, "at": self._clock()}).encode()
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._spent_path, flags, 0o600)
        try:
            os.pwrite(descriptor, text.ljust(_PAGE - 1) + b"\n", 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
