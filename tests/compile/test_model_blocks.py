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
CHECKPOINTED = {  # backward, where it runs the exchanges before the attention again, and the one behind it for grad w
    "wan": Counts(2, 1, 5),
    "flux_double": Counts(0, 0, 8),
    "deepspeed": Counts(2, 1, 5),
}
QUICK = ["flux2", "flux_double", "wan"]
ROUNDING = {"float32": 2e-6, "bfloat16": 2e-2}  # relative to the largest value


def check(pool: Any, case: Case) -> None:
    forward, backward = WANT[case.block]
    if case.checkpointed and RECOMPUTED:
        backward = CHECKPOINTED[case.block]
    want = dict(zip(case.phases(), (forward, backward), strict=False))
    bound = ROUNDING["bfloat16" if case.autocast or case.bfloat16 else "float32"]
    for found in pool.run(outcome, case):
        for graph, counts in want.items():
            got = found.fused[graph] + found.names_left(graph)
            layers = {name: case.layers * n for name, n in counts._asdict().items()}
            assert got == Counter(layers), f"{graph} of {case}\n{found}\n" + "\n".join(found.lines)
        for by in (found.from_eager, found.from_one):
            assert not {name: value for name, value in by.items() if value > bound}, case


@pytest.mark.parametrize("block", thorough_but(QUICK, WANT))
def test_training(ranks: Any, block: str) -> None:
    """Inductor's graphs, forward and backward, are run op by op: its code takes long to compile."""
    check(ranks(2), Case(block, interpreted=True))


@pytest.mark.thorough
@pytest.mark.parametrize("block", WANT)
def test_generated_code(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, layers=2))
    check(ranks(2), Case(block, layers=2, inference=True))


@pytest.mark.thorough
@pytest.mark.parametrize("block", WANT)
def test_on_four_ranks(ranks: Any, block: str) -> None:
    case = Case(block, Size(batch=2, tokens=3, text=5), interpreted=True)
    check(ranks(4), replace(case, unequal=True))
    check(ranks(4), replace(case, pairs=True))


@pytest.mark.thorough
@pytest.mark.parametrize("block", CHECKPOINTED)
def test_checkpointed(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, layers=2, checkpointed=True))
    check(ranks(2), Case(block, checkpointed=True, dynamic=True, interpreted=True))


@pytest.mark.thorough
@pytest.mark.parametrize("block", WANT)
def test_numbers_of_tokens_that_change(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, Size(batch=2), dynamic=True, interpreted=True))


@pytest.mark.thorough
@pytest.mark.parametrize("block", WANT)
def test_half_precision(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, autocast=True))
    check(ranks(2), Case(block, bfloat16=True, interpreted=True))


@pytest.mark.thorough
@pytest.mark.parametrize("rotary", ["complex", "half", "slice", "stack"])
@pytest.mark.parametrize("block", ["flux_single", "wan"])
def test_forms_of_rotary_embeddings(ranks: Any, block: str, rotary: str) -> None:
    check(ranks(2), Case(block, rotary=rotary, interpreted=True))
    check(ranks(2), Case(block, rotary=rotary, whole_tables=True, interpreted=True))
