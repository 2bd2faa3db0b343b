"""A rank that ends tells its peers why, so that a rank that waits for it, now or later, needs no time-out to know.

It does so when its interpreter ends, by the program's last line, an exception or sys.exit: after its threads, and after
exit handlers registered later than this module's. If the group is destroyed before that, `members` does it. Its sent
data stay good: what it has launched on GPUs still runs, unless an exception ends it. A rank that is killed, or ends by
os._exit, tells nothing.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.util
import os
import threading

import torch

from fusedcomm.memory import departures, dumps, group, group_member, members

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
    error = departures.leaving_by()
    left = [(m, departures.farewell(error, "its program has ended", m.num_calls)) for m in members.all_members()]
    for member, last_words in left:
        with contextlib.suppress(Exception):  # a GPU may have failed, and its peers must hear of the others
            if member.workspace is not None:
                member.workspace.leave(last_words)
    dumps.write_at_exit(error)
    departures.announce([(member.departures, last_words) for member, last_words in left])
    if error is None or isinstance(error, SystemExit):  # CUDA drops what is launched when the process ends
        for device in group_member.gpus:
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(device)
