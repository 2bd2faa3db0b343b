"""Plans of redistribution next to torch's own, read from its planner: never more collectives, bytes or seconds."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusedcomm.plan.cost.model import DEFAULTS
from fusedcomm.redistribution import search
from fusedcomm.redistribution.step_time import MeshLinks
from tests.helpers import redistribution_torch
from tests.redistribution.test_search import ROUNDING, Placements, links, pairs, sharding


def placed(placements: Placements) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [
        Shard(int(each[1:])) if each[0] == "S" else Partial() if each == "P" else Replicate() for each in placements
    ]


def worse_than_torch(mesh: Any, shape: tuple[int, ...], over: MeshLinks, share: int, first: int = 0) -> list[str]:
    """What is worse than in torch, for one in ``share`` pairs of shardings."""
    mesh_shape, found = tuple(mesh.shape), []
    for before, after in itertools.islice(pairs(len(shape), len(mesh_shape)), first, None, share):
        theirs = redistribution_torch.collectives(mesh, shape, placed(before), placed(after))
        seconds, num_collectives, num_bytes = redistribution_torch.total(theirs, 4, over)
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
    with redistribution_torch.world(math.prod(mesh_shape)):
        mesh = redistribution_torch.mesh(mesh_shape, flatten=True)
        for shape, machine in zip(itertools.cycle(shapes), MACHINES.values(), strict=False):
            assert not worse_than_torch(mesh, shape, links(mesh_shape, *machine), share)


def worse_at_random(rng: random.Random, num_meshes: int) -> list[str]:
    """Any mesh, shape, order of ranks, nodes and speed of collectives."""
    found = []
    for _ in range(num_meshes):
        mesh_shape = rng.choice([(2, 2, 2), (3, 2, 2), (2, 2, 2, 2), (2, 4), (2, 3), (4, 4), (2, 8), (5,)])
        constants = DEFAULTS["cuda"]
        kinds = list(constants.backend_latency)
        with redistribution_torch.world(math.prod(mesh_shape)):
            mesh = redistribution_torch.mesh(mesh_shape, flatten=True)
            for _ in range(8):
                shape = tuple(rng.choice([1, 2, 3, 5, 8, 12, 17, 100, 4096, 4099]) for _ in range(rng.randint(1, 3)))
                told = replace(
                    constants,
                    backend_bandwidth={kind: 1e9 * 10 ** rng.uniform(0, 2.5) for kind in kinds},
                    backend_latency={kind: 1e-6 * 10 ** rng.uniform(0, 2) for kind in kinds},
                )
                ranks = rng.sample(range(math.prod(mesh_shape)), math.prod(mesh_shape))
                over = MeshLinks(tuple(ranks), mesh_shape, rng.choice([1, 2, 3, 4, 64]), told, rng.choice([5e9, 50e9]))
                num = sum(1 for _ in pairs(len(shape), len(mesh_shape)))
                found += worse_than_torch(mesh, shape, over, share=max(num // 25, 1), first=rng.randrange(25))
    return found


@pytest.mark.parametrize("num_meshes", [1, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])])
def test_no_plan_is_worse_than_torchs_at_random(num_meshes: int) -> None:
    assert not worse_at_random(random.Random(0), num_meshes)


def test_worse_plans_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that did not merge is worse than torch, which does."""
    monkeypatch.setattr(search, "plan", search.plan.__wrapped__)
    monkeypatch.setattr(search._Search, "fastest", lambda self: tuple(self.best.steps))
    monkeypatch.setattr("fusedcomm.redistribution.by_dim._Change.merges", lambda *_: False)
    with redistribution_torch.world(4):
        mesh = redistribution_torch.mesh((2, 2), flatten=True)
        found = worse_than_torch(mesh, (16, 16), links((2, 2)), 1)
    assert any("('P', 'P') -> ('R', 'R')" in each for each in found)


def test_torchs_collectives_are_those_that_it_starts() -> None:
    """Kinds and sizes agree, except for exchanges, in whose place torch gathers on CPUs."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Started(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func).split(".")[1]
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                if name.startswith(kind):
                    seen.append((kind, math.prod(args[0].shape)))
            return func(*args, **(kwargs or {}))

    with redistribution_torch.world(8):
        mesh = redistribution_torch.mesh((2, 4), flatten=True)
        num = 0
        for shape, (before, after) in itertools.product([(16, 16), (10, 4), (5, 3)], pairs(2, 2)):
            told = redistribution_torch.collectives(mesh, shape, placed(before), placed(after))
            if any(each.kind == "all_to_all" for each in told):
                continue
            seen: list[tuple[str, int]] = []
            local = torch.zeros(sharding(shape, (2, 4), before).local_shape((0, 0)))
            x = DTensor.from_local(
                local, mesh, placed(before), run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            with Started():
                x.redistribute(placements=placed(after))
            assert [(each.kind, math.prod(each.given)) for each in told] == seen, (shape, before, after)
            num += len(seen)
    assert num > 200
