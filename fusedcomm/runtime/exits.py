"""A rank that ends tells its peers why, so that those that wait for it, or come to wait, need no time-out to know.

It does so when its interpreter ends, by the program's last line, an exception or sys.exit: after its threads, and after
those exit handlers that were registered later than this module's. What it has sent stays good. A rank that is killed,
or ends by os._exit, tells nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import sys
import threading

from fusedcomm.runtime import dumps, group, members
from fusedcomm.runtime.members import Member

STORE_S = 2.0  # how long an end may wait for the store, whose host may be cut off
MAX_ERROR_CHARS = 160

_armed_in = _left_in = 0  # process ids, as a forked child has both functions still to do


def arm() -> None:
    """Tell the peers when this process ends, also if it is a child of multiprocessing that runs no exit handlers."""
    global _armed_in
    if _armed_in != os.getpid():
        _armed_in = os.getpid()
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, _leave_child, exitpriority=0)


def _leave_child() -> None:
    if not any(not each.daemon for each in threading.enumerate() if each is not threading.current_thread()):
        _leave()  # otherwise its threads may go on with calls


@atexit.register
def _leave() -> None:
    global _left_in
    if group.is_forked() or _left_in == os.getpid():
        return
    _left_in = os.getpid()
    error = _error()
    why = "its program has ended" if error is None else " ".join(f"{type(error).__name__}: {error}".split())
    left = [(each, f"{why[:MAX_ERROR_CHARS]}, after call {each.num_calls}") for each in members.all_members()]
    for each, last_words in left:
        with contextlib.suppress(Exception):  # a GPU may have failed, and its peers must hear of the others
            if each.workspace is not None:
                each.workspace.leave(last_words)
    dumps.write_at_exit(error)
    _announce(left)


def _error() -> BaseException | None:
    """The exception that ends this process, if one does. In a child of multiprocessing it is still being raised."""
    last = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)  # a prompt goes on after exceptions
    error = sys.exc_info()[1] or last
    while isinstance(error, SystemExit) and error.__context__ is not None:
        error = error.__context__
    return error


def _announce(left: list[tuple[Member, str]]) -> None:
    """Tell those that will vote, by the store. It may block, as while its host is cut off."""

    def run() -> None:
        for each, last_words in left:
            with contextlib.suppress(Exception):
                if each.departures is not None:
                    each.departures.announce(last_words)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started in exit handlers since Python 3.12
        run()
    else:
        thread.join(STORE_S)
