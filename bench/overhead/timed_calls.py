"""What is timed of one op at a tiny size, from a call that does nothing up to the op itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity

import fusedcomm
from fusedcomm.bench.op_bench import BASELINE, ROOF, OpData
from fusedcomm.bench.overhead import empty_op  # noqa: F401  defines the op
from fusedcomm.bench.overhead.call_clock import TimedCall
from fusedcomm.runtime.group import resolve

NOTHING, BARRIER, MM, EMPTY = "nothing", "barrier", "torch.mm", "empty op"
ALGORITHMS = ("unfused", "chunked")
PROGRAMS_OF_OP = (BASELINE, *ALGORITHMS)
FIRST_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::baddbmm_": 1}
MatmulShape = tuple[int, int, int]  # m, k, n


@dataclass(frozen=True)
class OpCalls:
    """The calls by name, and by program of the op the matmuls that it makes and which call makes those alone."""

    calls: dict[str, TimedCall]
    matmuls: dict[str, list[MatmulShape]]
    matmul_calls: dict[str, str]

    def with_values(self) -> dict[str, Callable[[], Any]]:
        """The calls whose results `OpData.check` knows, by the names that it has for them."""
        return {ROOF: self.calls[MM].once, **{name: self.calls[name].once for name in PROGRAMS_OF_OP}}


def op_calls(data: OpData, barrier: Callable[[], None]) -> OpCalls:
    """Ranks call this alike, as it calls the op."""
    x, w, bench = data.x, data.w, data.bench
    op, dims = getattr(fusedcomm, bench.op), bench.dims(x)
    ours = data.variant(lambda x, w: op(x, w, *dims), x, w, grad=data.grad)
    of_op = {BASELINE: TimedCall(data.variants()[BASELINE])}
    of_op |= {name: TimedCall(ours, name) for name in ALGORITHMS}
    seen = {name: matmuls_of(each) for name, each in of_op.items()}
    # native code may multiply without torch's dispatcher, where the profiler sees nothing
    matmuls = {name: each if _work(each) >= _work(seen[BASELINE]) else seen[BASELINE] for name, each in seen.items()}
    names = _names(matmuls)
    calls = {
        NOTHING: TimedCall(lambda: None),
        BARRIER: TimedCall(barrier),
        MM: TimedCall(data.variant(torch.mm, data.local_x, w, grad=data.local_grad)),
        **{names[name]: TimedCall(_matmuls_alone(shapes, data.dtype)) for name, shapes in matmuls.items()},
        EMPTY: TimedCall(_empty(data)),
    }
    return OpCalls(calls | of_op, matmuls, names)


def matmuls_of(timed: TimedCall) -> list[MatmulShape]:
    """The matmuls of one call, sorted, as the profiler sees them."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        timed.once()
    found: list[MatmulShape] = []
    for event in profiled.events():
        if event.name in FIRST_MATRIX:
            first = FIRST_MATRIX[event.name]
            (*batch, m, k), (*_, n) = event.input_shapes[first : first + 2]
            found += [(m, k, n)] * math.prod(batch)
    return sorted(found)


def _work(shapes: Sequence[MatmulShape]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _names(matmuls: dict[str, list[MatmulShape]]) -> dict[str, str]:
    """Programs that make the same matmuls share what is timed."""
    shared: dict[tuple[MatmulShape, ...], list[str]] = {}
    for name, shapes in matmuls.items():
        shared.setdefault(tuple(shapes), []).append(name)
    names: dict[str, str] = {}
    for same, programs in shared.items():
        text = f"{len(same)} mm" if len(shared) == 1 else f"{len(same)} mm: {', '.join(programs)}"
        names |= dict.fromkeys(programs, text)
    return names


def _matmuls_alone(shapes: Sequence[MatmulShape], dtype: torch.dtype) -> Callable[[], None]:
    device = "cpu"
    every = [
        (torch.randn(m, k, dtype=dtype, device=device), torch.randn(k, n, dtype=dtype, device=device))
        for m, k, n in shapes
    ]
    operands = [(x, w, x @ w) for x, w in every]

    def call() -> None:
        for x, w, out in operands:
            torch.mm(x, w, out=out)

    return call


def _empty(data: OpData) -> Callable[[], Any]:
    group_size, group_name = resolve(None)
    shape = list(data.bench.ours(data.x, data.w).shape)
    op = torch.ops.fusedcomm_bench.empty
    return data.variant(
        lambda x, w: op(x, w, None, shape, 0, 1, group_size, group_name), data.x, data.w, grad=data.grad
    )
