"""The order of elements along a chain of views and permutes: dims of every tensor as products of shared factors.

A reshape regroups factors, and splits one where a dim ends inside it; a permute moves dims; an exchange replaces the
factor of the blocks by a factor of the sources. Two tensors of a chain have the same elements in the same order exactly
if they have the same factors in the same order, for any operations between them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch

ASSUMED_SIZE = 4096  # stands for each symbol
Size: TypeAlias = "int | sympy.Expr"


class CannotFuse(Exception):
    """Why something is left as it is, in words for the user."""


def refuse(condition: object, reason: str) -> None:
    if condition:
        raise CannotFuse(reason)


class Factor:
    """A factor of a dim's size; once split, its parts replace it everywhere."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.parts: tuple[Factor, ...] = ()

    def leaves(self) -> list[Factor]:
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]

    def split(self, outer: Size) -> tuple[Factor, Factor]:
        inner = quotient(self.size, outer)
        assert inner is not None and not self.parts
        self.parts = (Factor(outer), Factor(inner))
        return self.parts[0], self.parts[1]


@dataclass(frozen=True)
class Layout:
    """The factors of each dim, the outermost first. A dim of size 1 has none."""

    _dims: tuple[tuple[Factor, ...], ...]

    @staticmethod
    def of(shape: Sequence[int | torch.SymInt]) -> Layout:
        sizes = [size_of(s) for s in shape]
        refuse(0 in sizes, "it has no elements")
        return Layout(tuple(() if size == 1 else (Factor(size),) for size in sizes))

    @property
    def dims(self) -> tuple[tuple[Factor, ...], ...]:
        return tuple(tuple(leaf for factor in dim for leaf in factor.leaves()) for dim in self._dims)

    @property
    def order(self) -> list[Factor]:
        return [factor for dim in self.dims for factor in dim]

    @property
    def shape(self) -> list[Size]:
        return [product(f.size for f in dim) for dim in self.dims]

    def reshape(self, shape: Sequence[int | torch.SymInt]) -> Layout:
        left, sizes = self.order, [size_of(size) for size in shape]
        first: list[tuple[Factor, ...]] = []
        last: list[tuple[Factor, ...]] = []
        try:
            while sizes:
                dim, left = take(left, sizes[0])
                first.append(tuple(dim))
                sizes.pop(0)
        except CannotFuse:
            while sizes and left and left[-1].size == sizes[-1]:
                last.insert(0, (left.pop(),))
                sizes.pop()
            if len(left) != 1 or any(isinstance(size, int) and size == 0 for size in sizes):
                raise
            # symbols hide that one factor is the product of these sizes, but the reshape was possible
            left[0].parts = tuple(Factor(size) for size in sizes)
            first += [(part,) for part in left[0].parts]
            left = []
        refuse(left, f"its elements do not fill {list(shape)}")
        return Layout((*first, *last))

    def permute(self, dims: Iterable[int]) -> Layout:
        return Layout(tuple(self._dims[d] for d in dims))

    def leading(self, dim: int, size: Size, inner: Size | None = None) -> Factor:
        """The factor that cuts ``dim`` into ``size`` blocks, whose size may be known to be ``inner``."""
        if inner is not None and len(self.dims[dim]) == 1 and quotient(self.dims[dim][0].size, size) is None:
            self.dims[dim][0].parts = Factor(size), Factor(inner)  # symbols hide that it is their product
        (factor, *more), _ = take(list(self.dims[dim]), size)
        refuse(more, f"the {size} blocks of dim {dim} are not one part of any dim")
        return factor

    def without(self, factor: Factor) -> Layout:
        return Layout(tuple(tuple(f for f in dim if f is not factor) for dim in self.dims))

    def insert(self, dim: int, factor: Factor) -> Layout:
        """The layout with ``factor`` as the outermost one of ``dim``."""
        return Layout(tuple((factor, *fs) if d == dim else fs for d, fs in enumerate(self.dims)))

    def new_dim(self, dim: int, factor: Factor) -> Layout:
        return Layout((*self.dims[:dim], (factor,), *self.dims[dim:]))


def take(factors: list[Factor], size: Size) -> tuple[list[Factor], list[Factor]]:
    """Split factors into (leading ones with product ``size``, the rest); splits a factor on the border."""
    taken: list[Factor] = []
    while size != 1:
        refuse(not factors, f"its elements do not fill a dim of {size}")
        factor, *rest = factors
        if (left := quotient(size, factor.size)) is not None:
            taken, factors, size = [*taken, factor], rest, left
        elif quotient(factor.size, size) is not None:
            outer, inner = factor.split(size)
            return [*taken, outer], [inner, *rest]
        else:
            raise CannotFuse(f"a dim of {size} ends inside a block of {factor.size}")
    return taken, factors


def size_of(size: int | torch.SymInt) -> Size:
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        return int(expr) if expr.is_Integer else expr
    return size


def product(sizes: Iterable[Size]) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def quotient(a: Size, b: Size) -> Size | None:
    """a / b if that is an integer for all values of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.sympify(a) / b
    if ratio.has(sympy.Add):  # 16 (s + t) / (s + t)
        ratio = sympy.cancel(ratio)
    if ratio.is_Integer:
        return int(ratio)
    return ratio if ratio.is_integer else None


def hint(size: int | torch.SymInt) -> int:
    """The traced value of a symbolic size; 1 if unknown."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return size


def assumed(size: int | torch.SymInt) -> int:
    """A size to plan with, equal on all ranks for any traced sizes."""
    return size if isinstance(size, int) else _assumed(sympy.sympify(size_of(size)))


@functools.cache
def _assumed(size: sympy.Expr) -> int:
    value = size.subs(dict.fromkeys(size.free_symbols, ASSUMED_SIZE))
    return max(1, int(value)) if value.is_number else 1
