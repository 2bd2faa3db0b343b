"""Rank processes that live from call to call, end within a time-out and never outlive their parent.

    with RankPool(2) as pool:
        results = pool.run(fn, 3)       # fn(rank, 3) in every rank; fn is a module-level function

Every rank has an initialised WORLD group. Its store lives in the parent and outlives killed ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

# Ranks that wait for one that has failed get this long to fail by themselves.
GRACE_S = 10.0
CLOSE_S = 5.0
TRACE_S = 2.0
PR_SET_PDEATHSIG = 1
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


class _Killed:
    def __repr__(self) -> str:
        return "KILLED"

    def __bool__(self) -> bool:
        return False


KILLED = _Killed()  # the result of a rank that was ended by RankPool.kill


@dataclass(frozen=True)
class RankFailure:
    """Why a rank gave no result. ``exception_type`` is a name: the parent may not know the type."""

    rank: int
    kind: str  # "raised", "died", "did not answer"
    exception_type: str | None
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind}: {self.message}\n{self.traceback}".rstrip()


class RankError(RuntimeError):
    """Ranks failed: ``rank`` and ``exception_type`` are the first one's, ``failures`` has all."""

    def __init__(self, failures: Iterable[RankFailure]) -> None:
        # A rank's own failure comes before its consequences on others.
        order = {"died": 0, "raised": 1, "did not answer": 2}
        self.failures = sorted(failures, key=lambda f: (order[f.kind], f.rank))
        self.rank = self.failures[0].rank
        self.exception_type = self.failures[0].exception_type
        super().__init__("\n\n".join(map(str, self.failures)))


@dataclass(frozen=True)
class _Setup:
    rank: int
    world_size: int
    store_port: int
    backend: str
    threads: int
    timeout_s: float
    parent: int


@dataclass
class _Rank:
    process: BaseProcess
    tasks: Connection
    traces: Connection
    killed: bool = False


class RankPool:
    """``world_size`` processes, each with ``threads`` torch threads and a WORLD group.

    ``env`` is set before torch is imported in a rank. With an NCCL ``backend`` rank r owns GPU r.
    Once a rank died or did not answer, the pool is dead: no process is left, further calls raise.
    """

    def __init__(
        self,
        world_size: int,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120,
        threads: int = 1,
        backend: str = "gloo",
    ) -> None:
        from torch.distributed import TCPStore

        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.dead = False
        self._running = False
        self._ranks: list[_Rank] = []
        self._ending = threading.RLock()
        timeout = timedelta(seconds=timeout_s)
        # Without this socket torch would listen on all addresses, for whoever comes.
        server = socket.create_server(("127.0.0.1", 0))
        port, listen_fd = server.getsockname()[1], server.detach()
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
        )
        _pools.add(self)
        try:
            for rank in range(world_size):
                setup = _Setup(rank, world_size, self._store.port, backend, threads, timeout_s, os.getpid())
                _starter.submit(self._add, setup, env or {}).result()
            self._running = True
            self.join()
        except BaseException:
            self._kill_all()
            raise

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(rank, *args, **kwargs)`` in every rank, and return the results in rank order."""
        self.start(fn, *args, **kwargs)
        return self.join()

    def start(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Like ``run``, but returns at once; ``join`` gives the results."""
        if self.dead:
            raise RuntimeError("this RankPool is dead: make a new one")
        if self._running:
            raise RuntimeError("join() the running call before the next start()")
        task = pickle.dumps((fn, args, kwargs))
        self._running = True
        for rank in self._ranks:
            # A rank that has just died is reported by join, with its exit code.
            with contextlib.suppress(OSError):
                if not rank.killed:
                    rank.tasks.send_bytes(task)

    def join(self, timeout_s: float | None = None) -> list[Any]:
        """Return the started call's results in rank order, with KILLED for ranks that ``kill`` ended."""
        if not self._running:
            raise RuntimeError("nothing was started")
        try:
            results, failures = self._collect(self.timeout_s if timeout_s is None else timeout_s)
        except BaseException:
            self._kill_all()
            raise
        self._running = False
        if any(f.kind != "raised" for f in failures):
            self._kill_all()
        if failures:
            raise RankError(failures)
        return [results.get(rank, KILLED) for rank in range(self.world_size)]

    def kill(self, rank: int) -> None:
        """SIGKILL one rank. Calls go on with the others."""
        self._ranks[rank].killed = True
        self._ranks[rank].process.kill()
        self._ranks[rank].process.join()

    def pid(self, rank: int) -> int:
        pid = self._ranks[rank].process.pid
        assert pid is not None
        return pid

    def close(self) -> None:
        """End all ranks: politely when idle, else by SIGKILL."""
        if not self.dead and not self._running:
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.tasks.send_bytes(b"")
            deadline = time.monotonic() + CLOSE_S
            for rank in self._ranks:
                rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill_all()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _collect(self, timeout_s: float) -> tuple[dict[int, Any], list[RankFailure]]:
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        pending = {r for r, rank in enumerate(self._ranks) if not rank.killed}
        while pending:
            channels: list[Any] = [self._ranks[r].tasks for r in pending]
            channels += [self._ranks[r].process.sentinel for r in pending]
            if not wait(channels, max(0.0, deadline - time.monotonic())):
                failures += self._silent(pending, timeout_s)
                break
            for r in sorted(pending):
                if not (self._ranks[r].tasks.poll() or not self._ranks[r].process.is_alive()):
                    continue
                pending.remove(r)
                answer = self._answer(r)
                if isinstance(answer, RankFailure):
                    failures.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                elif isinstance(answer, tuple):
                    results[r] = answer[0]
        return results, failures

    def _answer(self, r: int) -> RankFailure | _Killed | tuple[Any]:
        rank = self._ranks[r]
        try:
            answer = pickle.loads(rank.tasks.recv_bytes()) if rank.tasks.poll() else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            if rank.killed:
                return KILLED
            rank.process.join(CLOSE_S)
            code = rank.process.exitcode
            cause = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
            return RankFailure(r, "died", None, cause, _read_trace(rank.traces))
        return answer

    def _silent(self, pending: Iterable[int], timeout_s: float) -> Iterator[RankFailure]:
        for r in pending:
            os.kill(self.pid(r), signal.SIGUSR1)
        message = f"no result within {timeout_s:g} s, or {GRACE_S:g} s after another rank failed"
        for r in pending:
            trace = _read_trace(self._ranks[r].traces)
            yield RankFailure(r, "did not answer", None, message, trace)

    def _add(self, setup: _Setup, env: Mapping[str, str]) -> None:
        """Start a rank. An interrupt ends the caller's wait and the pool, but not this, in the starter's thread."""
        if self.dead:
            return
        rank = _spawn(setup, env)
        with self._ending:
            self._ranks.append(rank)
            if self.dead:
                self._kill_all()

    def _kill_all(self) -> None:
        self.dead = True
        self._running = False
        with self._ending:
            for rank in self._ranks:
                rank.process.kill()
            for rank in self._ranks:
                rank.process.join()
                rank.tasks.close()
                rank.traces.close()
        _pools.discard(self)


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Call ``fn(rank, *args)`` in ``world_size`` fresh ranks; ``options`` are RankPool's."""
    with RankPool(world_size, **options) as pool:
        return pool.run(fn, *args)


