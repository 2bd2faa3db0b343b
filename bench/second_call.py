"""What the second call costs where q and kv are exchanged by a call each: 8 heads of q, 2 of k and v, on 4 ranks.

    torchrun --nproc-per-node 4 -m fusedcomm.bench.second_call

One call can do the same here, because ranks that share a head of k and v are neighbours: with the columns in the order
q of rank 0, kv, q of rank 1, ... each rank gets one interval, and these overlap. So both ways multiply and send the
same, and differ by a read of x, a launch and a round of signals. Rounds of both take turns; a line has the median of
the ratios of rounds, with its quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import fusedcomm

RANKS, HIDDEN, HEAD_DIM, ROUNDS, CALLS = 4, 512, 64, 60, 5
Q_HEADS, KV_HEADS = 8, 2
TOKENS = (1003, 9)


def ways(tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Two calls, and one."""
    x = fusedcomm.nn.shard_tokens(torch.randn(1, tokens, HIDDEN))
    w_q, w_kv = torch.randn(HIDDEN, Q_HEADS * HEAD_DIM), torch.randn(HIDDEN, 2 * KV_HEADS * HEAD_DIM)
    w = torch.cat([w_q, w_kv], 1)
    kv = fusedcomm.replica_ranges(2 * KV_HEADS, RANKS, RANKS // KV_HEADS)
    both = [(0, 4), (2, 4), (6, 4), (8, 4)]  # q q k v | k v q q | q q k v | k v q q, of which two share k and v

    def call(w: torch.Tensor, heads: int, ranges: list[tuple[int, int]] | None) -> torch.Tensor:
        shape = [heads, HEAD_DIM]
        return fusedcomm.matmul_all_to_all(x, w, 1, -2, out_shape=shape, gather_size=tokens, scatter_ranges=ranges)

    def two() -> object:
        return call(w_q, Q_HEADS, None), call(w_kv, 2 * KV_HEADS, kv)

    return two, lambda: call(w, Q_HEADS + 2 * KV_HEADS, both)


def seconds(way: Callable[[], object]) -> float:
    """What several calls take, from a barrier on to the slowest rank's end."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(CALLS):
        way()
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for tokens in TOKENS:
        for algorithm in ("unfused", "chunked"):
            with fusedcomm.force_algorithm(algorithm, strict=True):
                two, one = ways(tokens)
                ratios = [seconds(two) / seconds(one) for _ in range(ROUNDS + 5)][5:]
            low, median, high = statistics.quantiles(ratios, n=4)
            if dist.get_rank() == 0:
                print(f"{tokens} tokens, {algorithm}: two calls / one call {median:.2f} [{low:.2f}, {high:.2f}]")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
