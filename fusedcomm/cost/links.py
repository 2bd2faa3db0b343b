"""What a group's collectives go over, and how long one takes there by itself: the alpha-beta model.

A message of n bytes takes alpha + n * beta: a hop's latency, and the inverse of the link's bandwidth. R ranks, S bytes
that the start is given; per kind (Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", IJHPCA 2005, but for the last tree):

    kind             hops              bytes on the wire   algorithm
    all_gather       R - 1             S (R - 1)           ring
    reduce_scatter   R - 1             S (R - 1) / R       ring
    all_reduce       2 (R - 1)         2 S (R - 1) / R     ring: a reduce_scatter, then an all_gather
                     2 ceil(log2 R)    2 S                 two trees, pipelined (Sanders, Speck, Traff 2009); the better
    all_to_all       R - 1             S (R - 1) / R       pairwise exchange: every part goes straight to its rank
    others           R - 1             S                   unknown to us

The link is "intra" where the group is inside one node, else "inter": ranks_per_node successive global ranks are a node.
A group that has some peers inside and some outside counts as "inter", each hop as one between nodes; what stays inside
is faster and runs beside: of an all_to_all only the slower of both counts. A ring or tree is
split between the network cards of the group's ranks in a node, one card each, as far as the links inside carry that.

All groups of one dim of a mesh must be told alike, or their ranks order the collectives of another dim differently. So
a group of successive ranks, or of every s-th, that would lie in the nodes otherwise if it were shifted, is "inter".

Left out: NVLS and other reductions in a switch, the choice of NCCL between its protocols (LL, LL128, Simple), network
topology beyond the node, uneven splits, and the SMs that a collective takes.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

INTRA, INTER = "intra", "inter"
_KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
INTER_BANDWIDTH = 50e9  # bytes per second of one rank, where nobody says: one 400 Gbit/s card per GPU
LAUNCH = 10e-6  # seconds, of any collective; this and HOP are chosen, not measured: 24 us for 8 GPUs of a node
HOP = {INTRA: 2e-6, INTER: 5e-6}


@dataclass(frozen=True)
class Reach:
    """What a group spans; the same on all its ranks."""

    link: str
    group_size: int
    far: int  # peers of a rank that are reached over that link
    cards: int = 1  # ranks of a node that the group has at least, where it has several nodes


@functools.lru_cache(maxsize=1024)
def reach_of(ranks: Sequence[int], ranks_per_node: int, world_size: int) -> Reach:
    """The reach of the group of these global ranks, in order."""
    size = len(ranks)
    if world_size <= ranks_per_node:
        return Reach(INTRA, size, size - 1)
    if _shifts_differ(ranks, ranks_per_node):
        return Reach(INTER, size, size - 1)
    in_nodes = Counter(rank // ranks_per_node for rank in ranks)
    if len(in_nodes) == 1:
        return Reach(INTRA, size, size - 1)
    fewest = min(in_nodes.values())
    return Reach(INTER, size, size - fewest, fewest)


def _shifts_differ(ranks: Sequence[int], ranks_per_node: int) -> bool:
    """Whether other groups of the same dim of a mesh can lie in the nodes in another way."""
    if len(ranks) == 1 or len({b - a for a, b in pairwise(ranks)}) > 1:
        return False
    stride = ranks[1] - ranks[0]
    block = stride * len(ranks)  # of successive ranks, that such groups share
    return not (_divides(stride, ranks_per_node) and _divides(block, ranks_per_node))


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def base_kind(kind: str) -> str | None:
    """The plain kind of coalesced, in-place and out variants; None for other collectives."""
    return next((base for base in _KINDS if kind.startswith(base)), None)


def sent_bytes(kind: str, chunk_bytes: float, group_size: int) -> float:
    """What a rank sends; a chunk is what goes to one peer. An all_reduce sends each twice, or it is two trees."""
    return (group_size - 1) * chunk_bytes * (2 if kind == "all_reduce" else 1)


def rate(kind: str, at: Reach, bandwidth: Mapping[str, float]) -> float:
    """Bytes per second that a rank sends. ``bandwidth``: by link, bytes per second of one rank, one way."""
    if at.link == INTRA:
        return bandwidth[INTRA]
    if kind == "all_to_all":
        leaving = at.far / (at.group_size - 1)
        return 1 / max(leaving / bandwidth[INTER], (1 - leaving) / bandwidth[INTRA])
    return min(bandwidth[INTRA], at.cards * bandwidth[INTER])


def seconds(kind: str, given_bytes: float, at: Reach, bandwidth: Mapping[str, float]) -> tuple[float, float]:
    """Latency, and time on the wire, of a collective whose start is given that many bytes."""
    size, hop, base = at.group_size, HOP[at.link], base_kind(kind)
    if base is None:
        return LAUNCH + (size - 1) * hop, (size > 1) * given_bytes / bandwidth[at.link]
    bytes_per_second = rate(base, at, bandwidth)
    chunk_bytes = given_bytes if base == "all_gather" else given_bytes / size
    num_hops, wire = size - 1, sent_bytes(base, chunk_bytes, size) / bytes_per_second
    if base == "all_reduce":
        ring = 2 * num_hops * hop, wire
        trees = 2 * math.ceil(math.log2(size)) * hop, 2 * given_bytes / bytes_per_second
        latency, wire = min(ring, trees, key=sum)
        return LAUNCH + latency, wire
    return LAUNCH + num_hops * hop, wire
