"""What one node of a graph costs: time on the compute stream, and a transfer on a link beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One collective, alone on its link."""

    link: str  # "intra": inside a node; "inter": between nodes
    group: str  # collectives of one group run one after the other, in the order of their starts
    latency_ms: float  # passes whatever else is on the link
    wire_ms: float  # bytes / bandwidth: k groups on a link get 1/k of it each

    @property
    def ms(self) -> float:
        return self.latency_ms + self.wire_ms


@dataclass(frozen=True)
class NodeCost:
    """What one node takes."""

    compute_ms: float = 0.0  # on the compute stream
    transfer: Transfer | None = None  # of a start: asynchronous; of one of our ops: beside its matmul
    fused_ms: float | None = None  # of one of our ops: all of it, with the link to itself

    @property
    def ms(self) -> float:
        """From when the node runs until its result can be read, alone."""
        if self.fused_ms is not None:
            return self.fused_ms
        return self.compute_ms + (self.transfer.ms if self.transfer is not None else 0.0)
