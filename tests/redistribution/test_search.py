"""Plans of redistribution: by hand where one is named; exact, quick, the same on all ranks."""

import itertools
import math
import random
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

from fusedcomm.plan.cost.model import DEFAULTS
from fusedcomm.redistribution import search, steps
from fusedcomm.redistribution.search import RedistributionPlan
from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.step_time import MeshLinks, ranks_per_node
from tests.helpers.merge_world import fake_ranks
from tests.helpers.redistribution_world import check

Placements = tuple[str, ...]  # R, S0, S1, ..., P (sum) or P and another op
ROUNDING = 1 + 1e-9


def links(mesh_shape: tuple[int, ...], ranks_per_node: int = 8, device_type: str = "cuda") -> MeshLinks:
    num = math.prod(mesh_shape)
    return MeshLinks(tuple(range(num)), mesh_shape, ranks_per_node, DEFAULTS[device_type], 50e9)


def sharding(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[str]) -> Sharding:
    """A Sharding in which mesh dims cut in their own order."""
    cuts = [[i for i, each in enumerate(placements) if each == f"S{dim}"] for dim in range(len(shape))]
    partial = [(each[1:] or "sum") if each[0] == "P" else None for each in placements]
    return Sharding.of(shape, mesh_shape, cuts, partial)


def plan(
    shape: Sequence[int], mesh_shape: tuple[int, ...], before: str, after: str, over: MeshLinks | None = None
) -> RedistributionPlan:
    both = (sharding(shape, mesh_shape, each.split()) for each in (before, after))
    return search.plan(*both, 4, over or links(mesh_shape))


def kinds(of: RedistributionPlan) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.kind, each.mesh_dims) for each in of.steps]


def pairs(num_tensor_dims: int, num_mesh_dims: int) -> Iterator[tuple[Placements, Placements]]:
    """All pairs of shardings that have a plan."""
    each = ["R", *(f"S{dim}" for dim in range(num_tensor_dims)), "P"]
    every = list(itertools.product(each, repeat=num_mesh_dims))
    for before, after in itertools.product(every, every):
        if all(b != "P" or a == "P" for a, b in zip(before, after, strict=True)):
            yield before, after


LARGE = 4096 * 4096 * 4

BY_HAND: list[tuple[tuple[int, ...], tuple[int, ...], str, str, list[Any], float]] = [  # at float32
    ((16, 16), (2, 4), "S0 S0", "S1 S1", [("all_to_all", (0, 1))], 7 / 8 * 32 * 4),
    # rank (r, c) holds rows 2 (2 r + c), + 1 and needs rows 4 c to 4 c + 4: 2 of those are here where r == c
    ((8,), (2, 2), "S0 S0", "R S0", [("all_to_all", (0, 1))], (2 + 4 + 4 + 2) / 4 * 4),
    # 10 rows on 2 x 2 ranks are cut into 5 and 5, and these into 3 and 2
    ((10,), (2, 2), "P P", "S0 S0", [("reduce_scatter", (0, 1))], (7 + 8 + 7 + 8) / 4 * 4),
    ((8, 8), (2, 4), "Psum Pavg", "R R", [("all_reduce", (0, 1))], 2 * 7 / 8 * 64 * 4),
    ((7, 5), (2, 4), "R R", "S0 S1", [("slice", ())], 0),
    ((16, 16), (2, 4), "P S0", "P S1", [("all_to_all", (1,))], 3 / 4 * 64 * 4),
    # mesh dims that do not follow each other
    ((4, 4), (2, 2, 2), "P P P", "R S0 R", [("all_reduce", (0, 1, 2)), ("slice", ())], 2 * 7 / 8 * 64),
    # what is large is reduced before it is gathered
    ((4096, 4096), (2, 2, 2), "P P P", "R S0 R", [("reduce_scatter", (1,)), ("all_reduce", (0, 2))], LARGE * 1.25),
    # 16 reduced; then (r, c) has rows 4 c + 2 r, + 1, which 2 ranks need: where r == c it is one of them
    ((8, 8), (2, 2), "P S0", "S0 R", [("reduce_scatter", (0,)), ("all_to_all", (0, 1))], (16 + 6 / 4 * 16) * 4),
    # mesh dims of one rank
    ((8, 8), (1, 1), "S0 P", "R R", [], 0),
    ((8, 8), (1, 2, 1), "S0 S1 P", "R S1 R", [], 0),
    ((8, 8), (4,), "R", "R", [], 0),
]


@pytest.mark.parametrize(("shape", "mesh_shape", "before", "after", "wanted", "num_bytes"), BY_HAND)
def test_plans_by_hand(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], before: str, after: str, wanted: list[Any], num_bytes: float
) -> None:
    found = plan(shape, mesh_shape, before, after)
    assert (kinds(found), found.bytes) == (wanted, num_bytes)


