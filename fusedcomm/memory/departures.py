"""The ranks of a group that have left: by a last word on the store, or because their processes are gone from this host.

A rank that ends says so on the store (`exits`), and so does one that destroys its group because of an exception
(`members`). It cannot if it is killed, or ends by os._exit.
"""

import contextlib
import os
import sys
import uuid
from collections.abc import Iterable
from concurrent import futures
from typing import Any

from torch.distributed import Store

from fusedcomm.memory.errors import text_of
from fusedcomm.memory.patience import on_thread
from fusedcomm.memory.segment import LAST_WORDS_BYTES

KILLED = "its process is gone without a word: it was killed, or ended by os._exit"
UNSEEN = ""  # the start of every process while /proc cannot be read
STORE_S = 2.0  # how long a rank that leaves may wait for the store: its host may be cut off


def own_life() -> dict[str, Any]:
    """This rank's part in a group, as JSON, until its process ends. A restarted rank has another."""
    return {"life": uuid.uuid4().hex, "process": _started(os.getpid())}


class Departures:
    """``lives``: each rank's ``own_life`` with its ``host``, by rank."""

    def __init__(self, store: Store, rank: int, lives: list[dict[str, Any]]) -> None:
        self._store = store
        self._rank = rank
        self._ids = [life["life"] for life in lives]
        here = {peer: life["process"] for peer, life in enumerate(lives) if life["host"] == lives[rank]["host"]}
        # A process that cannot be seen now, as in another namespace, would seem to be gone for ever.
        self._processes = {peer: found for peer, found in here.items() if found and _started(_pid(found)) == found}

    def announce(self, last_words: str) -> None:
        self._store.set(self._ids[self._rank], last_words)

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank on this host is gone. All its writes are visible then."""
        process = self._processes.get(rank)
        return process is not None and _started(_pid(process)) not in (process, UNSEEN)

    def last_words(self, ranks: Iterable[int]) -> dict[int, str]:
        """{rank: reason} of the departed among ``ranks``. It asks the store, which may fail."""
        found = {}
        for rank in ranks:
            if self._store.check([self._ids[rank]]):
                found[rank] = self._store.get(self._ids[rank])[:LAST_WORDS_BYTES].decode(errors="replace")
            elif self.is_gone(rank):
                found[rank] = KILLED
        return found


def leaving_by() -> BaseException | None:
    """The exception that makes this rank leave, if one does. In a `finally` it is still being raised."""
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a prompt goes on after exceptions
    error = sys.exc_info()[1] or last
    while isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    return error


def farewell(error: BaseException | None, otherwise: str, num_calls: int) -> str:
    """The last words of a rank that leaves by ``error``, or for the reason ``otherwise``."""
    why = otherwise if error is None else " ".join(text_of(error).split())
    end = f", after call {num_calls}"
    return why.encode(errors="replace")[: LAST_WORDS_BYTES - len(end)].decode(errors="ignore") + end


def announce(left: list[tuple[Departures | None, str]]) -> None:
    """Tell the voters, by the store. It may block, as while the store's host is cut off."""

    def run() -> None:
        for departures, last_words in left:
            with contextlib.suppress(Exception):
                if departures is not None:
                    departures.announce(last_words)

    futures.wait([on_thread(run, "fusedcomm-departures")], STORE_S)


def _pid(process: str) -> int:
    pid = process.partition(" ")[0]
    return int(pid) if pid.isdecimal() else 0  # no process


def _started(pid: int) -> str | None:
    """The id of a process and when it was started, because ids are used again; None if it has ended, or UNSEEN."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:  # this rank has no descriptor left, say
        return UNSEEN
    return None if state in (b"Z", b"X") else f"{pid} {int(fields[18])}"
