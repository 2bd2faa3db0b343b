"""Programs as users write them, compiled unchanged: what is fused, values and strides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.block_checks import interpreted
from tests.helpers.fragments import FRAGMENTS, Fragment
from tests.helpers.graphs import check_fragment
from tests.helpers.tiers import nightly_but, thorough_but

QUICK = [  # each op, and each way in which programs say what is sent
    "all-reduce-in-place",
    "deepspeed-before-attention",
    "dtensor-tensor-parallel",
    "dynamic-batch",
    "gather-for-several-linears",
    "gathered-k",
    "shard-dim-alltoall-before",
    "megatron-row-parallel",
    "scattered-columns",
]


@pytest.mark.parametrize("fragment", thorough_but([f for f in FRAGMENTS if f.name in QUICK], FRAGMENTS), ids=str)
def test_graphs_and_values(ranks: Any, fragment: Fragment) -> None:
    """Inductor's graphs are run op by op: its code takes long to compile."""
    ranks(2).run(check_fragment, fragment.name, interpreted)


@pytest.mark.parametrize("name", nightly_but(["start-program"], [fragment.name for fragment in FRAGMENTS]))
def test_code_of_inductor(ranks: Any, name: str) -> None:
    ranks(2).run(check_fragment, name, "inductor")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dtensor-sequence-parallel", "q-k-v-linears-of-grouped-query-attention"])
def test_four_ranks(ranks: Any, name: str) -> None:
    ranks(4).run(check_fragment, name, interpreted)


def check_decomposed(rank: int, name: str) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    counters.clear()
    with config.patch(decompose_shard_dim_alltoall=True):
        check_fragment(rank, name, interpreted)
    assert counters["inductor"]["decompose_shard_dim_alltoall"] == 1


@pytest.mark.parametrize("name", ["shard-dim-alltoall", "shard-dim-alltoall-before"])
def test_shard_dim_alltoall_decomposed_by_inductor(ranks: Any, name: str) -> None:
    from torch._inductor import config

    if not hasattr(config, "decompose_shard_dim_alltoall"):
        pytest.skip("an option of torch 2.14")
    ranks(2).run(check_decomposed, name)