_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()
# The thread that starts all ranks lives as long as this process: PR_SET_PDEATHSIG fires when the thread that made a
# process ends, and the caller's thread may end earlier.
_starter = ThreadPoolExecutor(1, "start_ranks")


@atexit.register
def _reap() -> None:
    for pool in list(_pools):
        pool._kill_all()


def _forget_parents() -> None:
    """In a forked child: the parent's ranks and its thread are not its own."""
    global _starter
    _pools.clear()
    _starter = ThreadPoolExecutor(1, "start_ranks")


os.register_at_fork(after_in_child=_forget_parents)


def _spawn(setup: _Setup, env: Mapping[str, str]) -> _Rank:
    context = multiprocessing.get_context("spawn")
    tasks, child_tasks = context.Pipe()
    traces, child_traces = context.Pipe(duplex=False)
    rank_env = {
        "RANK": str(setup.rank),
        "LOCAL_RANK": str(setup.rank),
        "WORLD_SIZE": str(setup.world_size),
        "LOCAL_WORLD_SIZE": str(setup.world_size),
        "OMP_NUM_THREADS": str(setup.threads),
    }
    if sys.platform in LOOPBACK and "GLOO_SOCKET_IFNAME" not in os.environ:
        rank_env["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    # The child inherits these. It could set them too late: its first act is to import the parent's main module.
    with mock.patch.dict(os.environ, rank_env | dict(env)):
        process = _start(setup, child_tasks, child_traces)
    child_tasks.close()
    child_traces.close()
    return _Rank(process, tasks, traces)


def _start(setup: _Setup, tasks: Connection, traces: Connection) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=_rank_main, args=(setup, tasks, traces), daemon=True)
    process.start()
    return process


def _read_trace(traces: Connection) -> str:
    """faulthandler's text: until the rank ends or is silent for a moment."""
    os.set_blocking(traces.fileno(), False)
    text = b""
    deadline = time.monotonic() + TRACE_S
    while time.monotonic() < deadline:
        if not wait([traces], 0.3 if text else TRACE_S):
            break
        data = os.read(traces.fileno(), 1 << 16)
        if not data:
            break
        text += data
    return text.decode(errors="replace")


def _rank_main(setup: _Setup, tasks: Connection, traces: Connection) -> None:
    end_with_parent(setup.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the ranks
    faulthandler.enable(traces.fileno(), all_threads=True)
    signal.signal(signal.SIGUSR1, lambda *args: None)  # fusedcomm.memory.dumps listens to Python's handlers
    faulthandler.register(signal.SIGUSR1, traces.fileno(), all_threads=True, chain=True)
    tasks.send_bytes(_outcome(setup.rank, partial(_init, setup)))
    with contextlib.suppress(EOFError, OSError):
        while task := tasks.recv_bytes():
            tasks.send_bytes(_outcome(setup.rank, partial(_call, setup.rank, task)))
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def end_with_parent(parent: int) -> None:
    """End this process when the thread that started it ends, or at once if process ``parent`` has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def _init(setup: _Setup) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(setup.threads)
    if "nccl" in setup.backend:
        torch.cuda.set_device(setup.rank)
    timeout = timedelta(seconds=setup.timeout_s)
    store = dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=timeout)
    # The group's time-out is longer than the pool's own, which reports more.
    dist.init_process_group(
        setup.backend, rank=setup.rank, world_size=setup.world_size, store=store, timeout=2 * timeout
    )


def _call(rank: int, task: bytes) -> Any:
    fn, args, kwargs = pickle.loads(task)
    return fn(rank, *args, **kwargs)


def _outcome(rank: int, call: Callable[[], Any]) -> bytes:
    """The pickled ``(result,)`` or RankFailure. Pickle copies tensors; shared ones would die with this process."""
    try:
        return pickle.dumps((call(),))
    except BaseException as error:
        name = type(error).__qualname__
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(RankFailure(rank, "raised", name, f"{name}: {error}", text))
