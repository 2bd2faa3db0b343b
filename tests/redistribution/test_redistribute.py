"""fusedcomm.redistribute on real ranks: values, gradients, dtypes, async, compiled and fallbacks.

What each rank must hold afterwards torch.chunk cuts from the whole tensor.
"""

import contextlib
import gc
import math
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import fusedcomm
import fusedcomm.compile
from fusedcomm.launch.ranks import RankPool
from tests.helpers.block_checks import interpreted
from tests.helpers.merge_world import fake_ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched, logged

Ranks = Callable[[int], RankPool]

R, S0, S1 = Replicate(), Shard(0), Shard(1)
P = Partial()


Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Case:
    seed: int
    mesh_shape: tuple[int, ...]
    shape: tuple[int, ...]
    before: Placements
    after: Placements
    dtype: torch.dtype = torch.float32

    def held(self, coordinate: Sequence[int]) -> Tensor:
        """The shards that the rank at a coordinate holds before: of its part of the reduction."""
        parts = self._parts()
        for i in self._partial_dims():
            parts = parts[coordinate[i]]
        return shards(parts, self.mesh_shape, coordinate, self.before)

    def wanted(self, coordinate: Sequence[int]) -> Tensor:
        kept = [i for i in self._partial_dims() if self.after[i].is_partial()]
        parts = self._parts()
        for position, i in reversed(list(enumerate(self._partial_dims()))):
            if i in kept:
                parts = parts.select(position, coordinate[i])
            else:
                parts = reduced(parts, position, str(getattr(self.before[i], "reduce_op")))  # noqa: B009
        return shards(parts, self.mesh_shape, coordinate, self.after)

    def _partial_dims(self) -> list[int]:
        return [i for i, placement in enumerate(self.before) if placement.is_partial()]

    def _parts(self) -> Tensor:
        """Small integers, [size of each partial mesh dim, *shape]. Averages are such that no division rounds."""
        sizes = [self.mesh_shape[i] for i in self._partial_dims()]
        generator = torch.Generator().manual_seed(self.seed)
        parts = torch.randint(-2, 3, (*sizes, *self.shape), generator=generator)
        averaged = [self.mesh_shape[i] for i in self._partial_dims() if self.before[i] == Partial("avg")]
        return (parts * math.prod(averaged)).to(self.dtype)


def reduced(parts: Tensor, dim: int, op: str) -> Tensor:
    if op in ("sum", "avg"):
        total = parts.sum(dim, dtype=torch.float64 if parts.is_floating_point() else None)
        return (total / parts.shape[dim] if op == "avg" else total).to(parts.dtype)
    return {"max": parts.amax, "min": parts.amin, "product": parts.prod}[op](dim)


def shards(whole: Tensor, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Placements) -> Tensor:
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Shard):
            chunks = torch.chunk(whole, size, placement.dim) if whole.shape[placement.dim] else ()
            whole = chunks[index] if index < len(chunks) else whole.narrow(placement.dim, 0, 0)
    return whole.contiguous()


def random_case(seed: int, mesh_shapes: Sequence[tuple[int, ...]]) -> Case:
    rng = random.Random(seed)
    mesh_shape = rng.choice(mesh_shapes)
    ndim = rng.choice((0, 1, 2, 2, 3, 3, 4))
    shape = tuple(rng.choice((0, 1, 2, 3, 4, 5, 8, 9, 12)) for _ in range(ndim))
    ops = rng.choice((["sum"], ["avg"], ["sum", "avg"], ["max"], ["min"], ["product"]))
    cut: list[Placement] = [Shard(dim) for dim in range(ndim)]
    before, after = [], []
    for _ in mesh_shape:
        before.append(rng.choice([Replicate(), *cut, *cut, Partial(rng.choice(ops))]))
        choices = [Replicate(), *cut, *cut]
        if before[-1].is_partial():
            choices.append(before[-1])
        after.append(rng.choice(choices))
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float64)
    dtype = rng.choice(dtypes if "avg" in ops else (*dtypes, torch.int64))
    return Case(seed, mesh_shape, shape, tuple(before), tuple(after), dtype)


