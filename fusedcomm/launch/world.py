"""One function in all ranks of a world, which torchrun has started or this process starts."""

import argparse
import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.env import available_cpus
from fusedcomm.launch.ranks import RankError, RankPool

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch reads it at its first CPU allocation
SYSTEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

# call(fn, *args) runs fn(rank, *args) in every rank. It gives rank 0's result, and None in torchrun's other ranks.
CallRanks = Callable[..., Any]


def under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


def is_rank_0() -> bool:
    """Whether this is rank 0 under torchrun; a process that starts the ranks itself is rank 0 too."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def default_device_type() -> str:
    """GPUs if there are two at least. `cannot_start` says if ranks lack one."""
    return "cuda" if torch.cuda.device_count() >= 2 else "cpu"


def world_size_of(asked: int | None, device_type: str) -> int:
    """The number of ranks of a command: torchrun's, else as asked for, else one per GPU, or 2."""
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    return asked or (torch.cuda.device_count() if device_type == "cuda" else 2)


def asked_for(args: argparse.Namespace) -> tuple[str, int, str | None]:
    """(device type, number of ranks, why a command cannot start with them) by `console.add_rank_arguments`."""
    device_type = args.device or default_device_type()
    world_size = world_size_of(args.world_size, device_type)
    problem = cannot_start(device_type, world_size, args.oversubscribe)
    if problem is None and args.world_size not in (None, world_size):
        problem = f"--world-size must be that of torchrun, {world_size}, got {args.world_size}"
    return device_type, world_size, problem


def cannot_start(device_type: str, world_size: int, oversubscribe: bool) -> str | None:
    """Why a command does not start so many ranks here, or None; torchrun's have been started already."""
    if problem := bare_srun():
        return problem
    if device_type == "cuda":
        missing = missing_gpus(world_size)
        return missing and f"--device cuda: {missing}"
    return None if under_torchrun() or oversubscribe else too_many("--world-size", world_size, 2)


def bare_srun() -> str | None:
    """Why this task of srun, one of several, must not start ranks, or None: each would start a world."""
    if under_torchrun() or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) < 2:
        return None
    return "each task of srun must have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or be one that starts torchrun"


def too_many(option: str, asked: int, always: int, device_type: str = "cpu") -> str | None:
    """Why ``asked`` are more than this process has CPUs or GPUs for, or None; ``always`` are never too many."""
    here = torch.cuda.device_count() if device_type == "cuda" else available_cpus()
    most = max(always, here)
    if asked <= most:
        return None
    device, then = ("GPU", "refused by NCCL") if device_type == "cuda" else ("CPU", "slow")
    return (
        f"{option} must be at most {most} here, got {asked}: this process may use {here} {device}s, "
        f"and ranks that share a {device} are {then}; --oversubscribe starts them nevertheless"
    )


def missing_gpus(world_size: int | None) -> str | None:
    """Why this machine's ranks cannot have a GPU each, or None."""
    if under_torchrun() and "LOCAL_WORLD_SIZE" not in os.environ:  # of srun, maybe on several machines
        return None
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size or 1))
    num_gpus = torch.cuda.device_count()
    if num_gpus >= num_ranks:
        return None
    return f"each rank needs a GPU of its own, got {num_ranks} ranks and {num_gpus} GPUs"


def torch_asks_for_huge_pages() -> bool:
    return HUGE_PAGES.items() <= os.environ.items()


def system_huge_pages() -> str | None:
    """Linux's setting: always, madvise (who asks gets them) or never."""
    try:
        return SYSTEM_HUGE_PAGES.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return None


def rank_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    rank = int(os.environ["RANK"])
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))


@contextlib.contextmanager
def ranks(
    device_type: str, world_size: int, timeout_s: float, env: Mapping[str, str] | None = None
) -> Iterator[CallRanks]:
    """The ranks of torchrun, or else ``world_size`` new ones, also with ``env``. On a CPU each has one thread.

    ``timeout_s`` bounds a call, or, under torchrun, the start and each collective of the process group. An error leaves
    torchrun's group as it is: a rank that fails alone says so and ends, and torchrun ends the others.
    """
    if not under_torchrun():
        with RankPool(world_size, backend=BACKENDS[device_type], timeout_s=timeout_s, env=env) as pool:
            yield lambda fn, *args: pool.run(fn, *args)[0]
        return
    owned = not dist.is_initialized()
    if owned:
        if device_type == "cuda":
            torch.cuda.set_device(rank_device(device_type))
        else:
            torch.set_num_threads(1)
        dist.init_process_group(BACKENDS[device_type], timeout=datetime.timedelta(seconds=timeout_s))
    rank = dist.get_rank()

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        result = fn(rank, *args)
        return result if rank == 0 else None

    yield call
    # Not behind an error: NCCL would wait for the captured graphs that its traceback holds, and for the other ranks
    if owned:
        dist.destroy_process_group()


def message(error: Exception) -> str:
    """A command's text for an error: the message alone where values are wrong, else everything."""
    if isinstance(error, RankError) and error.failures[0].exception_type == "ValuesDiffer":
        return error.failures[0].message
    return str(error)
