"""The program that fusedcomm began with, in its full size, timed by the simulator.

    for x, w in zip(xs, ws):  # 8 pairs of x [16, 16192, 4096] and w [16, 4096, 8192] in bfloat16, on 4 ranks
        y = matmul_all_to_all(x, w, gather_dim=1, scatter_dim=2, out_shape=[16, 512])

Backward, each pair makes the gradients of its x and w. There is no memory of that size here, and no time was measured.
"""

import itertools
from dataclasses import dataclass, replace
from functools import cache

from tests.helpers.problems import Problem
from tests.helpers.schedule.operations import Enqueued
from tests.helpers.schedule.programs import Calls, World
from tests.helpers.schedule.rates import H200, H200_WITH_ROOM, Rates
from tests.helpers.schedule.simulator import simulate

NUM_PAIRS, NUM_RANKS, SLOT_BYTES = 8, 4, 512 << 20
X, N, HEADS = (16, 16192, 4096), 8192, (4, 512)  # heads of each rank
FORWARD, BACKWARD = "forward", "backward"
PAIR = {
    FORWARD: Problem("push", X, N, 1, 2, out_shape=HEADS, batched=True),
    BACKWARD: Problem("gather", (*X[:2], *HEADS), X[2], 2, 1, None, True, False, True, "all_to_all_matmul", k_dims=2),
}
RATES = {"signals behind cuBLAS": H200, "signals beside cuBLAS": H200_WITH_ROOM}


@dataclass(frozen=True)
class Row:
    """Milliseconds for each pair. ``exchanging``: without the gradient of w, which is a matmul by itself."""

    direction: str
    algorithm: str
    assumption: str
    time: float
    exchanging: float
    roof: float  # the matmul beside the exchange
    stalls: dict[str, float]

    @property
    def ratio(self) -> float:
        return self.exchanging / self.roof


@cache
def enqueued(direction: str, algorithm: str, num_pairs: int = NUM_PAIRS) -> list[Enqueued]:
    def program(call: Calls) -> None:
        for _ in range(num_pairs):
            call(PAIR[direction], by_product=direction == BACKWARD)
            if direction == BACKWARD:
                call.walk.multiply(X[0], X[2], X[1], N)

    return World(NUM_RANKS, SLOT_BYTES, algorithm).enqueue(program)


def matmuls(direction: str, rates: Rates) -> tuple[float, float]:
    """Seconds of one pair's matmuls alone: the one beside the exchange, and the gradient of w."""
    (b, m, k), n = X, N
    if direction == FORWARD:
        return rates.matmul((b, m, k, n), 1), 0.0
    return rates.matmul((b, m, n, k), 1), rates.matmul((b, k, m, n), 1)


def row(direction: str, algorithm: str, assumption: str, num_pairs: int = NUM_PAIRS) -> Row:
    rates = RATES[assumption]
    line = simulate(enqueued(direction, algorithm, num_pairs), rates)
    beside, gradient_of_w = (1e3 * seconds for seconds in matmuls(direction, rates))
    stalls = {name: seconds / num_pairs * 1e3 for name, seconds in line.stalls(0).items()}
    time = line.total / num_pairs * 1e3
    return Row(direction, algorithm, assumption, time, time - gradient_of_w, beside, stalls)


def rows() -> list[Row]:
    """A row for each assumption, or one where it makes no difference."""
    found: list[Row] = []
    for direction, algorithm in itertools.product((FORWARD, BACKWARD), ("chunked", "fused")):
        first, second = (row(direction, algorithm, assumption) for assumption in RATES)
        same = f"{first.time:.1f}" == f"{second.time:.1f}"
        found += [replace(first, assumption="either")] if same else [first, second]
    return found


def table() -> list[str]:
    """The rows as docs/status.md has them."""
    found = [
        "| direction | algorithm | assumed | a pair, ms | without grad w, ms | roof, ms | ratio | longest stall, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows():
        name, stalled = next(iter(each.stalls.items()), ("", 0.0))
        stall = f"`{name.replace(' ', '` ', 1)} {stalled:.1f}" if stalled >= 0.05 else "none"
        found.append(
            f"| {each.direction} | `{each.algorithm}` | {each.assumption} | {each.time:.1f} | {each.exchanging:.1f} "
            f"| {each.roof:.1f} | {each.ratio:.2f} | {stall} |"
        )
    return found