def mesh_of(shape: tuple[int, ...], *, named: bool = False) -> DeviceMesh:
    """One mesh per shape and process, so that not every test makes groups again."""
    key = (shape, named)
    if key not in _meshes:
        names = tuple(f"dim{i}" for i in range(len(shape))) if named else None
        ranks = torch.arange(math.prod(shape)).reshape(shape)
        _meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=names)
    return _meshes[key]


_meshes: dict[tuple[tuple[int, ...], bool], DeviceMesh] = {}


def held(case: Case, mesh: DeviceMesh) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = case.held(coordinate)
    stride = torch.empty(case.shape, device="meta").stride()
    return DTensor.from_local(local, mesh, case.before, run_check=False, shape=torch.Size(case.shape), stride=stride)


def check(x: DTensor, case: Case) -> None:
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None
    want, got = case.wanted(coordinate), x.to_local()
    assert x.placements == case.after and x.shape == torch.Size(case.shape), case
    assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(got, want), (case, got, want)
    assert x.stride() == torch.empty(case.shape, device="meta").stride()


def random_values(rank: int, seeds: range, mesh_shapes: list[tuple[int, ...]]) -> int:
    """How many cases communicated: with the collectives of the plan, whatever the order of the ranks."""
    sent, across = 0, DeviceMesh("cpu", [[0, 2], [1, 3]])
    for seed in seeds:
        case = random_case(seed, mesh_shapes)
        x = held(case, across if case.mesh_shape == (2, 2) and seed % 2 else mesh_of(case.mesh_shape))
        before = x.to_local().clone()
        plan = fusedcomm.redistribute_plan(x, placements=case.after)
        with Dispatched() as ran:
            found = fusedcomm.redistribute(x, placements=case.after)
        assert len(ran.names("_c10d_functional")) == plan.num_collectives, case
        check(found, case)
        assert torch.equal(x.to_local(), before), case
        sent += plan.num_collectives > 0
    return sent


def test_random_cases_are_exact_on_real_ranks(ranks: Ranks) -> None:
    sent = ranks(4).run(random_values, range(150), [(4,), (2, 2), (2, 1, 2), (1, 2, 2)])
    assert len(set(sent)) == 1 and sent[0] > 80, sent


LAZY: dict[str, Callable[[Tensor], Tensor]] = {  # views of memory that holds other values
    "conjugate": lambda t: torch.complex(t, -2 * t).conj(),
    "negative": lambda t: torch._neg_view(-t),
    "imaginary part": lambda t: torch.complex(0 * t, -t).conj().imag,
}


@on_ranks(4)
@pytest.mark.parametrize("name", LAZY)
def test_lazy_conjugates_and_negatives(rank: int, name: str) -> None:
    """What is no memory yet is redistributed by plans and by torch, which alone knows the norm."""
    norm = _NormPartial(2)
    mesh, whole = mesh_of((2, 2, 1)), torch.arange(15.0).reshape(5, 3)
    for before, after in (([S0, R, R], [R, S1, R]), ([P, S0, R], [R, R, R]), ([S0, R, norm], [R, R, R])):
        placements = tuple(R if each == norm else each for each in before)
        case = Case(3, mesh.shape, (5, 3), placements, tuple(after))
        local = LAZY[name](case.held(mesh.get_coordinate()))
        assert local.is_conj() or local.is_neg()
        x = DTensor.from_local(local, mesh, before, run_check=False, shape=whole.shape, stride=whole.stride())
        y, want = fusedcomm.redistribute(x, placements=after).to_local(), case.wanted(mesh.get_coordinate())
        assert torch.equal(y, torch.complex(want, 2 * want) if y.is_complex() else want), (before, y, want)


