"""The argument `wire` of the ops in graphs: ranks whose ops stand for one collective understand each other."""

from collections.abc import Iterable

from torch.fx import Node

from fusedcomm.compile.graph.collectives import set_argument
from fusedcomm.compile.graph.layout import Factor
from fusedcomm.compile.graph.rewrite import consecutive
from fusedcomm.plan.planner import CALL, GRAPH

# In the metadata of a collective that ranks changed together: the digest that they agreed to.
AGREED = "fusedcomm_changed_by"


def of(start: Node) -> str:
    """The wire of an op in place of the collective started here."""
    return _text(start.meta.get(AGREED))


def keeps_order(chunk: Iterable[Factor], sent: Iterable[Factor], blocks: Factor) -> bool:
    """Whether an op that sends ``chunk``'s order of factors sends elements in the collective's order, ``sent``."""
    ours, its = ([f for f in order if f not in blocks.leaves()] for order in (chunk, sent))
    return len(consecutive(its, ours)) <= 1


def agreed(nodes: Iterable[Node], digest: str) -> None:
    """Note that ranks changed these collectives together: a rank that has them as they were is told, never served."""
    for node in nodes:
        node.meta[AGREED] = digest
        set_argument(node, "wire", lambda wire: wire if wire == CALL else _text(digest))


def _text(digest: str | None) -> str:
    return GRAPH if digest is None else f"{GRAPH} {digest[:8]}"
