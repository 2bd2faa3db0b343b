"""Blocks of real models, compiled unchanged: what is fused, what is left, and every value on every rank."""

from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.helpers.block_checks import Case, outcome
from tests.helpers.fragments import RECOMPUTED
from tests.helpers.model_blocks import Size
from tests.helpers.tiers import nightly_but


class Counts(NamedTuple):
    """One layer's, in one graph: the ops in which exchanges are fused, and those of collectives alone."""

    matmul_all_to_all: int = 0
    all_to_all_matmul: int = 0
    all_to_all: int = 0
    all_reduce: int = 0


WANT = {  # forward, backward
    "wan": (Counts(3, 1, all_reduce=1), Counts(1, 3, all_reduce=1)),
    "wan_fused_qkv": (Counts(1, 1, all_reduce=1), Counts(1, 1, all_reduce=1)),
    "flux_single": (Counts(3, 1), Counts(1, 3)),
    "flux_double": (Counts(6, 2), Counts(2, 6)),
    "qwen_image": (Counts(6, 2), Counts(2, 6)),
    "ltx": (Counts(6, 2, all_reduce=2), Counts(2, 6, all_reduce=2)),
    "flux2": (Counts(1, 1), Counts(1, 1)),
    "deepspeed": (Counts(3, 1), Counts(1, 3)),
    "packed": (Counts(1, 1), Counts(1, 1)),
}
NOTHING_MOVES = ["packed"]  # the others exchange constants once, and partial gradients of weights once
INTERPRETED = ["deepspeed", "flux2", "flux_double", "flux_single", "packed", "wan"]
MANY_HEADS = Size(heads=16)  # tables of angles in float32 are small beside them
ROUNDING = {"float32": 2e-6, "bfloat16": 5e-2}  # relative to the largest value
OPTIONS: dict[str, tuple[int, Case]] = {  # ranks, and a block with what the option may break
    "inference": (2, Case("wan", inference=True, layers=2)),  # which share the tables that moves need
    "two layers": (2, Case("flux_double", layers=2)),
    "checkpointed": (2, Case("wan", checkpointed=True, layers=2)),
    "dynamic": (2, Case("flux2", Size(batch=2), dynamic=True)),
    "autocast": (2, Case("wan", MANY_HEADS, autocast=True)),
    "bfloat16": (2, Case("flux_double", MANY_HEADS, bfloat16=True)),
    "whole tables": (2, Case("wan", whole_tables=True)),
    "complex tables": (2, Case("flux_single", rotary="complex")),
    "halves of a head": (2, Case("wan", rotary="half")),
    "slices of a head": (2, Case("flux_single", rotary="slice")),
    "stacked pairs": (2, Case("wan", rotary="stack")),
    "weights of their own": (4, Case("wan", Size(batch=2, tokens=3, text=5), unequal=True)),
    "ranks that are not neighbours": (4, Case("flux_double", pairs=True)),
}


def counts_of(case: Case) -> dict[str, Counter[str]]:
    """By graph. A checkpointed backward runs the exchanges again; of the last it needs only what arrives."""
    forward, backward = (Counter({name: case.layers * n for name, n in c._asdict().items()}) for c in WANT[case.block])
    if case.block not in NOTHING_MOVES:
        forward["all_to_all"] += 1
        backward["all_to_all"] += 1
    if case.checkpointed and RECOMPUTED:
        again = forward.copy()
        again["all_to_all"] += again.pop("all_to_all_matmul")
        backward.update(again)
    graphs = {"inference": forward} if case.inference else {"forward": forward, "backward": backward}
    return {graph: +counts for graph, counts in graphs.items()}


def check(pool: Any, case: Case) -> None:
    bound = ROUNDING["bfloat16" if case.autocast or case.bfloat16 else "float32"]
    for found in pool.run(outcome, case):
        left = {g: Counter(name.removesuffix("_single") for name, _ in each) for g, each in found.left.items()}
        # constants of several dtypes travel as bytes, which no op sends
        assert case.bfloat16 or not any(left.values()), str(found)
        got, want = {g: ops + left[g] for g, ops in found.ops.items()}, counts_of(case)
        if case.checkpointed:  # some of what is exchanged again is fused too, and some not exchanged again
            ops, least = got.pop("backward"), want.pop("backward")
            assert all(ops[op] >= n for op, n in least.items() if "matmul" in op), str(found)
            assert ops["all_to_all"] + ops["all_reduce"] <= least["all_to_all"] + least["all_reduce"], str(found)
        assert got == want, "\n".join([str(case), str(found), *found.lines])
        for by in (found.from_eager, found.from_one):
            assert not {name: value for name, value in by.items() if value > bound}, str(case)


@pytest.mark.thorough
@pytest.mark.parametrize("block", nightly_but(INTERPRETED, WANT))
def test_training(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, interpreted=True))


@pytest.mark.nightly
@pytest.mark.parametrize("block", ["flux_double", "wan"])
def test_code_of_inductor(ranks: Any, block: str) -> None:
    check(ranks(2), Case(block, autocast=block == "wan"))


@pytest.mark.nightly
@pytest.mark.parametrize("block", ["flux_double", "ltx"])
def test_bytes_kept_for_the_backward(ranks: Any, block: str) -> None:
    """Constants of all ranks are kept where the program keeps its inputs; the tables of LTX have an angle per head."""
    case = Case(block, Size(tokens=64, text=32, heads=8, head_dim=64), interpreted=True)
    moved, unmoved = (ranks(2).run(outcome, each)[0].saved_bytes for each in (case, replace(case, unmoved=True)))
    assert moved <= (1.15 if block == "ltx" else 1.07) * unmoved, (moved, unmoved)


@pytest.mark.thorough
@pytest.mark.parametrize("option", nightly_but(["checkpointed", "dynamic", "inference"], OPTIONS))
def test_options(ranks: Any, option: str) -> None:
    world_size, case = OPTIONS[option]
    check(ranks(world_size), replace(case, interpreted=True))
