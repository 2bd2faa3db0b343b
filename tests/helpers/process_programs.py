"""Ranks that end in many ways, for test_exits.py: ``-m tests.helpers.process_programs NAME RANK PORT``."""

import atexit
import builtins
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from tests.helpers.waiting import wait_until

NUM_RANKS = 2
PEER_S = 2.0
LATE_S = 5.0
CHILD_S = 30.0
kept: list[Any] = []  # until the interpreter has ended


def start(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, store=store, timeout=timedelta(seconds=60))


def use(calls: int = 3) -> None:
    import fusedcomm

    with fusedcomm.force_algorithm("chunked", strict=True):
        for i in range(calls):
            x = torch.full((4, 3), float(dist.get_rank() + i), requires_grad=True)
            w = torch.ones(3, 6, requires_grad=True)
            y = fusedcomm.matmul_all_to_all(x, w, 0, 1)
            assert y.tolist() == [[3.0 * i] * 3] * 4 + [[3.0 * (1 + i)] * 3] * 4
            y.sum().backward()
            assert x.grad is not None and x.grad.tolist() == [[6.0] * 3] * 4


def keep_symmetric_memory() -> None:
    """A tensor, its handle and a peer's memory, in a cycle."""
    t = symm_mem.empty(8, device=torch.device("cpu"))
    handle = symm_mem.rendezvous(t, dist.group.WORLD)
    kept.append([t, handle, handle.get_buffer(1 - dist.get_rank(), (8,), t.dtype), kept])


def in_child(end: Callable[[], object]) -> int:
    """The exit code of a forked child that does this and ends as interpreters do; -9 if it hung."""
    child = os.fork()
    if child == 0:
        end()
        sys.exit()
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# How ranks end
def left_open(rank: int, port: int) -> None:
    """The process ends with all open. fusedcomm was imported after init_process_group."""
    assert "fusedcomm" not in sys.modules
    start(rank, port)
    use()
    keep_symmetric_memory()


def modules_gone(rank: int, port: int) -> None:
    """Modules are loaded again, and taken away before what they have made."""
    start(rank, port)
    use()
    keep_symmetric_memory()
    importlib.reload(sys.modules["fusedcomm"])
    use()

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fusedcomm"]:
            del sys.modules[name]
        gc.collect()

    atexit.register(forget)


class WaitsAtTheEnd:
    """An object whose last reference is a builtin's, which goes when the interpreter ends."""

    def __init__(self) -> None:
        from fusedcomm.kernels.cpu import native

        self.words, self.native_wait, self.write = torch.zeros(2, dtype=torch.int64), native.wait, os.write

    def __del__(self) -> None:
        flag = self.words.data_ptr()
        self.native_wait(flag, 1, flag + 8, 1, 0.1)  # longer than a wait keeps the GIL
        self.write(1, b"waited\n")


def waits_at_the_end(rank: int, port: int) -> None:
    """The main thread waits, in a destructor."""
    builtins.kept_to_the_end = WaitsAtTheEnd()  # type: ignore[attr-defined]


def leaves(rank: int, port: int, how: Callable[[], object], why: str, late_s: float = 0.0) -> None:
    """Rank 0 leaves, as ``how`` says. Rank 1 calls ``late_s`` later, and hears ``why`` long before its time-out."""
    import fusedcomm

    start(rank, port)
    use()
    if rank == 0:
        how()
        return
    time.sleep(late_s)
    begun = time.monotonic()
    try:
        use(1 << 30)
    except fusedcomm.PeerTimeoutError as error:
        assert error.peers == [0]
        assert f"rank 0 has left: {why}" in str(error)
        assert time.monotonic() - begun < LATE_S
    else:
        raise AssertionError("nobody left")


def raises(rank: int, port: int) -> None:
    def fail() -> None:
        raise LookupError("on purpose")

    leaves(rank, port, fail, "LookupError: on purpose, after call 6")


def thread_waits(rank: int, port: int) -> None:
    """A daemon thread of rank 0 waits for a peer that comes when the interpreter has ended, which takes a while."""

    def leave_a_thread() -> None:
        from fusedcomm.memory import flight_recorder

        threading.Thread(target=use, args=(1,), daemon=True).start()
        wait_until(lambda: flight_recorder.last()[-1].state == flight_recorder.RUNNING)
        builtins.kept_to_the_end = WaitsAtTheEnd()  # type: ignore[attr-defined]

    leaves(rank, port, leave_a_thread, "its program has ended, after call 7", late_s=PEER_S)


# Other processes
class Numbers(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), index)


def let_go() -> None:
    kept.clear()
    gc.collect()


def all_refused() -> None:
    import fusedcomm

    for call in (use, fusedcomm.reset, fusedcomm.close):
        refused(call)


def forks(rank: int, port: int) -> None:
    """Children that end in any way disturb nobody, but can take no part in the group."""
    import fusedcomm

    assert in_child(lambda: None) == 0
    start(rank, port)
    use()
    keep_symmetric_memory()
    assert in_child(let_go) == 0
    assert in_child(lambda: os._exit(5)) == 5
    assert in_child(all_refused) == 0
    use()
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        use(1)
        assert batch.shape == (1, 2)
    fusedcomm.close()
    dist.barrier()
    dist.destroy_process_group()


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        assert "was forked from rank" in str(error)
    else:
        raise AssertionError("a child took part")


PROGRAMS = {each.__name__: each for each in (left_open, modules_gone, waits_at_the_end, raises, thread_waits, forks)}


def main() -> None:
    torch.set_num_threads(1)
    PROGRAMS[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]))
    print("done", flush=True)


if __name__ == "__main__":
    main()
