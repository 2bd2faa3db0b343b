"""A group whose state is made in one mode of torch serves calls, faults and resets in all others."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._functorch.eager_transforms import grad_increment_nesting
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode

import fusedcomm
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.symm_mem import enable_cpu
from tests.helpers.groups import fresh_group, member_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched
from tests.helpers.tiers import nightly_but


class Seen(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


REAL: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "function": Seen,
    "dispatch": Dispatched,
}
MODES = REAL | {  # in these an op runs on no real tensors, but groups are made, reset and closed
    "fake": FakeTensorMode,
    "grad": grad_increment_nesting,
    "vmap": lambda: vmap_increment_nesting(2, "error"),
}

QUICK = ("inference", "device", "fake")


class Program:
    """A rank's calls on a group. Each names the mode that it runs in, and checks what it gets."""

    def __init__(self, rank: int, group: Any) -> None:
        enable_cpu()
        self.rank, self.group, self.x, self.w = rank, group, torch.ones(4, 8), torch.ones(8, 6)
        mesh = DeviceMesh.from_group(group, "cpu")
        self.whole = DTensor.from_local(self.x, mesh, [Shard(0)], run_check=False)
        self.kept: list[fusedcomm.DeviceToHost] = []

    def op(self) -> None:
        assert (fusedcomm.matmul_all_reduce(self.x, self.w, self.group) == 16).tolist() == [[True] * 6] * 4

    def fault(self) -> None:
        """Ranks differ, then one of them leaves: both hear of it at once."""
        with pytest.raises(fusedcomm.PeerMismatchError):
            fusedcomm.matmul_all_reduce(self.x[self.rank :], self.w, self.group)
        fusedcomm.reset(self.group)
        workspace = member_of(self.group).workspace
        if self.rank == 1 and workspace is not None:
            workspace.leave("gone")
        fusedcomm.reset(self.group) if workspace is None else dist.barrier(self.group)
        if self.rank == 0 and workspace is not None:
            with pytest.raises(fusedcomm.PeerTimeoutError, match="rank 1 has left: gone"):
                fusedcomm.matmul_all_reduce(self.x, self.w, self.group)
            with pytest.raises(fusedcomm.PeerTimeoutError):
                fusedcomm.synchronize(self.group)
        fusedcomm.reset(self.group)

    def sum(self) -> None:
        found = torch.ops.symm_mem._low_contention_reduce_scatter(self.x, "sum", self.group.group_name)
        assert found.tolist() == [[2.0] * 8] * 2

    def redistribute(self) -> None:
        assert fusedcomm.redistribute(self.whole, placements=[Replicate()]).to_local().shape == (8, 8)

    def host(self) -> None:
        self.kept.append(fusedcomm.DeviceToHost(self.x))
        for each in self.kept:
            each.wait().mul_(2)

    def plan(self) -> None:
        x, w = (torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (self.x, self.w))
        assert fusedcomm.explain("matmul_all_reduce", x, w, self.group).algorithm == "chunked"
        assert fusedcomm.redistribute_plan(self.whole, placements=[Replicate()]).steps

    def reset(self) -> None:
        fusedcomm.synchronize(self.group)
        fusedcomm.reset(self.group)

    def close(self) -> None:
        fusedcomm.close(self.group)

    def run(self, action: str, *modes: str) -> None:
        if action not in IN_ALL:
            modes = tuple(mode for mode in modes if mode in REAL)
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(MODES[mode]())
            getattr(self, action)()


IN_ALL = ("plan", "reset", "close")
ACTIONS = ("op", "sum", "host", "fault", "redistribute")


@on_ranks(2)
@pytest.mark.parametrize("first", nightly_but(QUICK, MODES))
def test_made_in_one_mode_used_in_all(rank: int, first: str) -> None:
    with fresh_group(ALGORITHM="chunked", TIMEOUT_S="5") as group:
        program = Program(rank, group)
        for action in ("plan", "op", "sum", "host"):
            program.run(action, first)
        if first not in REAL:
            program.run("reset", first)
        for mode in MODES:
            for action in ("op", "op", "op", *ACTIONS, "reset", "op"):
                program.run(action, mode)


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_as_before(mode: str) -> None:
    with MODES[mode]():
        before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        with outside_modes():
            pass
        assert before == (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())
