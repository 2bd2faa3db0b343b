"""Ranks of tests are forked from a process that has loaded torch, in milliseconds and not in seconds.

A forked rank is as a spawned one: it has the environment that the pool gives it, runs exit handlers at its end, and
ends with the test session. The process that forks it has made no group and has one thread. What is read when a program
starts or loads torch cannot be changed any more, so a rank whose environment differs there is spawned.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from fusedcomm.launch import ranks

# What ranks load sooner or later.
LOADED = (
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",
    "fusedcomm.parallel",
    "fusedcomm.compile",
    "tests.helpers.gloo_gathers",
    "pytest",
)
# What is read when it is needed, so that a rank may have its own.
READ_LATE = ("FUSEDCOMM_", "RANK", "LOCAL_", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "PYTEST_", "TORCHINDUCTOR_CACHE_DIR")
NUM_SERVERS = 2  # neighbours have hash seeds and addresses that differ, as ranks of users have

spawn = ranks._start


class ForkedRank:
    """A process of the server, with what a pool asks of a multiprocessing.Process."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid
        self.exitcode: int | None = None
        self.sentinel = os.pidfd_open(pid)
        weakref.finalize(self, os.close, self.sentinel)

    def is_alive(self) -> bool:
        return not wait([self.sentinel], 0)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        if wait([self.sentinel], timeout) and self.exitcode is None:
            self.exitcode = self.server.exit_code(self.pid)


class ForkServer:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests, theirs = multiprocessing.Pipe()
        self.environ = late_left_out(os.environ)
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def fork(self, setup: ranks._Setup, tasks: Connection, traces: Connection) -> ForkedRank:
        assert self.process.pid is not None
        setup = replace(setup, parent=self.process.pid)
        with self._lock:
            self._requests.send_bytes(pickle.dumps((setup, dict(os.environ))))
            for each in (tasks, traces):
                reduction.send_handle(self._requests, each.fileno(), self.process.pid)
            return ForkedRank(self, self._requests.recv())

    def exit_code(self, pid: int) -> int:
        """How this process, which has ended, has done so."""
        with self._lock:
            self._requests.send_bytes(pickle.dumps(pid))
            return self._requests.recv()


def late_left_out(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if not name.startswith(READ_LATE)}


_servers: list[ForkServer] = []


def start(setup: ranks._Setup, tasks: Connection, traces: Connection) -> BaseProcess | ForkedRank:
    """In place of ``ranks._start``, and in the same thread, which lives as long as the servers must."""
    if not _servers and os.environ["OMP_NUM_THREADS"] == "1":
        _servers.extend(ForkServer() for _ in range(NUM_SERVERS))
    server = _servers[setup.rank % NUM_SERVERS] if _servers else None
    if server is None or late_left_out(os.environ) != server.environ:
        return spawn(setup, tasks, traces)
    return server.fork(setup, tasks, traces)


# In the server
def _serve(requests: Connection, parent: int) -> None:
    ranks.end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()  # a rank that ends would copy every page of what is loaded, to look for cycles: a second
    while True:
        asked = pickle.loads(requests.recv_bytes())
        if isinstance(asked, int):
            requests.send(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]))
            continue
        tasks, traces = (Connection(reduction.recv_handle(requests)) for _ in range(2))
        if (pid := fork_alone()) == 0:
            requests.close()
            setup, environ = asked
            _become_rank(setup, environ, tasks, traces)
            return  # as a process of multiprocessing ends
        requests.send(pid)
        tasks.close()
        traces.close()


def fork_alone() -> int:
    """``os.fork``, and an error if another thread is there, whose locks the child would find locked for ever."""
    threads = os.listdir("/proc/self/task")
    if len(threads) != 1:
        raise RuntimeError(f"who forks must have one thread, got {len(threads)}: {threading.enumerate()}")
    return os.fork()


def _become_rank(setup: ranks._Setup, environ: Mapping[str, str], tasks: Connection, traces: Connection) -> None:
    os.environ.clear()
    os.environ.update(environ)
    ranks._rank_main(setup, tasks, traces)
