"""Calls whose ranks have parts of different sizes, and what they give, from all ranks' inputs in one process.

The oracle knows nothing of fusedcomm: it cuts by torch's own `tensor_split` and `narrow`, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedcomm

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
    batched: bool = False
    other: int = 5  # K of a push, N of a gather
    dtype: torch.dtype = torch.float32

    @property
    def pushes(self) -> bool:
        return self.op in ("matmul_all_to_all", "matmul_reduce_scatter")

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
            if self.op == "matmul_reduce_scatter" and self.scatter_dim in (-1, len(self.shape) - 1):
                size = self.intervals(num_ranks)[rank][1]
            found.append((integers(*x_shape), w, integers(size) if self.bias else None))
        return found

    def call(self, inputs: tuple[Tensor, Tensor, Tensor | None], group: Any, num_ranks: int, **more: Any) -> Tensor:
        x, w, bias = inputs
        options = self._arguments(w, num_ranks) | more
        return getattr(fusedcomm, self.op)(x, w, group=group, bias=bias, **options)  # type: ignore[no-any-return]

    def explain(self, rank: int, group: Any, num_ranks: int) -> fusedcomm.Plan:
        x, w, bias = self.inputs(num_ranks)[rank]
        return fusedcomm.explain(self.op, x, w, group=group, bias=bias, **self._arguments(w, num_ranks))

    def _arguments(self, w: Tensor, num_ranks: int) -> dict[str, Any]:
        options = self.options(num_ranks)
        if self.op == "matmul_all_to_all" and self.num_columns > 1:
            options["out_shape"] = self._columns(w, num_ranks)
        return options

    def expected(self, inputs: Sequence[tuple[Tensor, Tensor, Tensor | None]]) -> list[Tensor]:
        """Every rank's result, differentiable."""
        num_ranks = len(inputs)
        if self.pushes:
            with_bias = self.op == "matmul_all_to_all"
            ys = [self._matmul(x, w, bias if with_bias else None) for x, w, bias in inputs]
            ys = [y.unflatten(-1, self._columns(w, num_ranks)) for y, (_, w, _) in zip(ys, inputs, strict=True)]
            if with_bias:
                return self._exchanged(ys)
            total = torch.stack(ys).sum(0)
            parts = [total.narrow(self._dim(self.scatter_dim), *each) for each in self.intervals(num_ranks)]
            return [part if bias is None else part + bias for part, (_, _, bias) in zip(parts, inputs, strict=True)]
        xs = [x for x, _, _ in inputs]
        if self.scatter_dim is None:
            arrived = [torch.cat(xs, self._dim(self.gather_dim))] * num_ranks
        else:
            arrived = self._exchanged(xs)
        lead = len(self.shape) - self.num_columns
        return [self._matmul(a.flatten(lead), w, bias) for a, (_, w, bias) in zip(arrived, inputs, strict=True)]

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

    def _columns(self, w: Tensor, num_ranks: int) -> list[int]:
        """The sizes that view y's last dim, on the rank of w."""
        columns = list(self.shape[len(self.shape) - self.num_columns :])
        if self.gather_dim is not None and (at := self._dim(self.gather_dim) - len(self.shape)) >= -self.num_columns:
            columns[at] = w.shape[-1] // math.prod(size for i, size in enumerate(columns) if i - len(columns) != at)
        return columns

    def _dim(self, dim: int | None) -> int:
        assert dim is not None
        return dim % len(self.shape)


def chunk_sizes(total: int, num_ranks: int) -> list[int]:
    """What torch.chunk gives each rank, with zeros for those that it gives nothing."""
    sizes = [each.numel() for each in torch.empty(total).chunk(num_ranks)] if total else []
    return sizes + [0] * (num_ranks - len(sizes))
