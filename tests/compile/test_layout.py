"""Layouts against the elements themselves: chains of views, permutes and exchanges of a tensor of indices."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, quotient
from fusedcomm.compile.graph.rewrite import consecutive

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def reshapes(draw: Any, shape: list[int]) -> list[int]:
    primes = [p for p, n in sympy.factorint(math.prod(shape)).items() for _ in range(n)]
    dims = [1] * draw(st.integers(1, 5))
    for prime in draw(st.permutations(primes)):
        dims[draw(st.integers(0, len(dims) - 1))] *= prime
    return dims


def elements(order: list[Factor], first: list[Factor]) -> Tensor:
    """Indices into a tensor that has the factors in the order of ``first``, arranged in that of ``order``."""
    t = torch.arange(math.prod(f.size for f in first)).view([f.size for f in first] or [1])  # type: ignore[arg-type]
    return t.permute([first.index(f) for f in order]).flatten() if order else t


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_chain_of_views_and_permutes(data: Any) -> None:
    shape = data.draw(SHAPES)
    t, layout = torch.arange(math.prod(shape)).view(shape), Layout.of(shape)
    first = layout
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()):
            dims = data.draw(st.permutations(range(t.ndim)))
            t, layout = t.permute(dims), layout.permute(dims)
        else:
            new = data.draw(reshapes(list(t.shape)))
            try:
                layout = layout.reshape(new)
            except CannotFuse:
                return
            t = t.reshape(new)
        assert layout.shape == list(t.shape)
    assert elements(layout.order, first.order).equal(t.flatten())
    assert sorted(map(id, layout.order)) == sorted(map(id, first.order))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_runs_of_factors_are_as_long_as_can_be(data: Any) -> None:
    order = [Factor(2) for _ in range(data.draw(st.integers(1, 6)))]
    wanted = data.draw(st.permutations(order))
    runs = consecutive(order, wanted)
    assert [factor for run in runs for factor in run] == wanted
    position = {factor: i for i, factor in enumerate(order)}
    assert all(position[b] == position[a] + 1 for run in runs for a, b in pairwise(run))
    assert all(position[b[0]] != position[a[-1]] + 1 for a, b in pairwise(runs))


@pytest.mark.parametrize(
    ("shape", "new", "message"),
    [
        ([4, 6], [6, 4], "a dim of 6 ends inside a block of 4"),
        ([0, 6], [6, 0], "it has no elements"),
        ([4, 6], [4, 3], "its elements do not fill"),
    ],
)
def test_what_cannot_be_said_in_factors(shape: list[int], new: list[int], message: str) -> None:
    with pytest.raises(CannotFuse, match=message):
        Layout.of(shape).reshape(new)


def test_symbolic_sizes_divide_where_they_must() -> None:
    a, b = sympy.symbols("a b", integer=True, positive=True)
    assert quotient(6 * a * b, 2 * b) == 3 * a
    assert quotient(6 * a, 2 * a) == 3
    assert quotient(a, 2) is None and quotient(a, b) is None and quotient(5, 2) is None
