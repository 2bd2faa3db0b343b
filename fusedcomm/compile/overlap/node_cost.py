"""The cost of one node of a graph: time on the compute stream, and a transfer on a link beside it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One collective, alone on its link."""

    link: str  # "intra": inside a node; "inter": between nodes
    group: str  # collectives of one group run one after the other, in the order of their starts
    latency_ms: float  # not slowed by other transfers on the link
    wire_ms: float  # bytes / bandwidth: k groups on a link get 1/k of it each

    @property
    def ms(self) -> float:
        return self.latency_ms + self.wire_ms


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node."""

    compute_ms: float = 0.0  # on the compute stream
    transfer: Transfer | None = None  # a start's is asynchronous; that of an op of fusedcomm runs beside its matmul
    fused_ms: float | None = None  # all of an op of fusedcomm, or of a collective without a wait, alone on its link

    @property
    def ms(self) -> float:
        """The time from when the node runs until its result can be read, if nothing else runs."""
        if self.fused_ms is not None:
            return self.fused_ms
        return self.compute_ms + (self.transfer.ms if self.transfer is not None else 0.0)
