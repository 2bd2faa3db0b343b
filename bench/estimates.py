"""Estimated times of the algorithms for a bench's calls, by the cost model's constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.plan.cost import in_pieces, model
from fusedcomm.plan.cost.model import Constants
from fusedcomm.plan.geometry.exchange import Exchange


def names_of(constants: Constants, apart: bool) -> list[str]:
    """The algorithms that the planner chooses from. ``apart``: whether ranks have no workspace."""
    if apart:
        return ["unfused", "pipelined"]
    return ["unfused", "chunked", *(["fused"] if constants.fused_flops else [])]


def estimates(
    op: str, size: MatmulSize, dtype: str, constants: Constants, num_ranks: int, names: Sequence[str]
) -> dict[str, float]:
    """Seconds by algorithm."""
    exchange = exchange_of(op, size, num_ranks)
    found = dict(model.estimate(op, exchange, dtype, constants))
    if "pipelined" in names:
        found["pipelined"] = in_pieces.fastest(op, exchange, dtype, constants)[1]
    return {name: found[name] for name in names}


def exchange_of(op: str, size: MatmulSize, num_ranks: int) -> Exchange:
    """The geometry of a bench's call."""
    x, w = torch.empty(PROGRAMS[op].x_shape(size, num_ranks), device="meta"), torch.empty(size.k, size.n, device="meta")
    return PROGRAMS[op].exchange(x, w, num_ranks)
