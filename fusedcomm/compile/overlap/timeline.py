"""The simulated times of a graph and of each of its collectives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One collective, or one op of fusedcomm, on a `Timeline`.

    Attributes:
        node: the name of the node that starts it.
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", ..., or the name of the op.
        group: the name of its group.
        link: "intra" inside a node, "inter" between nodes.
        start_ms: when it begins.
        end_ms: when it has ended.
        alone_ms: its time with the link to itself.
        exposed_ms: time that the compute stream waits for it.
        hidden: whether at most 1 % of alone_ms is exposed.
    """

    node: str
    kind: str
    group: str
    link: str
    start_ms: float
    end_ms: float
    alone_ms: float
    exposed_ms: float

    @property
    def hidden(self) -> bool:
        return self.exposed_ms <= 0.01 * self.alone_ms


@dataclass(frozen=True)
class Timeline:
    """The simulated times of a graph, in ms: ``total_ms = compute_ms + exposed_ms``.

    Attributes:
        total_ms: from the beginning of the graph to its end.
        compute_ms: time that the compute stream computes.
        exposed_ms: time that the compute stream waits for collectives.
        collectives: a list of `Line`.
        peak_bytes: the most memory that is held at one time.
    """

    total_ms: float
    compute_ms: float
    exposed_ms: float
    collectives: list[Line]
    peak_bytes: int
