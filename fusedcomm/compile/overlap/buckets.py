"""Collectives of one kind and group that start close together become one: one latency instead of several.

This pays where the compute stream waits for the link, and the tensors are so small that packing and unpacking them
takes less than the latencies that are saved.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.graph.collectives import Collective, functional, read
from fusedcomm.compile.graph.effects import differs_by_rank, writes_before_end
from fusedcomm.compile.graph.layout import CannotFuse
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.views import value
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.node_work import bytes_of
from fusedcomm.compile.overlap.program import Program
from fusedcomm.compile.overlap.timeline import Line, Timeline

aten = torch.ops.aten
LEAST_GAIN = 0.001  # share of the total; for a smaller gain nothing more is tried
MOST_BYTES = 64 << 20  # the most that a bucket sends
ALIGNMENT = 16  # bytes: where a tensor must begin for the fastest loads


Bucket: TypeAlias = "tuple[str, ...]"  # names of the starts, in their order


def find(program: Program, order: Sequence[int], timeline: Timeline, estimator: Estimator) -> list[Bucket]:
    """Buckets that make exposed collectives end earlier. ``timeline``: of the program in ``order``.

    There are none if they could save less than `LEAST_GAIN` of the whole.
    """
    if writes_before_end(program.graph):  # a bucket reads operands later than their collectives would
        return []
    if differs_by_rank(program.nodes):
        return []
    position = {program.nodes[i]: p for p, i in enumerate(order)}
    candidates = _before_exposed(timeline) - estimator.times.keys()
    open_buckets: dict[Any, _Open] = {}
    found = []
    for i in order:
        start = program.nodes[i]
        member = _member(start) if start.name in candidates else None
        if member is None:
            continue
        sent = value(member.sent)
        key = (member.group_name, member.kind, member.reduce_op, sent.dtype, sent.device)
        if key not in open_buckets or not open_buckets[key].takes(member, position, estimator):
            open_buckets[key] = _Open(member, position, estimator)
            found.append(open_buckets[key])
    found = [each for each in found if len(each.names) > 1]
    if sum(each.saved_ms for each in found) < LEAST_GAIN * timeline.total_ms:
        return []
    return [tuple(each.names) for each in found]


class _Open:
    """A bucket that grows as long as it pays."""

    def __init__(self, member: Collective, position: Mapping[Node, int], estimator: Estimator) -> None:
        self.kind, self.group_name, self.group_size = member.kind, member.group_name, member.group_size
        self.names = [member.start.name]
        self.first_wait = position[member.wait]
        self.sent_bytes = bytes_of(member.sent)
        self.apart_ms = estimator.transfer(self.kind, self.sent_bytes, self.group_name).ms
        self.saved_ms = 0.0

    def takes(self, member: Collective, position: Mapping[Node, int], estimator: Estimator) -> bool:
        """Add member if it starts before another is waited for, and saves more than packing takes. Returns whether."""
        sent_bytes = bytes_of(member.sent)
        total, number = self.sent_bytes + sent_bytes, len(self.names) + 1
        apart_ms = self.apart_ms + estimator.transfer(self.kind, sent_bytes, self.group_name).ms
        together_ms = estimator.transfer(self.kind, total, self.group_name).ms + estimator.copy_ms(total)
        if self.kind in ("all_gather", "all_to_all"):  # the result is ordered by rank, so parts are copied out
            received = total * (self.group_size if self.kind == "all_gather" else 1)
            together_ms += number * estimator.copy_ms(received / number)
        if position[member.start] > self.first_wait or total > MOST_BYTES or together_ms >= apart_ms:
            return False
        self.names.append(member.start.name)
        self.first_wait = min(self.first_wait, position[member.wait])
        self.sent_bytes, self.apart_ms, self.saved_ms = total, apart_ms, apart_ms - together_ms
        return True


def rewrite(graph: Graph, found: Sequence[Bucket]) -> dict[str, Bucket]:
    """Merge each bucket; returns the buckets by the names of their starts.

    The graph must have the same order as when the buckets were found.
    """
    nodes = {node.name: node for node in graph.nodes}
    rewriter, made = Rewriter(graph), {}
    for bucket in found:
        members = [read(nodes[name]) for name in bucket]
        first_wait = min(member.wait for member in members)
        with rewriter.before(members[-1].start, like=members[0].start):
            start = _start(rewriter, members)
        with rewriter.before(first_wait, like=members[0].wait):
            results = _results(rewriter, members, rewriter.call(functional.wait_tensor.default, start))
        for member, result in zip(members, results, strict=True):
            rewriter.replace(member.wait, result)
        made[start.name] = bucket
    return made


def _before_exposed(timeline: Timeline) -> set[str]:
    """Names of the exposed collectives, and of their predecessors on the link without a gap."""
    links: dict[str, list[Line]] = {}
    for line in timeline.collectives:
        links.setdefault(line.link, []).append(line)
    names: set[str] = set()
    for lines in links.values():
        lines.sort(key=lambda line: line.start_ms, reverse=True)
        exposed = False
        for line, later in zip(lines, [None, *lines], strict=False):
            gap = later is not None and later.start_ms > line.end_ms + 1e-6
            exposed = line.exposed_ms > 0 or (exposed and not gap)
            if exposed:
                names.add(line.node)
    return names


def _member(start: Node) -> Collective | None:
    """The collective that start begins, if it can be sent with others."""
    try:
        collective = read(start)
        sent, received = value(collective.sent), value(collective.wait)
    except (CannotFuse, KeyError, IndexError, ValueError):  # its form or its group is not known
        return None
    if not all(isinstance(size, int) for size in (*sent.shape, *received.shape)):
        return None
    num_blocks = 1 if collective.kind in ("all_gather", "all_reduce") else collective.group_size
    block_bytes = sent.numel() // num_blocks * sent.dtype.itemsize
    return collective if block_bytes and block_bytes % ALIGNMENT == 0 else None


def _start(rewriter: Rewriter, members: Sequence[Collective]) -> Node:
    first = members[0]
    rows = 1 if first.kind in ("all_gather", "all_reduce") else first.group_size
    blocks = [rewriter.reshape(each.sent, [rows, value(each.sent).numel() // rows]) for each in members]
    sent = rewriter.call(aten.cat.default, blocks, 1)
    _, *others = first.start.args
    if first.kind == "all_to_all":
        others[:2] = [[1] * rows] * 2  # a row for each rank
    else:
        sent = rewriter.reshape(sent, [value(sent).numel()])
    return rewriter.call(first.start.target, sent, *others)


def _results(rewriter: Rewriter, members: Sequence[Collective], received: Node) -> list[Node]:
    """Contiguous replacements of the members' waits."""
    first = members[0]
    if first.kind == "all_gather":
        received = rewriter.reshape(received, [first.group_size, value(received).numel() // first.group_size])
    dim = value(received).ndim - 1
    num_blocks = 1 if dim == 0 else first.group_size
    ends = [0]
    for member in members:
        ends.append(ends[-1] + value(member.wait).numel() // num_blocks)
    results = []
    for member, (begin, end) in zip(members, pairwise(ends), strict=True):
        own = rewriter.call(aten.slice.Tensor, received, dim, begin, end)
        if dim == 1:
            own = rewriter.call(aten.clone.default, own, memory_format=torch.contiguous_format)
        results.append(rewriter.call(aten.view.default, own, list(value(member.wait).shape)))
    return results
