"""Backends: gloo's collectives on pretended CUDA tensors, of which none ends the process; NCCL's options."""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.memory import nccl_options
from fusedcomm.plan.geometry.cut import Cut, Parts
from fusedcomm.redistribution import execute
from fusedcomm.run import reference
from fusedcomm.run.reference import all_gather_into_tensor
from tests.helpers import redistribution_world as world
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched, first_arguments

# The functional collectives that gloo of torch 2.11 to 2.15 copies to the host, and its class for CUDA tensors. Sums
# have theirs in libtorch_cuda (ProcessGroupGlooCuda.cpp), and a reduce_scatter is an all_reduce.
COPIED = {
    "all_gather_into_tensor_out": "AsyncAllgatherCUDAWork",
    "all_to_all_single": "AsyncAlltoallCUDAWork",
    "all_reduce": None,
    "reduce_scatter_tensor": None,
}


@contextmanager
def pretended_cuda() -> Iterator[None]:
    """Every tensor says that it is on CUDA. Its memory, and what gloo does with it, is the CPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "is_cuda", property(lambda t: True))
        yield


def run_all(rank: int) -> None:
    """Each collective of a plain program, and each of a redistribution."""
    name = dist.group.WORLD.group_name
    x, both = torch.full((2, 2), rank + 1.0), torch.tensor([[1.0] * 2] * 2 + [[2.0] * 2] * 2)
    assert torch.equal(reference.all_gather(x, 0, 2, name), both)
    parts = Parts((0, 2), (2, 1), 3)
    gathered = reference.all_gather(x[: 2 - rank], 0, 2, name, Cut(rank, parts, None), padded=True)
    assert torch.equal(gathered, both[:3])
    assert torch.equal(reference.exchange(x, 0, 1, 2, name), both[:, :1])
    assert torch.equal(reference.reduce_scatter(x, "sum", 0, 2, name), torch.full((1, 2), 3.0))
    assert torch.equal(reference.all_reduce(x, "sum", 2, name), torch.full((2, 2), 3.0))
    for path in (("sum", 0, 1, None), ("sum", None)):
        for step in world.Plan(tuple(world.sharding_of((4, 2), (2,), (at,)) for at in path), x.dtype).steps:
            execute.run(step, (rank,), (0, 1), name, torch.ones(step.before.local_shape((rank,))))


@on_ranks(2)
def test_no_collective_that_ends_the_process_gets_cuda_tensors(rank: int) -> None:
    with pretended_cuda(), Dispatched() as ran:
        run_all(rank)
    assert set(ran.names("_c10d_functional")) == set(COPIED)


@on_ranks(2)
def test_a_product_is_summed_where_it_is(rank: int) -> None:
    x, w = torch.full((2, 3), rank + 1.0), torch.ones(3, 2)
    with fusedcomm.force_algorithm("unfused", strict=True), first_arguments(dist, "all_reduce") as given:
        y, plain = fusedcomm.matmul_all_reduce(x, w), fusedcomm.all_reduce(x)
    assert [t.data_ptr() for t in given] == [y.data_ptr()] and (y == 9).all()
    assert (plain == 3).all() and (x == rank + 1).all()


@on_ranks(2)
def test_ranks_understand_each_other_whichever_form_each_takes(rank: int) -> None:
    pg, own = dist.group.WORLD, torch.full((2, 3), float(rank))
    if rank == 0:
        gathered = torch.ops._c10d_functional.wait_tensor(all_gather_into_tensor(own, 2, pg.group_name))
    else:
        pg.allgather_into_tensor_coalesced([gathered := torch.full((4, 3), torch.nan)], [own]).wait()
    assert torch.equal(gathered, torch.tensor([0.0, 0.0, 1.0, 1.0])[:, None].expand(4, 3))


GATHERS = """
import sys, torch, torch.distributed as dist
from fusedcomm.run import reference
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
gather = getattr(torch.ops._c10d_functional if sys.argv[1] == "torch" else reference, "all_gather_into_tensor")
for _ in range(int(sys.argv[2])):
    for started in [gather(torch.ones(4, 8), 1, dist.group.WORLD.group_name) for _ in range(8)]:
        torch.ops._c10d_functional.wait_tensor(started)
dist.destroy_process_group()
"""


@pytest.mark.nightly
@pytest.mark.parametrize("whose, rounds", [("torch", "1000000"), ("ours", "1000")])
def test_gathers_that_end_at_once(whose: str, rounds: str, tmp_path: Path) -> None:
    """If torch's survive too, tests/helpers/gloo_gathers.py and the `out` form on CPUs can go."""
    library = tmp_path / "gloo_pairs.so"
    source = Path(__file__).with_name("gloo_pairs.cpp")
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", source, "-o", library], check=True)
    env = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run([sys.executable, "-c", GATHERS, whose, rounds], env=env, capture_output=True, text=True)
    died = done.returncode in (-signal.SIGABRT, -signal.SIGSEGV)
    assert died if whose == "torch" else done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in COPIED.values() if name])
def test_gloo_of_this_torch_copies_cuda_tensors(name: str) -> None:
    """By the names of its classes, as wheels without CUDA have them too."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        assert content.find(name.encode()) >= 0, f"gloo of torch {torch.__version__} has no {name}"


ZERO = 2  # NCCL_CTA_POLICY_ZERO in nccl.h


def options(name: str = "cta_policy") -> Any:
    """ncclConfig_t as torch shows it, in a build that knows the policy, or of another that knows another."""
    return SimpleNamespace(config=SimpleNamespace(**{name: 0}))


def build(monkeypatch: pytest.MonkeyPatch, version: tuple[Any, ...] = (2, 30, 7, "x"), **changes: Any) -> None:
    """Let torch.distributed be that of a build with NCCL; a change to None takes an attribute away."""
    backend = {"Options": options, nccl_options.POLICY: ZERO} | changes
    have = SimpleNamespace(**{name: value for name, value in backend.items() if value is not None})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", have, raising=False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)


def test_options_have_the_policy_and_are_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch)
    first, second = fusedcomm.nccl_options(), fusedcomm.nccl_options()
    assert first.config.cta_policy == ZERO and nccl_options.nccl_version_text() == "2.30.7"
    assert second is not first and second.config is not first.config  # torch writes the group's name into them


def test_a_torch_without_the_policy_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({nccl_options.POLICY: None}, {"Options": lambda: options("min_ctas")}):
        build(monkeypatch, (2, 27, 5), **changes)
        with pytest.raises(RuntimeError, match="must be a CUDA build with NCCL") as raised:
            fusedcomm.nccl_options()
        assert str(raised.value).endswith(f"torch {torch.__version__} has NCCL 2.27.5 without it")


def test_a_torch_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RuntimeError, match=f"torch {torch.__version__.replace('+', '.')} has no NCCL"):
        fusedcomm.nccl_options()
