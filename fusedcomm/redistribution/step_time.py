"""How long one collective of a plan takes by itself, on the mesh at hand.

    latency of its kind + bytes of the busiest rank / rate

    group             rate, bytes per second of one rank, one way
    inside a node     that of the kind: cost.model.Constants.backend_bandwidth
    between nodes     rings (all but all_to_all): that of the network cards of its ranks in a node, at most that inside
                      all_to_all: the network's for the parts that leave the node; the others go beside, as inside

The latency is that of the kind, however large the group is and wherever it lies: so one collective over several mesh
dims waits less than one per mesh dim. What all groups of some mesh dims take is what the slowest of them takes: ranks
of any of them plan alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product

from fusedcomm.cost.links import INTER, INTRA, Reach, rate, reach_of
from fusedcomm.cost.model import Constants


def ranks_per_node(ranks: Sequence[int], hosts: Sequence[int]) -> int:
    """The most successive global ranks that make a node, by the hosts of these; 1 where hosts have others."""
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
    """What the ranks of one mesh send over. ``mesh_ranks``: global, row-major; ``ranks_per_node`` of them successively
    are a node. ``inter_bandwidth``: between nodes, bytes per second of one rank, one way."""

    mesh_ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    ranks_per_node: int
    constants: Constants
    inter_bandwidth: float
    _lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __hash__(self) -> int:  # looked up often
        return self._hash

    @cached_property
    def _hash(self) -> int:
        facts = (self.mesh_ranks, self.mesh_shape, self.ranks_per_node, self.constants, self.inter_bandwidth)
        return hash(facts)

    def seconds(self, kind: str, num_bytes: float, mesh_dims: tuple[int, ...]) -> float:
        """What ``kind`` takes over the flattened groups of ``mesh_dims`` whose busiest rank sends that many bytes."""
        latency, per_byte = self._line(kind, mesh_dims)
        return latency + num_bytes * per_byte

    def latency(self, kind: str) -> float:
        return self.constants.backend_latency[kind]

    @cached_property
    def least(self) -> tuple[float, float]:
        """Latency, and seconds per byte, that no collective over any mesh dims stays below."""
        dims = [i for i, size in enumerate(self.mesh_shape) if size > 1]
        subsets = [some for num in range(1, len(dims) + 1) for some in combinations(dims, num)]
        lines = [self._line(kind, some) for kind in self.constants.backend_latency for some in subsets]
        return min(latency for latency, _ in lines), min(per_byte for _, per_byte in lines)

    def _line(self, kind: str, mesh_dims: tuple[int, ...]) -> tuple[float, float]:
        """Latency, and seconds per byte."""
        found = self._lines.get((kind, mesh_dims))
        if found is None:
            bandwidth = {INTRA: self.constants.backend_bandwidth[kind], INTER: self.inter_bandwidth}
            per_byte = 1 / rate(kind, self.reach(mesh_dims), bandwidth)
            found = self._lines[kind, mesh_dims] = self.latency(kind), per_byte
        return found

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
        """Each in order, shifted to the first nodes: there it lies in as many, in the same way."""
        strides = [math.prod(self.mesh_shape[i + 1 :]) for i in range(len(self.mesh_shape))]

        def places(dims: list[int]) -> list[int]:
            ranges = (range(0, self.mesh_shape[i] * strides[i], strides[i]) for i in dims)
            return [sum(each) for each in product(*ranges)]

        inside = places(list(mesh_dims))
        for first in places([i for i in range(len(self.mesh_shape)) if i not in mesh_dims]):
            ranks = sorted(self.mesh_ranks[first + place] for place in inside)
            shift = ranks[0] // self.ranks_per_node * self.ranks_per_node
            yield tuple(rank - shift for rank in ranks)
