"""Random calls of all ops, thousands of them: `make soak`. A short run of the same test is part of `make test`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.groups import DTYPES, check_values
from tests.problems import GATHERS, OPS, Problem

SIZES = st.integers(0, 9) | st.sampled_from([15, 16, 17, 31, 33, 64, 65])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    op = draw(st.sampled_from(OPS))
    lead = [*draw(st.lists(st.integers(1, 4), max_size=2)), draw(SIZES)]
    columns = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3 if op == "matmul_all_to_all" else 1))
    num_ws = draw(st.integers(1, 3)) if op == "all_gather_matmul" else 1
    k_dims = draw(st.integers(1, 2)) if op == "all_to_all_matmul" else 1
    # one head alone would not be needed to make up K
    k = [draw(st.integers(2, 6)), draw(st.integers(1, 6))] if k_dims > 1 else [draw(st.integers(1, 40))]
    matmul = [*lead, *columns] if op in ("matmul_all_to_all", "matmul_reduce_scatter") else [*lead, *k]
    dims = st.integers(0, len(matmul) - 1)
    gather_dim, scatter_dim = draw(st.tuples(dims, dims).filter(lambda pair: pair[0] != pair[1]))
    return Problem(
        "random",
        (*lead, *k),
        tuple(math.prod(columns) + i for i in range(num_ws)) if num_ws > 1 else math.prod(columns),
        gather_dim if op in ("matmul_all_to_all", *GATHERS) else None,
        scatter_dim if op in ("matmul_all_to_all", "all_to_all_matmul", "matmul_reduce_scatter") else None,
        out_shape=tuple(columns) if op == "matmul_all_to_all" else None,
        batched=draw(st.booleans()) and len(lead) > 1,
        bias=draw(st.booleans()) if num_ws == 1 else tuple(draw(st.booleans()) for _ in range(num_ws)),
        transposed=draw(st.booleans()),
        op=op,
        k_dims=k_dims,
        reduce_op=draw(st.sampled_from(["sum", "avg"]))
        if op in ("matmul_reduce_scatter", "matmul_all_reduce")
        else "sum",
    )


def random_calls(ranks: Any, num_examples: int) -> None:
    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples < 100,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        problem=problems(),
        world_size=st.integers(2, 4),
        dtype=st.sampled_from(DTYPES),
        algorithm=st.sampled_from(["chunked", "fused"]),
    )
    def check(problem: Problem, world_size: int, dtype: Any, algorithm: str) -> None:
        ranks(world_size).run(check_values, problem, dtype, algorithm, 2)

    check()


def test_random_calls(ranks: Any) -> None:
    random_calls(ranks, 30)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_calls(ranks: Any) -> None:
    random_calls(ranks, 5000)
