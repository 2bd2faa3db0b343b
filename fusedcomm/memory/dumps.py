"""The last calls of this rank as a JSON file in FUSEDCOMM_DUMP_DIR: when a call fails, on SIGUSR1, and at the end.

`fusedcomm postmortem` reads the files of all ranks. A rank that is stuck writes too, wherever its main thread waits, as
long as it lets other threads run.
"""

import contextlib
import hashlib
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fusedcomm import env, files
from fusedcomm.memory import flight_recorder, group
from fusedcomm.memory.errors import text_of
from fusedcomm.memory.redact import redact

log = logging.getLogger("fusedcomm")

SCHEMA = 2
SIGUSR1 = "SIGUSR1"  # the reason that a dump gives
ENDED = "the program has ended"  # another, which an exception may follow
LISTENER = "fusedcomm-dumps"
_writing = threading.Lock()
_armed = False
_place: tuple[int, int] | None = None  # rank and world size, as they were while there was a group
_last_why: str | None = None  # why this process has written the dump in place, if it has


def arm() -> None:
    """Let SIGUSR1 write a dump from here on, if FUSEDCOMM_DUMP_DIR is set. Once per process, in its main thread."""
    global _armed
    _note_place()
    if not _armed and threading.current_thread() is threading.main_thread():
        _armed = True
        if env.dump_dir() is not None:
            try:
                _listen()
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left: this rank's call goes on
                log.warning("SIGUSR1 will write no dump: %s", error)


def _note_place() -> tuple[int, int] | None:
    global _place
    if dist.is_initialized():
        _place = dist.get_rank(), dist.get_world_size()
    return _place


class on_failure:  # a function to its users, in a with statement
    """A context: an exception out of it writes a dump."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            write(text_of(error))


def write(why: str) -> Path | None:
    """Replace this rank's dump at once. Returns None, and never raises, if there is no directory or writing fails."""
    global _last_why
    folder = env.dump_dir()
    place = _note_place()
    if folder is None or place is None or group.is_forked():
        return None
    try:
        with _writing:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = files.replace(folder / f"rank{place[0]}.json", json.dumps(describe(why, *place), indent=1))
            _last_why = why
            return written
    except Exception as error:  # the caller must hear of the first failure, not of this one
        log.warning("no dump in FUSEDCOMM_DUMP_DIR: %s", error)
        return None


def write_at_exit(error: BaseException | None) -> None:
    """Write why this process ends, but over no dump of a call that failed by that, or before a good end."""
    if error is None and _last_why in (None, SIGUSR1):
        write(ENDED)
    elif error is not None and _last_why != (why := text_of(error)):
        write(f"{ENDED} by {why}")


def describe(why: str, rank: int, world_size: int) -> dict[str, Any]:
    """The content of a dump, without names of hosts or users, addresses, or values of unknown variables."""
    now, clock = time.monotonic(), time.time()
    return redact(
        {
            "schema": SCHEMA,
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "why": why,
            "time": clock,
            "host": hashlib.sha256(env.host_id().encode()).hexdigest()[:8],
            "started": _started(clock),
            "versions": {name: env.version(name) for name in env.PACKAGES} | {"python": platform.python_version()},
            "environment": env.environment(),
            "calls": [_call(record, clock - now, now) for record in flight_recorder.last()],
            "stacks": _stacks(),
        }
    )


def _started(clock: float) -> float:
    """The time when this process was started; 0 where nothing tells."""
    try:
        ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # since the boot
    except OSError:
        return 0.0
    return clock - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")


def _call(record: flight_recorder.Record, offset: float, now: float) -> dict[str, Any]:
    """``offset``: from a record's times to the clock's."""
    ranks = list(record.ranks or _ranks_of(record.group_name))
    same = ("op", "resets", "number", "arguments", "algorithm", "state", "error", "rounds")
    found = {name: getattr(record, name) for name in same} | {
        "group": record.group_name,
        "ranks": ranks,
        "device": record.device.type,
        "dtype": record.dtype_name,
        "peers": [ranks[peer] for peer in record.peers if peer < len(ranks)],
        "started": record.started + offset,
        "seconds": (record.ended or now) - record.started,
        "waiting_for": None,
        "waiting_s": None,
    }
    workspace = record.workspace
    if workspace is not None and (waiting := workspace.waiting) is not None:
        peer, since = waiting
        found |= {"waiting_for": ranks[peer], "waiting_s": now - since}
    return found


def _ranks_of(group_name: str) -> list[int]:
    try:
        return dist.get_process_group_ranks(group.find(group_name))
    except ValueError:  # the group was destroyed
        return []


def _stacks() -> dict[str, list[str]]:
    """The stacks of all threads but the listener's, each with the innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, str(ident)): [
            f"{each.filename}:{each.lineno} in {each.name}" for each in traceback.extract_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
        if names.get(ident) != LISTENER
    }


def _listen() -> None:
    """Start a thread that Python's handler in C wakes at once, even while the main thread is in C++ and runs no Python.

    Any Python handler will do, so an existing one stays, and is called.
    """
    if not callable(signal.getsignal(signal.SIGUSR1)):
        signal.signal(signal.SIGUSR1, lambda *args: None)
        signal.siginterrupt(signal.SIGUSR1, False)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    other = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def listen() -> None:
        while True:
            numbers = os.read(woken, 256)
            if other != -1:
                with contextlib.suppress(OSError):
                    os.write(other, numbers)
            if signal.SIGUSR1 in numbers:
                write(SIGUSR1)

    threading.Thread(target=listen, name=LISTENER, daemon=True).start()
