"""Random calls, thousands of them: `make soak`. A short run of the same test is part of `make test`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.problems import Problem
from tests.test_matmul_all_to_all import DTYPES, check_values

SIZES = st.integers(0, 9) | st.sampled_from([15, 16, 17, 31, 33, 64, 65])


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    lead = [*draw(st.lists(st.integers(1, 4), max_size=2)), draw(SIZES)]
    columns = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    dims = st.integers(0, len(lead) + len(columns) - 1)
    gather_dim, scatter_dim = draw(st.tuples(dims, dims).filter(lambda pair: pair[0] != pair[1]))
    return Problem(
        "random",
        (*lead, draw(st.integers(1, 40))),
        math.prod(columns),
        gather_dim,
        scatter_dim,
        out_shape=tuple(columns),
        batched=draw(st.booleans()) and len(lead) > 1,
        bias=draw(st.booleans()),
        transposed=draw(st.booleans()),
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
    random_calls(ranks, 60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_calls(ranks: Any) -> None:
    random_calls(ranks, 5000)
