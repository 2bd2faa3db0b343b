"""Programs as users write them, compiled unchanged: what is fused, values and strides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.fragments import FRAGMENTS, Fragment
from tests.helpers.graphs import check_fragment
from tests.helpers.tiers import thorough_but

QUICK = [  # each op, and each way in which programs say what is sent
    "all-reduce-in-place",
    "deepspeed-after-attention",
    "deepspeed-before-attention",
    "dtensor-tensor-parallel",
    "dynamic-batch",
    "gathered-k",
    "megatron-column-parallel",
    "megatron-row-parallel",
    "scattered-columns",
    "start-program",
]
ON_FOUR_RANKS = ["dtensor-sequence-parallel", "q-k-v-linears-for-inference"]


@pytest.mark.parametrize("fragment", thorough_but([f for f in FRAGMENTS if f.name in QUICK], FRAGMENTS), ids=str)
def test_on_two_ranks(ranks: Any, fragment: Fragment) -> None:
    ranks(2).run(check_fragment, fragment.name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ON_FOUR_RANKS)
def test_on_four_ranks(ranks: Any, name: str) -> None:
    ranks(4).run(check_fragment, name)


@pytest.mark.nightly
@pytest.mark.parametrize("fragment", [f for f in FRAGMENTS if f.name not in ON_FOUR_RANKS], ids=str)
def test_the_others_on_four_ranks(ranks: Any, fragment: Fragment) -> None:
    ranks(4).run(check_fragment, fragment.name)


def check_decomposed(rank: int, name: str) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    counters.clear()
    with config.patch(decompose_shard_dim_alltoall=True):
        check_fragment(rank, name)
    assert counters["inductor"]["decompose_shard_dim_alltoall"] == 1


@pytest.mark.parametrize("name", ["shard-dim-alltoall", "shard-dim-alltoall-before"])
def test_what_inductor_itself_makes_of_shard_dim_alltoall(ranks: Any, name: str) -> None:
    from torch._inductor import config

    if not hasattr(config, "decompose_shard_dim_alltoall"):
        pytest.skip("an option of torch 2.14")
    ranks(2).run(check_decomposed, name)
