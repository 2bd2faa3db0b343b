"""What constants say of a bench's calls: how long each algorithm takes, and from which size on which one is fastest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.cost import in_pieces, model
from fusedcomm.cost.model import KINDS, Constants
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.ops.whole_group import MatmulSize

CROSSOVER_K_N = (1024, 4096)
CROSSOVER_ROWS = tuple(1 << power for power in range(17))


@dataclass(frozen=True)
class Crossover:
    """From ``rows`` on ``algorithm`` is estimated to be the fastest."""

    op: str
    dtype: str
    rows: int
    algorithm: str


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


def crossovers(constants: Constants, num_ranks: int, apart: bool = False) -> list[Crossover]:
    """From how many rows on which algorithm is estimated to be the fastest, at the K and N of ``CROSSOVER_K_N``."""
    names, found = names_of(constants, apart), []
    for op, dtype in itertools.product(KINDS, ("float32", "bfloat16")):
        before = ""
        for rows in CROSSOVER_ROWS:
            size = PROGRAMS[op].divisible(MatmulSize(rows, *CROSSOVER_K_N), num_ranks)
            times = estimates(op, size, dtype, constants, num_ranks, names)
            fastest = min(times, key=times.__getitem__)
            if fastest != before:
                found.append(Crossover(op, dtype, size.rows, fastest))
            before = fastest
    return found


def exchange_of(op: str, size: MatmulSize, num_ranks: int) -> Exchange:
    """The geometry of a bench's call."""
    x, w = torch.empty(PROGRAMS[op].x_shape(size, num_ranks), device="meta"), torch.empty(size.k, size.n, device="meta")
    return PROGRAMS[op].exchange(x, w, num_ranks)
