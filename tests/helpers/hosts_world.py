"""Checks in ranks of two hosts, for test_hosts.py: ``torchrun ... -m tests.helpers.hosts_world CHECK FOLDER``."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory.vote import STORE_THREAD
from fusedcomm.run import python_executor
from tests.helpers.groups import call, check, empty_is_nan
from tests.helpers.hosts import sent_bytes, set_link
from tests.helpers.op_problems import NAMED, check_gradients
from tests.helpers.problems import Problem, integers
from tests.helpers.uneven import Uneven
from tests.helpers.waiting import wait_until

PROBLEMS = [
    NAMED["packed-qkv"],
    NAMED["all_to_all_matmul-heads-gathered"],
    NAMED["all_gather_matmul-list-qkv"],
    NAMED["matmul_reduce_scatter-batch-rows-scattered"],
    NAMED["matmul_all_reduce-both-divide"],
]
MEMBERS = {"whole": [0, 1, 2, 3], "host 0": [0, 1], "host 1": [2, 3], "across": [0, 2]}
WAIT_S = 60.0  # for ranks that wait for each other beside the link


@contextmanager
def new_groups(names: list[str], timeout_s: float = WAIT_S) -> Iterator[dict[str, Any]]:
    made = {name: dist.new_group(MEMBERS[name], timeout=timedelta(seconds=timeout_s)) for name in names}
    mine = {name: group for name, group in made.items() if dist.get_rank() in MEMBERS[name]}
    yield mine
    dist.barrier()  # gloo of a peer may still be sending
    for group in mine.values():
        dist.destroy_process_group(group)


def plans(group: Any) -> list[list[str]]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made = [problem.plan(integers(problem, rank, size), group) for problem in PROBLEMS]
    return [[plan.op, plan.algorithm, plan.reason] for plan in made]


# Values
def values(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    with new_groups(list(MEMBERS)) as groups:
        for name, group in groups.items():
            for algorithm in ("chunked", "pipelined", None):
                strict = algorithm != "chunked" or name.startswith("host")
                with fusedcomm.force_algorithm(algorithm, strict=strict), empty_is_nan():
                    for problem in PROBLEMS:
                        check_gradients(problem, group=group)
            found[name] = plans(group)
    return found


# A link that is cut
GLOO_S = 3.0
VOTE_S = 1.0  # on host 1, where no vote can succeed
BACK_S = 60.0
LARGER = Problem("larger", (1024, 2), 512, 0, 1)  # 2 MiB per peer: beyond the first workspace, and two pieces
STEPS = ("growth", "reset", "close", "first call")  # calls that need the store


def meet(rank: int, folder: Path, point: str) -> None:
    """Bring all ranks together by files, as the link is cut."""
    (folder / f"{point}.{rank}").touch()
    wait_until(lambda: len(list(folder.glob(f"{point}.*"))) == dist.get_world_size(), WAIT_S)


def error_of(call: Callable[[], Any]) -> dict[str, Any]:
    start = time.monotonic()
    error: BaseException | None = None
    try:
        call()
    except RuntimeError as raised:
        error = raised
    text = None if error is None else str(error)
    return {"type": type(error).__name__, "text": text, "seconds": time.monotonic() - start}


@contextmanager
def cutting(rank: int) -> Iterator[None]:
    """Inside, rank 2 cuts the link as it is about to send the second piece of a pipelined call: one is under way."""
    begin, begun = python_executor.begin, []

    def cut_before_the_second(*collective: Any) -> Any:
        begun.append(collective[0])
        if len(begun) == 2 and rank == 2:
            set_link(os.environ["GLOO_SOCKET_IFNAME"], up=False)
        return begin(*collective)

    with (
        fusedcomm.force_algorithm("pipelined", strict=True),
        mock.patch.object(python_executor, "begin", cut_before_the_second),
    ):
        yield


def num_blocked() -> int:
    """The number of store calls that were given up and have not returned."""
    return sum(thread.name == STORE_THREAD for thread in threading.enumerate())


def until_error(group: Any, problem: Problem) -> dict[str, Any]:
    """The error of the call that failed, and how many calls before it gave right values."""
    deadline, before = time.monotonic() + WAIT_S, 0
    while (found := error_of(lambda: check(group, problem, call(group, problem))))["text"] is None:
        assert time.monotonic() < deadline, "no call has failed"
        before += 1
    return found | {"before": before}


def until_success(call: Callable[[], Any]) -> float:
    start = time.monotonic()
    while True:
        with suppress(fusedcomm.PeerError):
            call()
            return time.monotonic() - start
        assert time.monotonic() - start < BACK_S


def cut(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 2 cuts the link in the middle of a call. Returns what fails and how, what goes on, and the way back."""
    found: dict[str, Any] = {}
    problem, gather, (here, there) = PROBLEMS[0], PROBLEMS[2], ("host 0", "host 1")
    cross, other = (dist.new_group(timeout=timedelta(seconds=GLOO_S)) for _ in range(2))
    with new_groups([here, there]) as old, new_groups([here, there]) as unused:
        (inside,), (later,) = old.values(), unused.values()
        for group in (inside, cross, other):
            check(group, problem, call(group, problem))
        meet(rank, folder, "ready")  # a barrier over the link may end on one rank while another still waits for it
        if rank in MEMBERS["host 1"]:
            os.environ["FUSEDCOMM_TIMEOUT_S"] = str(VOTE_S)
        with cutting(rank):
            found["across"] = until_error(cross, LARGER)
            meet(rank, folder, "cut")
            found["gather across"] = until_error(other, gather)
        meet(rank, folder, "failed")
        for each in PROBLEMS * 3:
            check_gradients(each, group=inside)  # memory that is there already, so this needs no store
        meet(rank, folder, "inside")
        steps = (
            lambda: check(inside, LARGER, call(inside, LARGER)),
            lambda: fusedcomm.reset(inside),
            lambda: fusedcomm.close(inside),
            lambda: check(later, problem, call(later, problem)),
        )
        for name, step in zip(STEPS, steps, strict=True):
            found[name] = error_of(step) | {"blocked": num_blocked()}
            meet(rank, folder, name)
        if rank == 2:
            set_link(os.environ["GLOO_SOCKET_IFNAME"], up=True)
        found["old group"] = error_of(lambda: check(cross, problem, call(cross, problem)))
        found["back after"] = []
        for group in (inside, later):
            found["back after"].append(until_success(lambda group=group: fusedcomm.reset(group)))
            check(group, problem, call(group, problem))
        os.environ["FUSEDCOMM_TIMEOUT_S"] = str(WAIT_S)
        with new_groups(["whole"]) as groups, fusedcomm.force_algorithm("pipelined", strict=True):
            for each in PROBLEMS:
                check_gradients(each, group=groups["whole"])
    found["blocked"] = num_blocked()
    return found


CHECKS = {"values": values, "cut": cut}


def main(checks: Mapping[str, Callable[[int, Path], Any]]) -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    rank = dist.get_rank()
    result = checks[name](rank, folder)
    (folder / f"result.{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# the bytes on a throttled link: tests/memory/test_link.py
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


def sent(rank: int, folder: Path) -> dict[str, dict[str, int]]:
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


if __name__ == "__main__":
    main(CHECKS | {"sent": sent})
