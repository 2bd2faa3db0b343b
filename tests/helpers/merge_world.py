"""A graph that all ranks of a mesh run, on one machine: every node for all ranks at once, collectives among them."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedcomm.compile.graph.collectives import STARTS, functional
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh, flatten

AR, RS, AG, A2A = "all_reduce", "reduce_scatter", "all_gather", "all_to_all"
WAIT = functional.wait_tensor.default
MESHES = {
    "2x2x2": torch.arange(8).view(2, 2, 2),
    "2x3": torch.arange(6).view(2, 3),
    "2x1x3": torch.arange(6).view(2, 1, 3),
}


@dataclass(frozen=True)
class World:
    """A world as rank 0 sees it. The names of rank 0's groups stand for all groups of their mesh dims."""

    mesh: Any  # a DeviceMesh
    flat: FlattenedMesh

    @property
    def ranks(self) -> np.ndarray:
        return np.array(self.mesh.mesh.tolist())

    def name(self, *dims: int) -> str:
        return self.flat.of(dims).name

    def members(self, dims: Sequence[int]) -> list[list[int]]:
        """The global ranks of each group, ascending, as torch orders them."""
        last = np.moveaxis(self.ranks, dims, range(-len(dims), 0))
        return np.sort(last.reshape(-1, math.prod(self.ranks.shape[d] for d in dims))).tolist()


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default group without peers, of torch's backend "fake"."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_world(ranks: Any) -> Iterator[World]:
    """A mesh of fake groups of these global ranks, an array or list."""
    from torch.distributed.device_mesh import DeviceMesh

    ranks = torch.as_tensor(ranks)
    with fake_ranks(ranks.numel()):
        mesh = DeviceMesh("cpu", ranks)
        yield World(mesh, *flatten(mesh))


