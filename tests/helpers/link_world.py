"""What two hosts with a rank each do on a throttled link: ``torchrun ... -m tests.helpers.link_world CHECK FOLDER``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.bench import tune
from fusedcomm.testing.selftest import settings
from tests.helpers.groups import check, member_of
from tests.helpers.hosts import sent_bytes
from tests.helpers.hosts_world import PROBLEMS, call, check_gradients, main
from tests.helpers.problems import Problem, integers
from tests.helpers.uneven import Uneven

RATE_BYTES = 8 << 20  # 32 bursts, so that these hardly count
MIB = 1 << 20
LARGE = {  # each with the bytes that a rank must send to the other one
    Problem("bytes", (512, 8), 512, 0, 1): MIB,  # half of [512, 1024]
    Problem("bytes", (512, 512), 8, 0, 1, op="all_to_all_matmul"): MIB,  # likewise
    Problem("bytes", (512, 512), 8, 0, op="all_gather_matmul"): MIB,  # all of [512, 512]
    Problem("bytes", (512, 8), 512, scatter_dim=0, op="matmul_reduce_scatter"): MIB,  # half of [1024, 512]
    Problem("bytes", (1024, 8), 512, op="matmul_all_reduce"): 2 * MIB,  # half, and then half of the sums
}
UNEVEN = [
    Uneven("matmul_all_to_all", (7, 5), gather_dim=0, scatter_dim=1, gather=(2, 5)),
    Uneven("all_to_all_matmul", (130, 9), gather_dim=0, scatter_dim=1, gather=(129, 1), scatter=(3, 6), bias=True),
    Uneven("all_gather_matmul", (301, 6), gather_dim=0, bias=True),
    Uneven("matmul_reduce_scatter", (301, 6), scatter_dim=0, scatter=(300, 1)),
]
UNEVEN_LARGE = Uneven("matmul_all_to_all", (900, 1000), gather_dim=0, scatter_dim=1, gather=(400, 500))


def seconds(run: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rate(rank: int) -> list[float]:
    """Bytes per second from each host to the other: the receiver's, and the best of three, as others use the CPUs."""
    buffer = torch.zeros(RATE_BYTES, dtype=torch.uint8)
    found = []
    for source in range(2):
        move = (lambda: dist.send(buffer, 1 - rank)) if rank == source else (lambda: dist.recv(buffer, 1 - rank))
        took = torch.tensor([min(seconds(move) for _ in range(3))])
        dist.broadcast(took, 1 - source)
        found.append(RATE_BYTES / took.item())
    return found


def check_uneven(problem: Uneven) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = problem.inputs(size)
    leaves = [[None if t is None else t.clone().requires_grad_() for t in each] for each in inputs]
    wants = problem.expected([tuple(each) for each in leaves])  # type: ignore[misc]
    weights = [torch.arange(want.numel(), dtype=want.dtype).view(want.shape) % 5 - 2 for want in wants]
    torch.autograd.backward(wants, weights)
    mine = [None if t is None else t.clone().requires_grad_() for t in inputs[rank]]
    out = problem.call(tuple(mine), None, size)  # type: ignore[arg-type]
    out.backward(weights[rank])
    torch.testing.assert_close(out, wants[rank], rtol=0, atol=0)
    for t, want in zip(mine, leaves[rank], strict=True):
        assert t is None or torch.equal(t.grad, want.grad), problem  # type: ignore[union-attr]


def values(rank: int) -> list[list[str]]:
    """All five ops forward and backward, even and uneven. Returns what was planned, not forced, for large ones."""
    for name in ("pipelined", None):
        with fusedcomm.force_algorithm(name, strict=True):
            for problem in PROBLEMS:
                check_gradients(None, problem)
            for each in UNEVEN:
                check_uneven(each)
    found = []
    for problem in LARGE:
        check(None, problem, call(None, problem))
        planned = plan(problem)
        found.append([planned.op, planned.algorithm, planned.reason])
    return found


def plan(problem: Problem) -> fusedcomm.Plan:
    return problem.plan(integers(problem, dist.get_rank(), dist.get_world_size()), None)


def bytes_of(run: Callable[[], Any]) -> int:
    """What this host sends over the link in a call, that of both ranks and of TCP included."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    run()  # the first call connects, and votes
    dist.barrier()
    before = sent_bytes(device)
    run()
    dist.barrier()  # the peer has received it all
    return sent_bytes(device) - before


def sent(rank: int) -> dict[str, dict[str, int]]:
    """By algorithm and op: the bytes that went over the link, and for pipelined those of the plan."""
    found: dict[str, dict[str, int]] = {"pipelined": {}, "unfused": {}, "planned": {}}
    for name in ("pipelined", "unfused"):
        with fusedcomm.force_algorithm(name, strict=True):
            for problem in LARGE:
                found[name][problem.op] = bytes_of(lambda problem=problem: call(None, problem))
                if name == "pipelined":
                    found["planned"][problem.op] = plan(problem).sent_bytes
    with fusedcomm.force_algorithm("pipelined", strict=True):
        mine = UNEVEN_LARGE.inputs(2)[rank]
        found["pipelined"]["uneven"] = bytes_of(lambda: UNEVEN_LARGE.call(mine, None, 2))
        found["planned"]["uneven"] = UNEVEN_LARGE.explain(rank, None, 2).sent_bytes
    return found


SIZES = tune.TuneSizes(
    probe=(16, 32, 32),
    matmuls=((64, 64, 64),),
    narrow=((4, 64, 64),),
    num_bytes=(64 << 10, 4 << 20),
    calls=((16, 64, 64),),
    much_arithmetic=(0, 0, 0),
    much_sent=(0, 0, 0),
)


def tuned(rank: int, folder: Path) -> dict[str, Any]:
    """Tune on the link, into a folder of this host alone. Returns its rate by what came out, and what is then planned.

    Tests share the machine, so it is busy: noise is no error here.
    """
    ours = member_of(dist.group.WORLD)
    with (
        mock.patch.object(tune.TuneSizes, "of", lambda device_type, quick: SIZES),
        mock.patch.object(tune, "MOST_NOISE", 1e9),
        settings(CACHE_DIR=str(folder / f"cache.{rank}")),
    ):
        constants = tune.tune(ours, quick=True).constants
        tune.write_for_all(constants, ours.device, dist.group.WORLD, tune.num_hosts_of(ours))
        fusedcomm.close()
        planned = plan(next(iter(LARGE)))
        files = [file.name for file in (folder / f"cache.{rank}").iterdir()]
    return {"rate": constants.backend_bandwidth["all_to_all"], "reason": planned.reason, "files": files}


def all_of_it(rank: int, folder: Path) -> dict[str, Any]:
    return {each.__name__: each(rank) for each in (rate, values, sent)} | {"tuned": tuned(rank, folder)}


CHECKS = {"all": all_of_it}


if __name__ == "__main__":
    main(CHECKS)
