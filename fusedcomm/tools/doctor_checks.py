"""Functional checks: each in processes of its own, with a deadline. A hang or a crash is a finding."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.launch.ranks import RankError, RankPool
from fusedcomm.launch.world import rank_device
from fusedcomm.memory.group import process_group
from fusedcomm.tools.doctor_findings import ERROR, OK, Finding
from fusedcomm.tools.selftest_checks import small

START_S = 60.0  # until the ranks have come together
COPIED_BYTES = 1 << 20


class CheckRanks:
    """Rank processes, which a check may hang or end: the next check then gets new ones."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size, self.backend = world_size, backend
        self.pool: RankPool | None = None

    def run(self, limit_s: float, fn: Callable[..., Any], *args: Any) -> Any:
        """Rank 0's result of ``fn(rank, *args)``. Raises RankError."""
        if self.pool is None or self.pool.dead:
            self.pool = RankPool(self.world_size, backend=self.backend, timeout_s=START_S)
        self.pool.start(fn, *args)
        return self.pool.join(limit_s)[0]

    def check(self, name: str, advice: str, limit_s: float, fn: Callable[..., str], *args: Any) -> Finding:
        """``fn`` returns its evidence, or raises."""
        try:
            return Finding("checks", name, OK, self.run(limit_s, fn, *args))
        except Exception as error:  # the doctor survives any failure of a check
            return Finding("checks", name, ERROR, brief(error), advice)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def brief(error: Exception) -> str:
    """An error in one line, without the tracebacks of ranks."""
    if isinstance(error, RankError):
        first = error.failures[0]
        return f"rank {first.rank} {first.kind}: {first.message.splitlines()[0]}"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def uuids(rank: int) -> list[str]:
    """The GPUs that torch sees, once CUDA has started."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def peer_copies(rank: int) -> str:
    """Copy random bytes from every GPU to every other and back, and compare it on the host."""
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    for a, b in pairs:
        sent = torch.randint(256, (COPIED_BYTES,), dtype=torch.uint8, device="cpu")
        there = sent.to(f"cuda:{a}").to(f"cuda:{b}")
        _must(torch.equal(there.cpu(), sent), f"GPU {a} -> {b}: wrong bytes arrived")
        _must(torch.equal(there.to(f"cuda:{a}").cpu(), sent), f"GPU {b} -> {a}: wrong bytes arrived")
    no_access = ", ".join(f"{a} -> {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b))
    text = f"{len(pairs)} pairs, {COPIED_BYTES >> 20} MiB each way, every byte right"
    return f"{text}; through the host: {no_access}" if no_access else text


def op_values(rank: int, device_type: str, algorithm: str) -> str:
    """Compare matmul_all_to_all, forward and backward, with the same computed in one process."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        data = small("matmul_all_to_all", rank_device(device_type))
        wrong = data.wrong(process_group(None))
    _must(wrong is None, f"rank {rank}: {wrong}")
    return f"matmul_all_to_all of {dist.get_world_size()} ranks, result and gradients exact"


def _must(condition: bool, text: str) -> None:
    """Like ``assert``, under PYTHONOPTIMIZE too."""
    if not condition:
        raise RuntimeError(text)