def traced(program: Callable[..., Any], *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> GraphModule:
    """The program in aten ops, with fake tensors. Results that nothing reads go, as in torch.compile's graphs."""
    module = make_fx(program, tracing_mode="fake")(*(torch.empty(shape, dtype=dtype) for shape in shapes))
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes:
        node.meta["source_fn_stack"] = [("redistribute", "redistribute")]  # as if one call of DTensor made them all
    return module


def inputs(world: World, shape: tuple[int, ...], seed: int = 0) -> list[list[Tensor]]:
    """Integers whose averages over up to 6 ranks are integers too, even several times over."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(-3, 4, shape, generator=generator).double() * 6**5] for _ in range(world.ranks.size)]


def sent(graph: Graph, world: World) -> list[tuple[str, tuple[int, ...], float]]:
    """For each collective its kind, mesh dims, and how many elements a rank sends."""
    found = []
    for node in graph.nodes:
        if node.target in STARTS:
            kind, group = STARTS[node.target], world.flat.named(node.args[-1])
            num_ranks = math.prod(world.flat.sizes[d] for d in group.dims)
            numel = node.args[0].meta["val"].numel()
            others = {"all_gather": num_ranks - 1, "all_reduce": 2 * (num_ranks - 1) / num_ranks}
            found.append((kind, group.dims, numel * others.get(kind, (num_ranks - 1) / num_ranks)))
    return found


def kinds(graph: Graph, world: World) -> list[tuple[Any, ...]]:
    return [(kind, *dims) for kind, dims, _ in sent(graph, world)]


def simulate(graph: Graph, world: World, inputs: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """What the graph returns on each rank, given ``inputs[rank]``. The inputs stay as they are."""
    values: dict[Any, list[Any]] = {}
    placeholders = iter(zip(*inputs, strict=True))
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = list(next(placeholders))
            continue
        args = [map_arg((node.args, node.kwargs), lambda n, r=r: values[n][r]) for r in range(len(inputs))]
        if node.op == "output":
            return [list(a[0]) if isinstance(a[0], (list, tuple)) else [a[0]] for a, _ in args]
        if node.target in STARTS:
            values[node] = _exchanged(node, world, [a[0] for a, _ in args])
        elif node.target is WAIT:
            values[node] = [a[0] for a, _ in args]
        else:
            values[node] = [node.target(*a, **kw) for a, kw in args]
        for val in values[node]:
            like = node.meta.get("val")
            if isinstance(val, Tensor) and isinstance(like, Tensor):
                sizes = zip(val.shape, like.shape, strict=True)
                assert val.dtype == like.dtype and all(a == b for a, b in sizes if isinstance(b, int))
    raise AssertionError("no output")


def _exchanged(node: Any, world: World, given: list[Tensor]) -> list[Tensor]:
    kind, group = STARTS[node.target], world.flat.named(node.args[-1])
    reduce_op = str(node.args[1])
    results = list(given)
    for ranks in world.members(group.dims):
        parts = [given[r] for r in ranks]
        assert all(part.is_contiguous() for part in parts) or kind == "all_reduce"
        for i, r in enumerate(ranks):
            if kind == "all_gather":
                results[r] = torch.cat(parts)
            elif kind == "all_to_all":
                results[r] = torch.cat([part.chunk(len(ranks))[i] for part in parts])
            else:
                reduced = _reduce(torch.stack(parts), reduce_op)
                results[r] = reduced if kind == "all_reduce" else reduced.chunk(len(ranks))[i].contiguous()
    return results


def _reduce(parts: Tensor, op: str) -> Tensor:
    if op == "avg":
        return parts.mean(0)
    return {"sum": parts.sum, "max": parts.amax, "min": parts.amin, "product": parts.prod}[op](0)


class Calls:
    """Functional collectives over mesh dims, waited for, on any dim as DTensor writes them."""

    def __init__(self, world: World) -> None:
        self.world = world

    def size(self, dims: tuple[int, ...]) -> int:
        return math.prod(self.world.flat.sizes[d] for d in dims)

    def ar(self, x: Tensor, *dims: int, op: str = "sum") -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, op, self.world.name(*dims)))

    def ag(self, x: Tensor, *dims: int, dim: int = 0) -> Tensor:
        n = self.size(dims)
        y = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), n, self.world.name(*dims)))
        return torch.cat(y.chunk(n), dim) if dim else y

    def rs(self, x: Tensor, *dims: int, dim: int = 0, op: str = "sum") -> Tensor:
        n = self.size(dims)
        x = torch.cat(x.chunk(n, dim)) if dim else x.contiguous()
        return functional.wait_tensor(functional.reduce_scatter_tensor(x, op, n, self.world.name(*dims)))

    def a2a(self, x: Tensor, *dims: int, gather_dim: int = 0, scatter_dim: int = 0) -> Tensor:
        n = self.size(dims)
        x = torch.cat(x.chunk(n, scatter_dim)) if scatter_dim else x.contiguous()
        splits = [x.shape[0] // n] * n
        y = functional.wait_tensor(functional.all_to_all_single(x, splits, splits, self.world.name(*dims)))
        return torch.cat(y.chunk(n), gather_dim) if gather_dim else y


def random_steps(rng: random.Random, world: World) -> tuple[list[Any], tuple[int, ...]]:
    """Steps that mostly go over each dim once, and mostly sum: others rarely merge."""
    groups = [group.dims for group in world.flat.groups if len(group.dims) < 3]
    dims = [(d,) for d, size in enumerate(world.flat.sizes) if size > 1]
    rng.shuffle(dims)
    if rng.random() < 0.3:
        dims = [rng.choice(groups) for _ in range(4)]
    ops = rng.choice([["sum"], ["sum", "avg"], ["max"], ["sum", "avg", "max"]])
    likely = [AR, RS, AG, A2A, *[rng.choice([AR, RS, AG, A2A])] * 8]
    steps: list[Any] = []
    for each in dims:
        steps.append((rng.choice(likely), each, rng.randrange(3), rng.randrange(3), rng.choice(ops)))
        steps.append(rng.choice(["transpose", "regroup", "regroup", *["none"] * 4, "keep"]))
    return steps, (rng.choice([12, 24]), 12, rng.choice([2, 4, 6]))


def run_steps(calls: Calls, steps: list[Any], x: Tensor) -> Any:
    kept = []
    for step in steps:
        if step == "transpose":
            x = x.transpose(0, 1)
        elif step == "regroup" and x.shape[2] % 2 == 0:
            x = x.reshape(x.shape[0] * 2, x.shape[1], -1)
        elif step == "keep":
            kept.append(x)
        elif not isinstance(step, str):
            kind, dims, a, b, op = step
            if kind in (RS, A2A) and x.shape[a] % calls.size(dims):
                continue
            if kind == AG and x.numel() * calls.size(dims) > 1 << 15:
                continue
            call: Any = {
                AR: lambda x, d=dims, op=op: calls.ar(x, *d, op=op),
                RS: lambda x, d=dims, a=a, op=op: calls.rs(x, *d, dim=a, op=op),
                AG: lambda x, d=dims, a=a: calls.ag(x, *d, dim=a),
                A2A: lambda x, d=dims, a=a, b=b: calls.a2a(x, *d, scatter_dim=a, gather_dim=b),
            }[kind]
            x = call(x)
    return (x, *kept)
