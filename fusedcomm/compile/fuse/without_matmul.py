"""A collective without a matmul becomes the plain op of its kind, which peers that fuse theirs with one understand."""

from typing import Any

import torch
from torch.fx import Node

from fusedcomm.compile.fuse import wire
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.layout import refuse
from fusedcomm.compile.graph.matmuls import DTYPES
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.graph.views import WAIT, is_read, sizes_of, value
from fusedcomm.plan.geometry.cut import EVEN
from fusedcomm.plan.geometry.shapes import REDUCE_OPS
from fusedcomm.plan.scaling import BYTES, VALUES

aten = torch.ops.aten


def rewrite(rewriter: Rewriter, start: Node) -> Node:
    """The op in the place of the collective that starts here and of its waits. Raises CannotFuse.

    What it refuses follows from what is sent, as on all ranks, and not from what stands beside it on this one.
    """
    kind, sent = collectives.STARTS[start.target], argument_of(start, "input")  # type: ignore[index]
    dtype, reduce_op = value(sent).dtype, argument_of(start, "reduce_op")
    refuse(dtype not in (*DTYPES, *(BYTES if reduce_op is None else ())), f"no op sends {dtype}")
    refuse(reduce_op not in (None, *REDUCE_OPS), f"reduce_op must be sum or avg, got {reduce_op}")
    others = (*collectives.group_of(start), wire.of(start))
    with rewriter.before(start, like=start):
        x = sent if value(sent).ndim else rewriter.reshape(sent, [1])
        x = rewriter.viewed(x, VALUES[0]) if dtype == torch.uint8 else x
        result = op = _call(rewriter, kind, start, x, reduce_op, others)
        if kind == "all_to_all":
            result = rewriter.call(aten.squeeze.dim, op, 0)
        elif not value(start).ndim:
            result = rewriter.reshape(op, [])
        result = rewriter.viewed(result, dtype)
        if value(result).stride() != value(start).stride():
            result = rewriter.strided(result, value(start))
        if not is_read(start):
            rewriter.call(WAIT, op)  # keeps it: Inductor drops unread nodes
    waits = [start]
    for node in waits:  # the list grows meanwhile: results are waited for several times
        waits += [user for user in node.users if user.target is WAIT]
    for node in reversed(waits):
        if not node._erased:
            rewriter.replace(node, result)
    return op


def _call(rewriter: Rewriter, kind: str, start: Node, x: Node, reduce_op: Any, others: tuple[Any, ...]) -> Node:
    ops = torch.ops.fusedcomm
    if kind == "all_gather":
        return rewriter.call(ops.all_gather.default, x, 0, *EVEN.to_gather, *others)
    if kind == "reduce_scatter":
        return rewriter.call(ops.reduce_scatter.default, x, reduce_op, 0, *EVEN.to_scatter, *others)
    if kind == "all_reduce":
        return rewriter.call(ops.all_reduce.default, x, reduce_op, *others)
    rows, read = argument_of(start, "input_split_sizes")[0], aten.sym_size.int  # symbols are no reason to refuse
    inner = [s if isinstance(s, int) else rewriter.call(read, x, d) for d, s in enumerate(sizes_of(value(x))[1:], 1)]
    blocks = rewriter.call(aten.reshape.default, x, [others[0], rows, *inner])
    return rewriter.call(ops.all_to_all.default, blocks, 1, 0, *EVEN, *others)
