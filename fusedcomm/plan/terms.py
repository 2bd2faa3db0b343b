"""The operands of a reduction, in one signature for all algorithms: `program(s, exchange, terms)`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fusedcomm.plan.builder import Given, RmsNorm
from fusedcomm.plan.chunk_matmul import Operand
from fusedcomm.plan.geometry.exchange import Exchange


class Terms(NamedTuple):
    """``sum(x @ w + partial_bias for all ranks) * scale + bias + residual``, and the norm of its rows.

    Without w, x is the product. Where the result is scattered, bias and residual are of this rank's block.
    """

    x: Operand
    w: Operand | None
    bias: Given
    partial_bias: Given
    out: Given
    scale: float
    residual: Given = None
    norm: RmsNorm | None = None


Reduce = Callable[[Any, Exchange, Terms], Any]  # by the Builder, or the rank's memory


def of_terms(
    program: Reduce,
    s: Any,
    exchange: Exchange,
    x: Operand,
    w: Operand | None,
    bias: Given,
    partial_bias: Given,
    out: Given,
    *,
    scale: float,
) -> Any:
    return program(s, exchange, Terms(x, w, bias, partial_bias, out, scale))