@pytest.mark.parametrize(
    ("ranks", "hosts", "size"),
    [
        (range(8), [0] * 8, 8),
        (range(16), [0] * 8 + [1] * 8, 8),
        (range(12), [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3, 3),
        ((0, 8, 1, 9), (0, 1, 0, 1), 8),  # in the order of the mesh
        ((8, 9, 16, 17), (0, 0, 1, 1), 16),  # not of rank 0: which of 8 and 16 it is does not show
        (range(4), (0, 1, 0, 1), 1),
        (range(6), (0, 0, 0, 0, 1, 1), 4),
    ],
)
def test_nodes_are_told_by_hosts(ranks: Sequence[int], hosts: Sequence[int], size: int) -> None:
    assert ranks_per_node(ranks, hosts) == size


def test_what_has_no_exact_plan_is_named() -> None:
    with pytest.raises(ValueError, match=r"got P\(sum\) on mesh dim 0, P\(max\) on mesh dim 1"):
        plan((4, 4), (2, 2), "P Pmax", "R R")


# what holds for all
def shuffled(rng: random.Random) -> tuple[Sharding, Sharding]:
    """Any order of cuts; half of the shapes are cut evenly. One op reduces."""
    mesh_shape = rng.choice([(2, 2, 2), (2, 4), (3, 2), (2, 2, 2, 2), (4, 3), (1, 5), (8,)])
    ndim, op = rng.randint(1, 3), rng.choice(["sum", "avg", "max", "min", "product"])
    places = [rng.choice(["R", "P", *range(ndim), *range(ndim)]) for _ in mesh_shape]
    after = [rng.choice(["R", *range(ndim), *(["P"] if each == "P" else [])]) for each in places]
    shape = [rng.randint(0, 9) for _ in range(ndim)]
    if rng.random() < 0.5:
        shape = [rng.randint(0, 2) * math.prod(mesh_shape) for _ in range(ndim)]

    def made(placements: list[Any]) -> Sharding:
        dims = rng.sample(range(len(mesh_shape)), len(mesh_shape))
        cuts = [[i for i in dims if placements[i] == dim] for dim in range(ndim)]
        return Sharding.of(shape, mesh_shape, cuts, [op if each == "P" else None for each in placements])

    return made(places), made(after)


@pytest.mark.parametrize("shape", [(8, 8), (5, 3)])
def test_two_collectives_do_everything(shape: tuple[int, ...]) -> None:
    """The two are a reduce_scatter of all that is partial, and one exchange. A plan that latency rules has no more."""
    for before, after in itertools.islice(pairs(2, 3), None, None, 10):
        both = [sharding(shape, (2, 2, 2), each) for each in (before, after)]
        assert search.plan(*both, 1, links((2, 2, 2))).num_collectives <= 2, f"{before} -> {after}"


def test_plans_give_the_exact_result() -> None:
    """None is worse than one mesh dim at a time. All kinds of steps are taken, regular or not, and all ways to send."""
    rng, num, seen = random.Random(0), 0, set()
    while num < 250:
        before, after = shuffled(rng)
        over = links(before.mesh_shape, rng.choice([2, 8]), rng.choice(["cuda", "cpu"]))
        itemsize = rng.choice([4, 1 << 20])
        found = search.plan(before, after, itemsize, over)  # for small and large items other ones
        for chain in (found.steps, found.by_dim):
            assert [before, *(each.after for each in chain)] == [*(each.before for each in chain), after]
        bound = search._total(found.by_dim, itemsize, over)
        assert found.num_collectives <= bound.num_collectives and found.seconds <= bound.seconds
        assert found.bytes <= bound.bytes * ROUNDING
        dtypes = [torch.float32, torch.bfloat16, torch.int64]
        if not any(before.partial):
            dtypes += [torch.bool, torch.complex64, torch.int16]
        if found.steps:
            check(before, found.steps, rng.choice(dtypes), rng, shuffle=rng.random() < 0.5)
            seen |= {(step.kind, step.is_regular, step.sends_as, step.is_padded) for step in found.steps}
            num += 1
    assert {(kind, is_regular) for kind, is_regular, _, _ in seen} == {
        *itertools.product([steps.SLICE, steps.ALL_GATHER, steps.ALL_TO_ALL, steps.REDUCE_SCATTER], [True, False]),
        (steps.ALL_REDUCE, True),
    }
    ways = {(sends_as, is_padded) for kind, _, sends_as, is_padded in seen if kind == steps.REDUCE_SCATTER}
    assert ways == {(steps.REDUCE_SCATTER, False), (steps.REDUCE_SCATTER, True), (steps.ALL_TO_ALL, False)}


# links
def test_links_of_several_mesh_dims() -> None:
    """2 nodes of 4: groups inside, across (1 card), and both (4 cards, which reach a ring inside)."""
    over = links((2, 4), ranks_per_node=4)
    latency, inside = DEFAULTS["cuda"].backend_latency["all_gather"], DEFAULTS["cuda"].backend_bandwidth["all_gather"]
    assert over.seconds("all_gather", 1e9, (1,)) == latency + 1e9 / inside
    assert over.seconds("all_gather", 1e9, (0,)) == pytest.approx(latency + 1e9 / 50e9)
    assert over.seconds("all_gather", 1e9, (0, 1)) == pytest.approx(latency + 1e9 / min(inside, 4 * 50e9))
    assert over.seconds("all_to_all", 7e8, (0, 1)) == pytest.approx(latency + 4e8 / 50e9)  # 4 of 7 peers are far


# Plans of redistribution next to what torch starts for them: never more collectives, bytes or seconds.
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


def worse_than_torch(mesh: Any, shape: tuple[int, ...], over: MeshLinks, share: int) -> list[str]:
    """What is worse than in torch, for one in ``share`` pairs of shardings."""
    mesh_shape, found = tuple(mesh.shape), []
    for before, after in itertools.islice(pairs(len(shape), len(mesh_shape)), 0, None, share):
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
    (2, 2, 2): (23, [(16, 16), (5, 3)]),
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
    monkeypatch.setattr(search, "_fastest", lambda *args: args[-1])
    monkeypatch.setattr("fusedcomm.redistribution.by_dim._goes_together", lambda *_: False)
    with mesh_of((2, 2)) as mesh:
        found = worse_than_torch(mesh, (16, 16), links((2, 2)), 1)
    assert any("('P', 'P') -> ('R', 'R')" in each for each in found)
