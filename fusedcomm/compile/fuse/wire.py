"""The argument `wire` of the ops in graphs: ranks whose ops stand for one collective understand each other.

An op's chunk has the order of elements that suits its matmul. Only where this is the order in the collective's own
chunk can a peer have another matmul there, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch.fx import Node

from fusedcomm.compile.graph.collectives import Collective, set_argument
from fusedcomm.compile.graph.layout import Factor
from fusedcomm.compile.graph.rewrite import consecutive
from fusedcomm.plan.call_plan import CALL, GRAPH, ORDERED

# In the metadata of a collective that ranks changed together: the digest that they agreed to.
AGREED = "fusedcomm_changed_by"


def of(collective: Collective, chunk: Iterable[Factor], sent: Iterable[Factor], blocks: Factor) -> str:
    """The wire of an op that sends ``chunk``'s order of factors where the collective has ``sent``, with its blocks."""
    ours, its = ([f for f in order if f not in blocks.leaves()] for order in (chunk, sent))
    runs = consecutive(its, ours)  # views that only one rank has may split factors, but no run
    order = [its.index(run[0]) for run in runs]
    positions = [sorted(order).index(at) for at in order]
    return _text(positions if len(positions) > 1 else None, collective.start.meta.get(AGREED))


def plain(start: Node) -> str:
    """The wire of an op that sends what the collective started here does."""
    return _text(start.meta.get(AGREED))


def agreed(nodes: Iterable[Node], digest: str) -> None:
    """Note that ranks changed these collectives together: a rank that has them as they were is told, never served."""
    for node in nodes:
        node.meta[AGREED] = digest
        set_argument(node, "wire", lambda wire: wire if wire == CALL else _text(wire, digest))


def _text(*facts: object) -> str:
    different = [fact for fact in facts if fact not in (None, GRAPH)]
    if not different:
        return GRAPH
    is_ordered = any(isinstance(fact, list) or str(fact).startswith(ORDERED) for fact in different)
    return f"{ORDERED if is_ordered else GRAPH} {hashlib.sha256(repr(different).encode()).hexdigest()[:8]}"
