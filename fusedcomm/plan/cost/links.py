"""The links that a group's collectives use, and how long one collective takes on them: the alpha-beta model.

For R ranks, each of which gives S bytes (Thakur, Rabenseifner, Gropp, IJHPCA 2005; trees: Sanders, Speck, Traff 2009):

    kind             hops              bytes on the wire   algorithm
    all_gather       R - 1             S (R - 1)           ring
    reduce_scatter   R - 1             S (R - 1) / R       ring
    all_reduce       2 (R - 1)         2 S (R - 1) / R     ring: a reduce_scatter, then an all_gather
                     2 ceil(log2 R)    2 S                 two trees; the faster of both counts
    all_to_all       R - 1             S (R - 1) / R       pairwise: every part goes straight to its rank
    others           R - 1             S                   not known here

A group inside one node, of ranks_per_node successive global ranks, uses the link "intra". Any other is "inter", with
each hop between nodes. Parts of an all_to_all that stay inside a node run beside those that leave it; a ring or tree is
split between the network cards of the group's ranks in a node, as far as the links inside the node carry that.

All groups of one mesh dim must get the same Reach, or their ranks order the collectives of another dim differently: a
group of every s-th rank is "inter" if the same group, shifted, would lie in the nodes in another way.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

INTRA, INTER, PCIE = "intra", "inter", "pcie"  # the last: between GPUs of a host without NVLink
_KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
INTER_BANDWIDTH = 50e9  # bytes per second of one rank, where nobody says: one 400 Gbit/s card per GPU
PCIE_BANDWIDTH = 20e9  # likewise of NCCL on PCIe of generation 4 or 5; chosen
CPU_INTER_BANDWIDTH = 1.25e9  # likewise of a rank on a CPU: 10 Gbit/s
LAUNCH = 10e-6  # seconds of any collective; this and HOP are chosen, not measured: 24 us for 8 GPUs of a node
HOP = {INTRA: 2e-6, INTER: 5e-6, PCIE: 5e-6}


@dataclass(frozen=True)
class Reach:
    """The extent of a group; equal on all its ranks."""

    link: str
    group_size: int
    far: int  # peers of a rank that are reached over that link
    cards: int = 1  # the fewest ranks that the group has in any of its nodes, where it has several nodes


@functools.lru_cache(maxsize=1024)
def reach_of(ranks: Sequence[int], ranks_per_node: int, world_size: int) -> Reach:
    """The reach of the group of these global ranks, in order."""
    size, fewest = len(ranks), min(Counter(rank // ranks_per_node for rank in ranks).values())  # of a node
    if world_size > ranks_per_node and _shifts_differ(ranks, ranks_per_node):
        return Reach(INTER, size, size - 1)
    if world_size <= ranks_per_node or fewest == size:
        return Reach(INTRA, size, size - 1)
    return Reach(INTER, size, size - fewest, fewest)


def _shifts_differ(ranks: Sequence[int], ranks_per_node: int) -> bool:
    """Whether another group of the same mesh dim can be spread over the nodes in another way."""
    if len(ranks) == 1 or len({b - a for a, b in pairwise(ranks)}) > 1:
        return False
    stride = ranks[1] - ranks[0]
    block = stride * len(ranks)  # as many successive ranks as such groups share
    return any(max(size, ranks_per_node) % min(size, ranks_per_node) for size in (stride, block))


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
    latency, wire = (size - 1) * hop, sent_bytes(base, chunk_bytes, size) / bytes_per_second
    if base == "all_reduce":
        trees = 2 * math.ceil(math.log2(size)) * hop, 2 * given_bytes / bytes_per_second
        latency, wire = min((2 * latency, wire), trees, key=sum)
    return LAUNCH + latency, wire