@on_ranks(4)
def test_gradients_are_those_of_torch(rank: int) -> None:
    for seed in range(40):
        case = random_case(seed, [(2, 2), (4,), (1, 4)])
        if not case.dtype.is_floating_point:
            continue
        mesh, found = mesh_of(case.mesh_shape), []
        for function in (fusedcomm.redistribute, DTensor.redistribute):
            x = held(case, mesh).requires_grad_()  # in torch 2.15 detach() replicates a partial product
            y = function(x, mesh, case.after)
            weight = torch.arange(math.prod(case.shape), dtype=torch.float32).reshape(case.shape) % 5
            places = [R if placement.is_partial() else placement for placement in case.after]
            upstream = distribute_tensor(weight.to(case.dtype), mesh, places, src_data_rank=None)
            try:
                y.backward(upstream)
            except (RuntimeError, AssertionError):
                if function is fusedcomm.redistribute:
                    raise
                continue  # what torch cannot
            assert x.grad is not None
            found.append((x.grad.placements, x.grad.to_local()))  # type: ignore[attr-defined]
        if len(found) == 2:
            assert found[0][0] == found[1][0], (case, found)
            assert torch.equal(found[0][1], found[1][1]), (case, found)


@on_ranks(2)
def test_a_gradient_that_is_a_partial_product_is_accumulated(rank: int) -> None:
    mesh, product = mesh_of((2,)), [Partial("product")]
    for placements, total in ((product, 2), ([Shard(0)], 4)):  # torch has no sum of partial products
        x, grad = (
            DTensor.from_local(torch.full((3,), value), mesh, placements, run_check=False) for value in (1.0, 2.0)
        )
        for _ in range(total // 2):
            fusedcomm.redistribute(x.requires_grad_(), mesh, placements).backward(grad)
        assert x.grad.placements == tuple(placements) and (x.grad.to_local() == total).all()  # type: ignore[union-attr]
        assert (grad.to_local() == 2).all()


@on_ranks(4)
def test_it_is_twice_differentiable(rank: int) -> None:
    mesh = mesh_of((2, 2))
    x = distribute_tensor(torch.arange(20.0).reshape(5, 4), mesh, [S0, S1]).requires_grad_()
    y = fusedcomm.redistribute(x, mesh, [S1, R])
    (first,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first * first).sum(), x)
    assert torch.equal(second.full_tensor(), 36 * torch.arange(20.0).reshape(5, 4) ** 3)  # type: ignore[attr-defined]


@on_ranks(4)
def test_dtypes_of_what_is_sent(rank: int) -> None:
    mesh = mesh_of((2, 2))
    for forward, backward in ((torch.bfloat16, None), (None, torch.bfloat16), (torch.float64, torch.bfloat16)):
        found = []
        for function in (fusedcomm.redistribute, DTensor.redistribute):
            x = distribute_tensor(torch.linspace(0, 1, 24).reshape(4, 6), mesh, [S0, S1]).requires_grad_()
            y = function(x, mesh, [R, S0], forward_dtype=forward, backward_dtype=backward)
            (y * y).sum().backward()
            assert x.grad is not None and x.grad.dtype == torch.float32 and y.dtype == (forward or torch.float32)
            found.append((y.full_tensor(), x.grad.full_tensor()))  # type: ignore[attr-defined]
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def asynchronous(rank: int) -> list[str]:
    mesh = mesh_of((2, 2))
    kinds = []
    for before, after in (((P, P), (R, R)), ((S0, S0), (R, R)), ((P, P), (S0, S0)), ((S1, S1), (R, R))):
        case = Case(7, (2, 2), (8, 4), before, after)
        y = fusedcomm.redistribute(held(case, mesh), placements=after, async_op=True)
        kinds.append(type(y._local_tensor).__name__)
        check(y, case)
        check(fusedcomm.redistribute(y, placements=after), case)
    return kinds


def test_async_leaves_the_last_wait_to_the_reader(ranks: Ranks) -> None:
    for kinds in ranks(4).run(asynchronous):
        assert kinds == ["AsyncCollectiveTensor"] * 3 + ["Tensor"], kinds  # the last is rearranged


def program(x: DTensor, w: DTensor) -> DTensor:
    y = fusedcomm.redistribute(x * 2, placements=[R, R])
    return fusedcomm.redistribute(y @ w, x.device_mesh, (S1, S1))


