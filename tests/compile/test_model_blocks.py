"""Blocks of real models, compiled unchanged: what is fused, what is left, and every value on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.helpers.block_checks import Case, outcome
from tests.helpers.fragments import RECOMPUTED
from tests.helpers.model_blocks import Size
from tests.helpers.thorough import thorough_but


class Counts(NamedTuple):
    """One layer's, in one graph: the exchanges that are fused, by op, and the collectives that are left."""

    matmul_all_to_all: int = 0
    all_to_all_matmul: int = 0
    all_to_all_single: int = 0
    all_gather_into_tensor: int = 0
    reduce_scatter_tensor: int = 0
    all_reduce: int = 0


WANT = {  # forward, backward
    "wan": (Counts(1, 1, 2), Counts(1, 1, 2)),
    "wan_fused_qkv": (Counts(0, 1, 3), Counts(1, 0, 3)),
    "flux_single": (Counts(1, 0, 3), Counts(0, 1, 3)),
    "flux_double": (Counts(0, 0, 4), Counts(0, 0, 4)),
    "qwen_image": (Counts(0, 0, 4), Counts(0, 0, 4)),
    "ltx": (Counts(2, 2, 4), Counts(2, 2, 4)),
    "flux2": (Counts(0, 0, 4), Counts(0, 0, 4)),
    "deepspeed": (Counts(1, 1, 2), Counts(1, 1, 2)),
    "packed": (Counts(1, 1), Counts(1, 1)),
}
OTHERWISE = {  # where WANT does not hold
    ("flux_single", "dynamic"): (Counts(0, 0, 4), Counts(0, 0, 4)),
    ("ltx", "checkpointed"): (Counts(2, 2, 4), Counts(4, 3, 9)),  # the second attention needs the first one's output
}
QUICK = ["flux2", "flux_double", "wan"]
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}  # relative to the largest value
OPTIONS: dict[str, dict[str, Any]] = {
    "inference": {"inference": True},
    "two_layers": {"layers": 2},
    "checkpointed": {"checkpointed": True, "layers": 2},
    "dynamic": {"dynamic": True, "size": Size(batch=2)},
    "autocast": {"autocast": True},
    "bfloat16": {"bfloat16": True},
    "whole_tables": {"whole_tables": True},
}
# others than the quick ones are soaked
SOME = [pytest.param(b, marks=pytest.mark.thorough if b in QUICK else pytest.mark.soak) for b in WANT]


def counts_of(case: Case) -> dict[str, Counter[str]]:
    """By graph. A checkpointed backward runs again the exchanges before the attention, and the one behind it alone, for
    grad w: its matmul is not needed.
    """
    recomputed = case.checkpointed and RECOMPUTED
    option = "dynamic" if case.dynamic else "checkpointed" if recomputed else ""
    forward, backward = (Counter(c._asdict()) for c in OTHERWISE.get((case.block, option), WANT[case.block]))
    if recomputed and (case.block, option) not in OTHERWISE:
        again = forward.copy()
        again["all_to_all_single"] += again.pop("all_to_all_matmul")
        backward.update(again)
    graphs = {"inference": forward} if case.inference else {"forward": forward, "backward": backward}
    return {graph: Counter({name: case.layers * n for name, n in by.items() if n}) for graph, by in graphs.items()}


def check(pool: Any, case: Case) -> None:
    bound = ROUNDING["bfloat16" if case.autocast or case.bfloat16 else "float32"]
    for found in pool.run(outcome, case):
        got = {graph: ops + found.names_left(graph) for graph, ops in found.fused.items()}
        assert got == counts_of(case), "\n".join([str(case), str(found), *found.lines])
        for by in (found.from_eager, found.from_one):
            assert not {name: value for name, value in by.items() if value > bound}, str(case)


@pytest.mark.parametrize("block", thorough_but(QUICK, WANT))
def test_training(ranks: Any, block: str) -> None:
    """Inductor's graphs, forward and backward, are run op by op: its code takes long to compile."""
    check(ranks(2), Case(block, interpreted=True))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block", SOME)
def test_options(ranks: Any, block: str, option: str) -> None:
    check(ranks(2), replace(Case(block, interpreted=True), **OPTIONS[option]))


@pytest.mark.parametrize("block", SOME)
def test_what_inductor_generates(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, autocast=block == "wan"))


@pytest.mark.parametrize("block", SOME)
def test_four_ranks_with_weights_of_their_own(ranks: Any, block: str) -> None:
    check(ranks(4), Case(block, Size(batch=2, tokens=3, text=5), unequal=True, interpreted=True))


@pytest.mark.parametrize("block", SOME)
def test_ranks_of_a_group_that_are_not_neighbours(ranks: Any, block: str) -> None:
    check(ranks(4), Case(block, pairs=True, interpreted=True))


@pytest.mark.thorough
@pytest.mark.parametrize("rotary", ["complex", "half", "slice", "stack"])
@pytest.mark.parametrize("block", ["flux_single", "wan"])
def test_forms_of_rotary_embeddings(ranks: Any, block: str, rotary: str) -> None:
    check(ranks(2), Case(block, rotary=rotary, interpreted=True))
