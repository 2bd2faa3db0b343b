"""Results of `fused` in place: where a push may write in the results of the peers, and from which heap a result is."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedcomm.geometry.spans import RoundSpans
from fusedcomm.kernels.triton.bundles import InPlace
from fusedcomm.runtime import signals
from fusedcomm.runtime.captures import is_for_capture
from fusedcomm.runtime.workspace import Call, Workspace


class FusedResult:
    """The result of a call that pushes, and what its rounds tell the peers of it.

    ``given``: memory of the caller's, which peers do not write, as it may be anyone's. Where parts differ in size, and
    in CUDA graphs, whose results have a place for good, all goes through the slots.
    """

    def __init__(self, call: Call, like: Tensor, given: Tensor | None) -> None:
        self._call, workspace, shape = call, call.workspace, call.exchange.out_shape
        is_proof = call.posted is not None  # it proves what eager calls do, also before a capture
        has_heap = call.exchange.cut is None and (is_proof or not is_for_capture(workspace.device))
        self._heap = workspace.results if has_heap else None
        self._place: int | None = None  # in this rank's heap
        if given is not None:
            self.tensor = given
        elif self._heap is None:
            self.tensor = like.new_empty(shape)
        else:
            self.tensor = self._heap.empty(shape, like.dtype)
            self._place = self._heap.place(self.tensor)

    def at_peers(self, spans: RoundSpans) -> InPlace | None:
        """Where a round's chunks go in the peers' results, which are as large as this one; None if all go to slots."""
        if self._heap is None:
            return None
        return landing_of(spans, self._call.workspace.rank, self._heap.addresses, self.tensor.nbytes)

    def post(self, spans: RoundSpans) -> bool:
        """Tell the peers where they may write this round. Returns whether there is such a place."""
        if self._place is None or self.at_peers(spans) is None:
            return False
        signals.post(self._place, self.tensor.nbytes, self._call.workspace, self._call.fingerprint)
        if self._call.posted is not None:
            self._call.posted()
        return True


def in_place_from(workspace: Workspace, epoch: int | None = None) -> list[int]:
    """The ranks whose chunks of a round have come in place: of the last round, or of one of the last NUM_SLOTS."""
    epoch = workspace.epoch if epoch is None else epoch
    words = workspace.segment[: workspace.layout.header_bytes].view(torch.int64).tolist()
    marks = [words[workspace.layout.mark(epoch, src) // 8] for src in range(workspace.group_size)]
    return [src for src, mark in enumerate(marks) if mark == epoch > 0]


def landing_of(spans: RoundSpans, rank: int, heaps: Tensor, num_bytes: int) -> InPlace | None:
    """Where the chunks of ``rank`` go in results of ``num_bytes``; None where their rows would not stay whole."""
    landing, num_columns = spans.unpack.of(rank), spans.columns.size
    if spans.by_peer or landing.size == 0 or landing.inner % num_columns:
        return None
    return InPlace(heaps, num_bytes, landing.start, landing.inner // num_columns, landing.outer_stride)
