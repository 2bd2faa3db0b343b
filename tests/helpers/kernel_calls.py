"""Calls of ops by kernels alone, on virtual ranks in Triton's interpreter, against the oracle of problems.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor

from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.chunk_matmul import GatheredMatmul
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.tiles import TileConfig
from fusedcomm.run import python_executor
from fusedcomm.testing import launch_now
from tests.helpers.op_problems import as_list
from tests.helpers.problems import GATHERS, Inputs, Problem, expected, expected_by_product, integers
from tests.helpers.virtual_ranks import FINGERPRINT, VirtualRank, assert_results, guarded, virtual_ranks


def by_name(problems: Iterable[Problem]) -> dict[str, Problem]:
    return {problem.name: problem for problem in problems}


def by_tma(patch: pytest.MonkeyPatch, describe: str, config: TileConfig) -> list[Any]:
    """Take the path of sm_90 and later, by boxes. Returns what the function of launches describes, by launch."""
    described, original = [], getattr(launches, describe)

    def counted(*args: Any) -> Any:
        described.append(args)
        return original(*args)

    patch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)
    patch.setattr(tiles, "BLOCK_K", 16)
    patch.setattr(tiles, "matmul_config", lambda *args: config)
    patch.setattr(launches, describe, counted)
    return described


def exchange_of(problem: Problem, group_size: int) -> Exchange:
    x, w, _ = integers(problem, 0, group_size)
    return problem.exchange(x, w, group_size)


def check_calls(
    problem: Problem,
    group_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    num_rounds: int = 1,
    num_calls: int = 1,
    by_product: bool = False,
    own: bool = True,
) -> None:
    """Results are bit-equal, nothing is written beside them. ``own``: the own chunk goes through the slot."""
    exchange = exchange_of(problem, group_size)
    chunk_numel = max(exchange.chunk_numel // num_rounds, exchange.row_numel)
    rounds = exchange.rounds(chunk_numel)
    assert len(rounds) >= num_rounds
    ranks = virtual_ranks(group_size, group_size * chunk_numel * dtype.itemsize)
    for seed in range(num_calls):
        inputs = [integers(problem, rank.rank, group_size, dtype, seed) for rank in ranks]
        outs = [[guarded(shape, dtype) for shape in _result_shapes(problem, exchange, by_product)] for _ in ranks]
        for spans in rounds:
            calls = [
                _gathered(problem, exchange, spans, rank, each, [out for out, _ in results], by_product, own)
                if problem.op in GATHERS
                else _pushed(problem, exchange, spans, rank, each, results[0][0])
                for rank, each, results in zip(ranks, inputs, outs, strict=True)
            ]
            for _ in zip_longest(*calls):  # all ranks send before any waits
                pass
        wanted = [as_list(each) for each in expected(problem, group_size, dtype, seed)]
        if by_product:
            copies = expected_by_product(problem, group_size, dtype, seed)
            wanted = [[*results, copy] for results, copy in zip(wanted, copies, strict=True)]
        for results, values in zip(outs, wanted, strict=True):
            assert_results(results, values)
    for rank in ranks:
        rank.assert_idle(len(rounds) * num_calls * (2 if problem.op == "matmul_all_reduce" else 1))


def run_now(program: Callable[..., None], *tensors: Tensor | None) -> None:
    memory = CallMemory(0, 1, "", torch.device("cpu"))
    inputs = [None if t is None else layout_of(t) for t in tensors]
    s = Builder(memory.memory_facts(), memory.device_facts(), inputs)
    program(s, *s.inputs)
    python_executor.run(s.finish(), memory, "", 0, tensors)


def _multiply_chunk(
    s: Builder, out: Tensor, w: Tensor, bias: Tensor | None, chunk: Tensor, *, exchange: Any, spans: Any, rank: int
) -> None:
    GatheredMatmul(s, out, w, bias, exchange).chunk(spans, rank, chunk)


def _result_shapes(problem: Problem, exchange: Exchange, by_product: bool) -> list[list[int]]:
    if problem.op in GATHERS:
        return [*exchange.out_shapes, *[exchange.shape] * by_product]
    return [exchange.out_shape]


def _pushed(
    problem: Problem, exchange: Exchange, spans: RoundSpans, rank: VirtualRank, inputs: Inputs, out: Tensor
) -> Iterator[None]:
    x, w, bias = inputs
    scale = 1 / rank.group_size if problem.reduce_op == "avg" else 1.0
    partial, bias = (bias, None) if problem.partial or problem.op == "matmul_all_to_all" else (None, bias)
    launch_now.push(x, w, partial, spans, rank, FINGERPRINT)
    yield
    if problem.op == "matmul_all_to_all":
        launch_now.unpack(out, spans, rank, FINGERPRINT)
    elif problem.op == "matmul_reduce_scatter":
        launch_now.reduce(out, spans, bias, scale, rank, FINGERPRINT)
    else:
        block = torch.full(exchange.block, math.nan, dtype=x.dtype)
        launch_now.reduce(block, spans, None, scale, rank, FINGERPRINT)
        yield
        launch_now.pack(block, spans, rank, FINGERPRINT)
        yield
        launch_now.unpack(out, spans, rank, FINGERPRINT)


def _gathered(
    problem: Problem,
    exchange: Exchange,
    spans: RoundSpans,
    rank: VirtualRank,
    inputs: Inputs,
    outs: list[Tensor],
    by_product: bool,
    own: bool,
) -> Iterator[None]:
    x, w, bias = inputs
    ws, biases = (w, bias) if isinstance(problem.n, tuple) else ([w], [bias])
    epoch = rank.epoch
    launch_now.pack(x, spans, rank, FINGERPRINT, own=own)
    yield
    chunk = spans.pack.view(x.view(-1), 0, rank.rank)
    for i, (out, w, bias) in enumerate(zip(outs, ws, biases, strict=False)):
        last = i == len(ws) - 1 and not by_product
        if not own:
            multiply = partial(_multiply_chunk, exchange=exchange, spans=spans, rank=rank.rank)
            run_now(multiply, out, w, bias, chunk)
        launch_now.gather_matmul(out, w, bias, spans, rank, FINGERPRINT, end_round=last, own=own)
        assert rank.epoch == epoch + last
    if by_product:
        launch_now.unpack(outs[-1], spans, rank, FINGERPRINT)
