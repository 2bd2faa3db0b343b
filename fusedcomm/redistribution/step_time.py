"""The time of one collective of a plan by itself, on the mesh at hand.

    latency of its kind + bytes of the busiest rank / rate

    group             rate, bytes per second of one rank, one way
    inside a node     the kind's: cost.model.Constants.backend_bandwidth
    between nodes     rings (all but all_to_all): the sum of the network cards of its ranks in a node, at most as inside
                      all_to_all: the network's for the parts that leave the node; the others go beside, as inside

The latency depends only on the kind, not on the group's size or place: so one collective over several mesh dims waits
less than one per mesh dim. All groups of the same mesh dims count as slow as the slowest of them, so that the ranks of
all of them plan alike.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from fusedcomm.plan.cost.links import INTER, INTRA, Reach, rate, reach_of
from fusedcomm.plan.cost.model import Constants


def ranks_per_node(ranks: Sequence[int], hosts: Sequence[int]) -> int:
    """The most successive global ranks that can be a node, judging by their hosts; 1 where hosts have other ranks."""
    by_rank = dict(sorted(zip(ranks, hosts, strict=True)))
    first, *others = by_rank.items()
    beyond = next((rank for rank, host in others if host != first[1]), None)
    if beyond is None:
        return max(ranks) + 1
    return next((size for size in range(beyond, 1, -1) if _is_by_host(by_rank, size)), 1)


def _is_by_host(hosts: Mapping[int, int], size: int) -> bool:
    pairs = {(rank // size, host) for rank, host in hosts.items()}
    return len(pairs) == len(set(hosts.values())) == len({node for node, _ in pairs})


@dataclass(frozen=True)
class MeshLinks:
    """The links between the ranks of one mesh.

    ``mesh_ranks`` are global, in row-major order; ``ranks_per_node`` successive global ranks are a node.
    ``inter_bandwidth``: between nodes, in bytes per second of one rank, one way.
    """

    mesh_ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks_per_node: int
    constants: Constants
    inter_bandwidth: float

    def __hash__(self) -> int:  # looked up often
        return self._hash

    @cached_property
    def _hash(self) -> int:
        facts = (self.mesh_ranks, self.mesh_shape, self.ranks_per_node, self.constants, self.inter_bandwidth)
        return hash(facts)

    def seconds(self, kind: str, num_bytes: float, mesh_dims: tuple[int, ...]) -> float:
        """The time of ``kind`` over the flattened groups of ``mesh_dims``, if the busiest rank sends ``num_bytes``."""
        latency, per_byte = _line(self, kind, mesh_dims)
        return latency + num_bytes * per_byte

    @cached_property
    def least_latency(self) -> float:
        return min(self.constants.backend_latency.values())

    def reach(self, mesh_dims: tuple[int, ...]) -> Reach:
        """The reach of the slowest group."""
        world_size = max(self.mesh_ranks) + 1
        found = [reach_of(ranks, self.ranks_per_node, world_size) for ranks in set(self._groups(mesh_dims))]
        between = [at for at in found if at.link == INTER]
        if not between:
            return found[0]
        far, cards = max(at.far for at in between), min(at.cards for at in between)
        return Reach(INTER, between[0].group_size, far, cards)

    def _groups(self, mesh_dims: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Each group's ranks in order, shifted to the first nodes, where it lies in as many nodes in the same way."""
        strides = [math.prod(self.mesh_shape[i + 1 :]) for i in range(len(self.mesh_shape))]

        def places(dims: list[int]) -> list[int]:
            ranges = (range(0, self.mesh_shape[i] * strides[i], strides[i]) for i in dims)
            return [sum(each) for each in product(*ranges)]

        inside = places(list(mesh_dims))
        for first in places([i for i in range(len(self.mesh_shape)) if i not in mesh_dims]):
            ranks = sorted(self.mesh_ranks[first + place] for place in inside)
            shift = ranks[0] // self.ranks_per_node * self.ranks_per_node
            yield tuple(rank - shift for rank in ranks)


@lru_cache(maxsize=4096)
def _line(links: MeshLinks, kind: str, mesh_dims: tuple[int, ...]) -> tuple[float, float]:
    """Latency, and seconds per byte."""
    bandwidth = {INTRA: links.constants.backend_bandwidth[kind], INTER: links.inter_bandwidth}
    return links.constants.backend_latency[kind], 1 / rate(kind, links.reach(mesh_dims), bandwidth)
