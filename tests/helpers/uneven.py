"""Calls whose ranks have parts of different sizes, and what they give, from all ranks' inputs in one process.

The oracle knows nothing of fusedcomm: it cuts by torch's own `tensor_split` and `narrow`, in float64.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.cut import Splits
from fusedcomm.plan.geometry.exchange import Exchange

Sizes = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Uneven:
    """One call. ``shape``: of the whole tensor next to the collective, that of all ranks together; its dims are counted
    as the op counts them. ``gather``: sizes by rank, or None for torch.chunk's; ``scatter``: likewise, or intervals.
    """

    op: str
    shape: Sizes
    num_columns: int = 1  # how many of its last dims make up N of a push, or K of a gather
    gather_dim: int | None = None
    scatter_dim: int | None = None
    gather: Sizes | None = None
    scatter: Sizes | Ranges | None = None
    bias: bool = False
    partial: bool = False  # the bias is a partial_bias, and rank 1 has none
    batched: bool = False
    other: int = 5  # K of a push, N of a gather
    dtype: torch.dtype = torch.float32

    @property
    def pushes(self) -> bool:
        return self.op in ("matmul_all_to_all", "matmul_reduce_scatter")

    def has_fewest_columns(self, num_ranks: int) -> bool:
        """Whether no fewer of the last dims make up K on a rank: all_to_all_matmul takes as few as do."""
        shapes = [list(self.shape) for _ in range(num_ranks)]
        if self.scatter_dim is not None:
            for shape, (_, size) in zip(shapes, self.intervals(num_ranks), strict=True):
                shape[self.scatter_dim] = size
        suffixes = [[math.prod(shape[-c:]) for c in range(1, self.num_columns + 1)] for shape in shapes]
        return self.op != "all_to_all_matmul" or all(each[-1] not in each[:-1] for each in suffixes)

    def gathered(self, num_ranks: int) -> list[int]:
        """The size at gather_dim of each rank."""
        assert self.gather_dim is not None
        return list(self.gather or chunk_sizes(self.shape[self.gather_dim], num_ranks))

    def intervals(self, num_ranks: int) -> list[tuple[int, int]]:
        assert self.scatter_dim is not None
        given = self.scatter or chunk_sizes(self.shape[self.scatter_dim], num_ranks)
        if isinstance(given[0], tuple):
            return list(given)  # type: ignore[arg-type]
        starts = [sum(given[:rank]) for rank in range(num_ranks)]  # type: ignore[arg-type]
        return list(zip(starts, given, strict=True))  # type: ignore[arg-type]

    def options(self, num_ranks: int) -> dict[str, Any]:
        """The arguments that say who has which part, as users write them."""
        found: dict[str, Any] = {}
        if self.gather_dim is not None:
            found["gather_dim"] = self.gather_dim
            if self.gather is None:
                found["gather_size"] = self.shape[self.gather_dim]
            else:
                found["gather_splits"] = list(self.gather)
        if self.scatter_dim is not None:
            found["scatter_dim"] = self.scatter_dim
            if self.scatter is not None:
                name = "scatter_ranges" if isinstance(self.scatter[0], tuple) else "scatter_splits"
                found[name] = list(self.scatter)
        return found

    def inputs(self, num_ranks: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Every rank's x, w and bias: small integers, whose sums are exact."""
        generator = torch.Generator().manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).to(self.dtype)

        found = []
        lead = len(self.shape) - self.num_columns
        for rank in range(num_ranks):
            local = list(self.shape)
            if self.gather_dim is not None:
                local[self.gather_dim] = self.gathered(num_ranks)[rank]
            if self.pushes:
                x_shape, k, n = [*local[:lead], self.other], self.other, math.prod(local[lead:])
                batch = x_shape[:-2]
            else:
                x_shape, n = local, self.other
                arrived = list(self.shape)
                if self.scatter_dim is not None:
                    arrived[self.scatter_dim] = self.intervals(num_ranks)[rank][1]
                k, batch = math.prod(arrived[lead:]), arrived[: lead - 1]
            w = integers(*(batch if self.batched else []), k, n)
            size = n
            if (
                self.op == "matmul_reduce_scatter"
                and not self.partial
                and self.scatter_dim in (-1, len(self.shape) - 1)
            ):
                size = self.intervals(num_ranks)[rank][1]
            found.append(
                (integers(*x_shape), w, integers(size) if self.bias and not (self.partial and rank == 1) else None)
            )
        return found

    def call(self, inputs: tuple[Tensor, Tensor, Tensor | None], group: Any, num_ranks: int, **more: Any) -> Tensor:
        x, w, bias = inputs
        options = self.arguments(dist.get_rank(group), num_ranks) | more
        options["partial_bias" if self.partial else "bias"] = bias
        return getattr(fusedcomm, self.op)(x, w, group=group, **options)  # type: ignore[no-any-return]

    def splits(self, rank: int, num_ranks: int) -> Splits:
        """The arguments that say who has which part, as the ops' schemas have them."""
        size = None if self.gather_dim is None or self.gather is not None else self.shape[self.gather_dim]
        if self.scatter is None:
            return Splits(self.gather, size, rank=rank)
        starts, lengths = zip(*self.intervals(num_ranks), strict=True)
        return Splits(self.gather, size, starts, lengths, rank)

    def exchange(self, x: Tensor, w: Tensor, rank: int, num_ranks: int) -> Exchange:
        splits = self.splits(rank, num_ranks)
        if self.op == "matmul_all_to_all":
            columns = self._columns(rank, num_ranks)
            dims = self._dim(self.gather_dim), self._dim(self.scatter_dim)
            return shapes.matmul_all_to_all(x.shape, w.shape, columns, *dims, num_ranks, splits)
        if self.op == "all_to_all_matmul":
            dims = self._dim(self.gather_dim), self._dim(self.scatter_dim)
            return shapes.all_to_all_matmul(x.shape, w.shape, *dims, num_ranks, splits)
        if self.op == "all_gather_matmul":
            return shapes.all_gather_matmul(x.shape, [w.shape], self._dim(self.gather_dim), num_ranks, splits)
        return shapes.matmul_reduce_scatter(x.shape, w.shape, "sum", self._dim(self.scatter_dim), num_ranks, splits)

    def explain(self, rank: int, group: Any, num_ranks: int) -> fusedcomm.Plan:
        x, w, bias = self.inputs(num_ranks)[rank]
        return fusedcomm.explain(self.op, x, w, group=group, bias=bias, **self.arguments(rank, num_ranks))

    def arguments(self, rank: int, num_ranks: int) -> dict[str, Any]:
        options = self.options(num_ranks)
        if self.op == "matmul_all_to_all" and self.num_columns > 1:
            options["out_shape"] = self._columns(rank, num_ranks)
        return options

    def expected(self, inputs: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        """Every rank's result, differentiable."""
        num_ranks = len(inputs)
        if self.pushes:
            with_bias = self.partial or self.op == "matmul_all_to_all"
            ys = [self._matmul(x, w, bias if with_bias else None) for x, w, bias in inputs]
            ys = [y.unflatten(-1, self._columns(rank, num_ranks)) for rank, y in enumerate(ys)]
            if self.op == "matmul_all_to_all":
                return self._exchanged(ys)
            total = torch.stack(ys).sum(0)
            parts = [total.narrow(self._dim(self.scatter_dim), *each) for each in self.intervals(num_ranks)]
            return [
                part if self.partial or bias is None else part + bias
                for part, (_, _, bias) in zip(parts, inputs, strict=True)
            ]
        lead = len(self.shape) - self.num_columns
        arrived = self.arrived(inputs)
        return [self._matmul(a.flatten(lead), w, bias) for a, (_, w, bias) in zip(arrived, inputs, strict=True)]

    def arrived(self, inputs: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        """What a gather has put together, on every rank; of a push, anything."""
        xs = [x for x, _, _ in inputs]
        if self.pushes or self.scatter_dim is not None:
            return xs if self.pushes else self._exchanged(xs)
        return [torch.cat(xs, self._dim(self.gather_dim))] * len(xs)

    def _exchanged(self, ts: Sequence[Tensor]) -> list[Tensor]:
        gather_dim, scatter_dim = self._dim(self.gather_dim), self._dim(self.scatter_dim)
        return [
            torch.cat([t.narrow(scatter_dim, start, size) for t in ts], gather_dim)
            for start, size in self.intervals(len(ts))
        ]

    @staticmethod
    def _matmul(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.matmul(x, w)
        return y if bias is None else y + bias

    def _columns(self, rank: int, num_ranks: int) -> list[int]:
        """The sizes that view y's last dim, on a rank."""
        columns = list(self.shape[len(self.shape) - self.num_columns :])
        if self.gather_dim is not None and (at := self._dim(self.gather_dim) - len(self.shape)) >= -self.num_columns:
            columns[at] = self.gathered(num_ranks)[rank]
        return columns

    def _dim(self, dim: int | None) -> int:
        assert dim is not None
        return dim % len(self.shape)


def draw(random: Random, num_ranks: int) -> Uneven:
    """A random call, whose dims may be empty and whose intervals may overlap or leave gaps."""
    op = random.choice(["matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter"])
    ndim = random.choice([2, 3, 3, 4])
    shape = [random.choice([1, 2, 3]) for _ in range(ndim)]
    batched = ndim > 2 and random.random() < 0.3
    num_columns = 1 if batched or op in ("all_gather_matmul", "matmul_reduce_scatter") else random.randint(1, ndim - 1)
    gather_dim, scatter_dim = random.sample(range(ndim), 2)
    for dim in (gather_dim, scatter_dim):
        shape[dim] = random.choice([0, 1, 2, num_ranks, 7, 2 * num_ranks + 1, 130, 300])
    sizes = random_sizes(random, shape[gather_dim], num_ranks)
    intervals = [_interval(random, shape[scatter_dim]) for _ in range(num_ranks)]
    gather = random.choice([None, sizes])
    scatter = random.choice([None, random_sizes(random, shape[scatter_dim], num_ranks), tuple(intervals)])
    drawn = Uneven(
        op,
        tuple(shape),
        num_columns,
        gather_dim=None if op == "matmul_reduce_scatter" else gather_dim,
        scatter_dim=None if op == "all_gather_matmul" else scatter_dim,
        gather=gather,
        scatter=scatter,
        bias=random.random() < 0.3,
        batched=batched,
        other=random.choice([1, 5, 8]),
    )
    return drawn if drawn.has_fewest_columns(num_ranks) else draw(random, num_ranks)


def random_sizes(random: Random, total: int, num_ranks: int) -> Sizes:
    cuts = [0, *sorted(random.randint(0, total) for _ in range(num_ranks - 1)), total]
    return tuple(end - start for start, end in itertools.pairwise(cuts))


def _interval(random: Random, total: int) -> tuple[int, int]:
    start = random.randint(0, total)
    return start, random.randint(0, total - start)


def chunk_sizes(total: int, num_ranks: int) -> list[int]:
    """What torch.chunk gives each rank, with zeros for those that it gives nothing."""
    sizes = [each.numel() for each in torch.empty(total).chunk(num_ranks)] if total else []
    return sizes + [0] * (num_ranks - len(sizes))
