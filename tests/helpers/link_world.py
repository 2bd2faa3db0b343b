"""Checks in a rank on each end of a throttled link: ``torchrun ... -m tests.helpers.link_world CHECK FOLDER``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import fusedcomm
from fusedcomm.bench import tune
from fusedcomm.tools.selftest_checks import settings
from tests.helpers.groups import call, member_of
from tests.helpers.hosts import sent_bytes
from tests.helpers.hosts_world import main
from tests.helpers.problems import Problem, integers
from tests.helpers.uneven import Uneven

MIB = 1 << 20
LARGE = {  # each with the bytes that a rank must send to the other one
    Problem("bytes", (512, 8), 512, 0, 1): MIB,  # half of [512, 1024]
    Problem("bytes", (512, 512), 8, 0, 1, op="all_to_all_matmul"): MIB,  # likewise
    Problem("bytes", (512, 512), 8, 0, op="all_gather_matmul"): MIB,  # all of [512, 512]
    Problem("bytes", (512, 8), 512, scatter_dim=0, op="matmul_reduce_scatter"): MIB,  # half of [1024, 512]
    Problem("bytes", (1024, 8), 512, op="matmul_all_reduce"): 2 * MIB,  # half, and then half of the sums
}
UNEVEN_LARGE = Uneven("matmul_all_to_all", (900, 1000), gather_dim=0, scatter_dim=1, gather=(400, 500))


def plan(problem: Problem) -> fusedcomm.Plan:
    return problem.plan(integers(problem, dist.get_rank(), dist.get_world_size()), None)


def bytes_of(run: Callable[[], Any]) -> int:
    """The bytes that this host sends over the link in a call, with those of both ranks' barriers and of TCP."""
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
    matmuls=((16, 32, 32), (64, 64, 64)), narrow=((4, 64, 64),), num_bytes=(64 << 10, 4 << 20), calls=((16, 64, 64),)
)


def tuned(rank: int, folder: Path) -> dict[str, Any]:
    """Tune on the link, whatever the noise: its rate by what came out, and what is then planned."""
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
    return {"sent": sent(rank), "tuned": tuned(rank, folder)}


CHECKS = {"all": all_of_it}


if __name__ == "__main__":
    main(CHECKS)