def test_what_torch_compile_calls_makes_all_groups_that_a_backward_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """It also tells meshes, sources and versions apart."""
    from fusedcomm import files
    from fusedcomm.redistribution import dtensor, mesh_groups

    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 1, 4))
        first = dtensor.version(mesh)
        monkeypatch.setattr(mesh_groups, "_make", None)  # none is left to be made
        for mesh_dims in ((0,), (2,), (0, 2)):
            assert mesh_groups.flattened(mesh, mesh_dims).pg.size() == math.prod(mesh.shape[i] for i in mesh_dims)
        assert dtensor.version(mesh) == first != dtensor.version(init_device_mesh("cpu", (8,)))
        monkeypatch.setattr(files, "_sources_digest", lambda: "other sources")
        assert dtensor.version(mesh) != first


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Compile without a cache, because a graph of an earlier run has its groups' names."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        yield


def trained(run: Callable[..., DTensor], shape: tuple[int, int]) -> list[Tensor]:
    whole, mesh = torch.arange(float(math.prod(shape))).reshape(shape) % 7, mesh_of((2, 2))
    x = distribute_tensor(whole, mesh, [S0, S0]).requires_grad_()
    w = distribute_tensor(torch.ones(shape[1], 8), mesh, [R, R]).requires_grad_()
    y = run(x, w)
    (y * y).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [t.full_tensor() for t in (y, x.grad, w.grad)]  # type: ignore[attr-defined]


def compiled(rank: int, shape: tuple[int, int]) -> tuple[int, list[str]]:
    """The collectives of the eager program, forward and backward, and those in the graphs of the compiled one."""
    torch._dynamo.reset()
    with Dispatched() as ran:
        eager = trained(program, shape)
    with uncached(), fusedcomm.compile.enabled(fuse=()) as report:
        graph = trained(torch.compile(program, fullgraph=True, backend=interpreted), shape)
    assert all(torch.equal(a, b) for a, b in zip(eager, graph, strict=True))
    assert all(Path(line.source.rpartition(":")[0]).name == Path(__file__).name for line in report.collectives[:1])
    return len(ran.names("_c10d_functional")), [line.graph for line in report.collectives]


@pytest.mark.parametrize("shape", [(8, 4), pytest.param((5, 3), marks=pytest.mark.thorough)])
def test_it_compiles_into_one_graph_with_the_collectives_of_the_plan(ranks: Ranks, shape: tuple[int, int]) -> None:
    for eager, graphs in ranks(4).run(compiled, shape):
        assert graphs == ["forward", "backward"] and eager > 0, (eager, graphs)


