"""The links that a group's collectives use, and how long one collective takes on them: the alpha-beta model.

A message of n bytes takes alpha + n * beta: alpha is the latency of a hop, beta the inverse of the link's bandwidth.
For R ranks, each of which gives S bytes to the collective (Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH", IJHPCA 2005, but for the two trees):

    kind             hops              bytes on the wire   algorithm
    all_gather       R - 1             S (R - 1)           ring
    reduce_scatter   R - 1             S (R - 1) / R       ring
    all_reduce       2 (R - 1)         2 S (R - 1) / R     ring: a reduce_scatter, then an all_gather
                     2 ceil(log2 R)    2 S                 two trees, pipelined (Sanders, Speck, Traff 2009)
    all_to_all       R - 1             S (R - 1) / R       pairwise exchange: every part goes straight to its rank
    others           R - 1             S                   not known here

The faster of the two all_reduce algorithms counts.

The link is "intra" where the group is inside one node, else "inter". A node is ranks_per_node successive global ranks.
A group that has some peers inside and some outside counts as "inter", and each hop as one between nodes. The parts of
an all_to_all that stay inside the node run beside those that leave it, and only the slower of the two counts. A ring or
tree is split between the network cards of the group's ranks in a node, one card each, as far as the links inside the
node carry that.

All groups of one mesh dim must get the same Reach, or their ranks order the collectives of another dim differently. So
a group of successive ranks, or of every s-th rank, is "inter" if the same group, shifted, would lie in the nodes in
another way.

The model leaves out NVLS and other reductions in a switch, NCCL's choice between its protocols (LL, LL128, Simple), the
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
CPU_INTER_BANDWIDTH = 1.25e9  # likewise of a rank on a CPU: 10 Gbit/s
LAUNCH = 10e-6  # seconds of any collective; this and HOP are chosen, not measured: 24 us for 8 GPUs of a node
HOP = {INTRA: 2e-6, INTER: 5e-6}


@dataclass(frozen=True)
class Reach:
    """What a group spans; the same on all its ranks."""

    link: str
    group_size: int
    far: int  # peers of a rank that are reached over that link
    cards: int = 1  # the fewest ranks that the group has in any of its nodes, where it has several nodes


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
    """Whether another group of the same mesh dim can be spread over the nodes in another way."""
    if len(ranks) == 1 or len({b - a for a, b in pairwise(ranks)}) > 1:
        return False
    stride = ranks[1] - ranks[0]
    block = stride * len(ranks)  # as many successive ranks as such groups share
    return not (_divides(stride, ranks_per_node) and _divides(block, ranks_per_node))


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


def base_kind(kind: str) -> str | None:
    """The plain kind of coalesced, in-place and out variants; None for other collectives."""
    return next((base for base in _KINDS if kind.startswith(base)), None)


def sent_bytes(kind: str, chunk_bytes: float, group_size: int) -> float:
    """Bytes that a rank sends. A chunk is what goes to one peer; an all_reduce sends each twice, or it is two trees."""
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
    """Latency and time on the wire of a collective to whose start each rank gives ``given_bytes``."""
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
