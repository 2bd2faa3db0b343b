"""Plans of redistribution next to what torch starts for them: never more collectives, bytes or seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.redistribution import search
from fusedcomm.redistribution.step_time import MeshLinks
from tests.helpers.merge_world import fake_ranks
from tests.redistribution.test_search import ROUNDING, Placements, links, pairs, sharding


def placed(placements: Placements) -> list[Any]:
    return [
        Shard(int(each[1:])) if each[0] == "S" else Partial() if each == "P" else Replicate() for each in placements
    ]


@contextmanager
def mesh_of(mesh_shape: Sequence[int]) -> Iterator[DeviceMesh]:
    with fake_ranks(math.prod(mesh_shape)):
        yield init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=tuple(f"d{i}" for i in range(len(mesh_shape))))


class Started(TorchDispatchMode):
    """(kind, mesh dims, elements sent) of each collective of torch on rank 0, which has every flattened mesh."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...], float]] = []
        self.dims: dict[Any, tuple[int, ...]] = {}
        for num in range(1, mesh.ndim + 1):
            for some in itertools.combinations(range(mesh.ndim), num):
                names = tuple(f"d{i}" for i in some)
                part = mesh[names] if num == 1 else mesh[names]._flatten("_".join(names))
                self.dims.setdefault(part.get_group().group_name, some)
        self.sizes = mesh.shape

    def start(self, kind: str, x: Tensor, mesh_dims: tuple[int, ...]) -> None:
        num = math.prod(self.sizes[i] for i in mesh_dims)
        parts = {"all_gather": num - 1, "all_reduce": 2 * (num - 1) / num}.get(kind, (num - 1) / num)
        if num > 1:
            self.found.append((kind, mesh_dims, parts * x.numel()))

    def exchange(self, x: Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        """On CPUs torch would gather in its place."""
        self.start("all_to_all", x, (mesh_dim,))
        size = mesh.size(mesh_dim)
        return x.new_empty(
            [n * size if dim == gather_dim else n // size if dim == shard_dim else n for dim, n in enumerate(x.shape)]
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = [kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if func._opname.startswith(kind)]
        if kinds:
            self.start(kinds[0], args[0], self.dims[args[-1]])
        return func(*args, **(kwargs or {}))


def by_torch(mesh: DeviceMesh, shape: tuple[int, ...], before: Placements, after: Placements) -> Started:
    local = sharding(shape, tuple(mesh.shape), before).local_shape((0,) * mesh.ndim)
    stride = torch.empty(shape, device="meta").stride()
    started = Started(mesh)
    with FakeTensorMode(), mock.patch.object(placement_types, "shard_dim_alltoall", started.exchange):
        x = DTensor.from_local(
            torch.empty(local), mesh, placed(before), run_check=False, shape=torch.Size(shape), stride=stride
        )
        with started:
            x.redistribute(placements=placed(after))
    return started


def worse_than_torch(mesh: Any, shape: tuple[int, ...], over: MeshLinks, share: int, first: int = 0) -> list[str]:
    """What is worse than in torch, for one in ``share`` pairs of shardings."""
    mesh_shape, found = tuple(mesh.shape), []
    for before, after in itertools.islice(pairs(len(shape), len(mesh_shape)), first, None, share):
        theirs = by_torch(mesh, shape, before, after).found
        seconds = sum(over.seconds(kind, 4 * sent, mesh_dims) for kind, mesh_dims, sent in theirs)
        num_collectives, num_bytes = len(theirs), 4 * sum(sent for _, _, sent in theirs)
        ours = search.plan(*(sharding(shape, mesh_shape, each) for each in (before, after)), 4, over)
        worse = ours.seconds > seconds * ROUNDING or ours.bytes > num_bytes * ROUNDING
        if worse or ours.num_collectives > num_collectives:
            found.append(f"{before} -> {after}: {num_collectives}, {num_bytes:.0f} bytes, {seconds:.2e} s\n{ours}")
    return found


MESHES: dict[tuple[int, ...], tuple[int, list[tuple[int, ...]]]] = {
    (8,): (1, [(16, 16), (5, 3)]),
    (2, 4): (1, [(16, 16), (10, 4)]),
    (3, 2): (3, [(7, 7, 7)]),
    (1, 4): (3, [(10, 4)]),
    (2, 2, 2): (11, [(16, 16), (5, 3)]),
}
MACHINES = {"cuda": (8, "cuda"), "two nodes": (4, "cuda"), "pairs": (2, "cuda"), "cpu": (64, "cpu")}


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_a_plan_is_never_worse_than_torchs(mesh_shape: tuple[int, ...]) -> None:
    """No plan is worse in collectives, bytes or seconds. torch's have its own padding and all flattened meshes."""
    share, shapes = MESHES[mesh_shape]
    with mesh_of(mesh_shape) as mesh:
        for shape, machine in zip(itertools.cycle(shapes), MACHINES.values(), strict=False):
            assert not worse_than_torch(mesh, shape, links(mesh_shape, *machine), share)


def test_worse_plans_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that did not merge is worse than torch, which does."""
    monkeypatch.setattr(search, "plan", search.plan.__wrapped__)
    monkeypatch.setattr(search._Search, "fastest", lambda self: tuple(self.best.steps))
    monkeypatch.setattr("fusedcomm.redistribution.by_dim._Change.merges", lambda *_: False)
    with mesh_of((2, 2)) as mesh:
        found = worse_than_torch(mesh, (16, 16), links((2, 2)), 1)
    assert any("('P', 'P') -> ('R', 'R')" in each for each in found)