@on_ranks(4)
def test_strided_shards_are_an_order_of_the_mesh_dims(rank: int) -> None:
    """This is what FSDP makes of tensor-parallel weights, which the second mesh dim cuts first."""
    mesh = mesh_of((2, 2))
    whole = torch.arange(32.0).reshape(8, 4)
    x = DTensor.from_local(
        torch.chunk(torch.chunk(whole, 2)[rank % 2], 2)[rank // 2], mesh, [_StridedShard(0, split_factor=2), S0],
        run_check=False, shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    for after in ([R, R], [S0, S0], [S1, R], [_StridedShard(1, split_factor=2), S1]):
        plan = fusedcomm.redistribute_plan(x, placements=after)
        y = fusedcomm.redistribute(x, placements=after)
        back = fusedcomm.redistribute(y, placements=x.placements)
        assert plan.num_collectives == 1 and torch.equal(back.to_local(), x.to_local())
        if after == [S0, S0]:
            assert torch.equal(y.to_local(), torch.chunk(whole, 4)[rank])
        if after == [R, R]:
            assert torch.equal(y.to_local(), whole)


def by_torch(rank: int) -> list[str]:
    """What is left to torch has its values, and the log has the reasons."""
    mesh = mesh_of((2, 2))
    with logged() as texts:
        whole = torch.arange(8).reshape(4, 2)
        bits = DTensor.from_local(whole << rank, mesh, [Partial("bor"), Partial("bor")], run_check=False)
        for _ in range(2):
            y = fusedcomm.redistribute(bits, placements=[R, R])
            assert torch.equal(y.to_local(), whole | whole << 1 | whole << 2 | whole << 3)
        whole = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [R, R])
        uneven = whole.redistribute(placements=[_StridedShard(0, split_factor=2), S0])
        theirs = uneven.redistribute(placements=[R, R]).to_local()
        assert torch.equal(fusedcomm.redistribute(uneven, placements=[R, R]).to_local(), theirs)
        permuted = DeviceMesh("cpu", [[0, 1], [3, 2]])
        down = distribute_tensor(torch.arange(8.0), permuted, [R, S0])
        assert torch.equal(fusedcomm.redistribute(down, placements=[R, R]).to_local(), torch.arange(8.0))
    return texts


@on_ranks(4)
def test_classes_of_placements_that_only_torch_knows(rank: int) -> None:
    """torch's partial norm is tried as a gradient, as what is given, as what stays, and compiled."""
    mesh, norm = mesh_of((2, 2)), _NormPartial(2)
    x = distribute_tensor(torch.ones(()), mesh, [R, R]).requires_grad_()
    z = distribute_tensor(torch.arange(1.0, 9.0), mesh, [S0, S0])
    y = fusedcomm.redistribute(x, placements=[R, R]) * 2
    y.backward(torch.linalg.vector_norm(z))
    assert x.grad is not None
    torch.testing.assert_close(x.grad.to_local(), 2 * torch.arange(1.0, 9.0).norm())  # type: ignore[attr-defined]

    flat = mesh_of((2, 2, 1), named=True)
    flat["dim0", "dim1"]._flatten("flat")
    whole = torch.arange(15.0).reshape(5, 3)
    local = distribute_tensor(whole, flat, [S0, S0, R]).to_local()
    rows = DTensor.from_local(local, flat, [S0, S0, norm], run_check=False, shape=whole.shape, stride=whole.stride())
    assert torch.equal(fusedcomm.redistribute(rows, placements=[R, R, R]).to_local(), whole)
    assert fusedcomm.redistribute(rows, placements=[R, R, norm]).placements == (R, R, norm)

    parts = DTensor.from_local(torch.ones(2) * rank, mesh, [norm, norm], run_check=False)
    with uncached():
        for run in (fusedcomm.redistribute, torch.compile(fusedcomm.redistribute, fullgraph=True, backend=interpreted)):
            torch.testing.assert_close(run(parts, placements=[R, R]).to_local(), torch.full((2,), 14**0.5))


ALIASES: dict[str, tuple[list[Any], list[Any]]] = {
    "a mesh dim of size 1": ([S0, S0], [R, S0]),
    "nothing changes": ([R, S0], [R, S0]),
    "a partial sum of one": ([P, S0], [R, S0]),
    "only torch knows it": ([_NormPartial(2), S0], [R, S0]),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ALIASES)
def test_the_result_has_memory_of_its_own(rank: int, name: str) -> None:
    """Autograd takes it for granted: here the result is overwritten before x * x is differentiated."""
    before, after = ALIASES[name]
    mesh = mesh_of((1, 2))
    local = torch.ones(2, 2, requires_grad=True)
    x = DTensor.from_local(local, mesh, before, run_check=False)
    square = local * local
    y = fusedcomm.redistribute(x, placements=after)
    assert y.placements == tuple(after) and torch.equal(y.to_local(), local)
    with torch.no_grad():
        y.mul_(10)
    assert torch.equal(x.to_local(), torch.ones(2, 2))
    square.sum().backward()
    assert torch.equal(local.grad, torch.full((2, 2), 2.0))  # type: ignore[arg-type]


def alone(rank: int) -> bool:
    """Rank 0 by itself, on a mesh that no call has seen."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    x = distribute_tensor(torch.arange(8.0), mesh, [S0, R])
    if rank == 0:
        assert torch.equal(fusedcomm.redistribute(x, placements=[S0, R]).to_local(), x.to_local())
    fusedcomm.redistribute(x, placements=[R, S0])
    gone = weakref.ref(mesh)
    del mesh, x
    gc.collect()
    return gone() is None


def test_nothing_to_do_is_no_collective_and_keeps_no_mesh_alive(ranks: Ranks) -> None:
    assert ranks(4).run(alone) == [True] * 4


def test_what_only_torch_knows_is_left_to_it_and_logged_once(ranks: Ranks) -> None:
    for texts in ranks(4).run(by_torch):
        wanted = ("the reduce op is not one of sum", "divides its tensor dim unevenly, got S(0, 2) of", "do not ascend")
        assert len(texts) == 3, texts
        for text, part in zip(texts, wanted, strict=True):
            assert part in text, texts
