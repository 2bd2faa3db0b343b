"""Functional collectives in a graph: a start, its wait, and their effect on a layout."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.fx import Graph, Node

from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, hint, refuse, size_of
from fusedcomm.compile.graph.split_cat import argument_of, index_of
from fusedcomm.compile.graph.views import block, value
from fusedcomm.memory import group

functional = torch.ops._c10d_functional
POINT_TO_POINT = ("isend", "irecv", "batch_p2p_ops")
UNEVEN = "fusedcomm_uneven"  # in the metadata of a start: why it must stay as it is, or None; see `normalize`
SPLITS = ("output_split_sizes", "input_split_sizes")
WAITS = ("wait_tensor", "wait_tensors")  # torch 2.11 to 2.13 lack the second, which is for coalesced collectives

STARTS = {
    functional.all_to_all_single.default: "all_to_all",
    functional.all_gather_into_tensor.default: "all_gather",
    functional.reduce_scatter_tensor.default: "reduce_scatter",
    functional.all_reduce.default: "all_reduce",
}


@dataclass(frozen=True)
class Collective:
    """One collective. ``wait`` is its result."""

    kind: str
    start: Node
    wait: Node
    group_size: int
    group_name: str
    reduce_op: str | None = None

    @property
    def sent(self) -> Node:
        return self.start.args[0]  # type: ignore[return-value]

    def received(self, sent: Layout) -> tuple[Layout, Factor, Factor]:
        """Returns (layout of the result, factor of the blocks sent, factor of the sources)."""
        sources = Factor(self.group_size)
        if self.kind == "all_gather":
            return sent.insert(0, sources), sources, sources
        blocks = block(sent, self.group_size)
        received = sent.without(blocks)
        if self.kind == "reduce_scatter":
            return received, blocks, blocks
        return received.insert(0, sources), blocks, sources


def kind_of(node: Node) -> str | None:
    """The kind of collective that node starts, whether it can be fused or not; None if it starts none."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target in STARTS:
        return STARTS[node.target]
    namespace, name = node.target._schema.name.split("::")
    if name == "shard_dim_alltoall" and namespace == "_dtensor":
        return "all_to_all"
    if namespace == "_c10d_functional" and name not in (*WAITS, "_wrap_tensor_autograd"):
        return name
    return None


def group_name_of(node: Node) -> Any:
    """The group of a collective or of an op of fusedcomm; None for other nodes."""
    name = argument_of(node, "group_name")
    return name if isinstance(name, str) else getattr(name, "group_name", None)


def set_argument(node: Node, name: str, changed: Callable[[Any], Any]) -> None:
    """Change an op's argument that is given by position."""
    at = index_of(node.target, name) if isinstance(node.target, torch._ops.OpOverload) else None
    if at is not None and at < len(node.args):
        node.update_arg(at, changed(node.args[at]))


def find(graph: Graph, kind: str) -> list[Node]:
    return [
        node
        for target, name in STARTS.items()
        if name == kind
        for node in graph.find_nodes(op="call_function", target=target)
    ]


def read(start: Node) -> Collective:
    """The collective of this start. Raises CannotFuse where no op of fusedcomm could replace it."""
    kind = STARTS[start.target]  # type: ignore[index]
    if reason := start.meta.get(UNEVEN):
        raise CannotFuse(reason)
    refuse(start.kwargs, "its arguments are given by name")
    users = list(start.users)
    if len(users) != 1 or users[0].target is not functional.wait_tensor.default:
        raise CannotFuse("its result is not waited for by one wait_tensor")
    return Collective(kind, start, users[0], *group_of(start), argument_of(start, "reduce_op"))


def group_of(start: Node) -> tuple[int, str]:
    """Returns (group_size, group_name). Raises CannotFuse where nothing, or not alike to all ranks, is sent."""
    group_name = argument_of(start, "group_name")
    if not isinstance(group_name, str):
        raise CannotFuse("its group is not known when the graph is compiled")
    group_size = size_of_group(group_name)
    refuse(group_size == 1, "its group has one rank: nothing is exchanged")
    if kind_of(start) == "all_to_all":
        _check_even_splits(start, group_size)
    return group_size, group_name


def communicates(node: Node) -> bool:
    """Whether node takes a place in the sequence of collectives, which all ranks must keep."""
    return kind_of(node) is not None or is_op(node)


def is_op(node: Node) -> bool:
    return getattr(node.target, "namespace", "") == "fusedcomm"


def late_inputs(nodes: Iterable[Node], start: Node) -> set[Node]:
    """The nodes behind start, of these and of all that they are computed from."""
    late: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in late and start < node and node.op != "placeholder":
            late.add(node)
            stack += node.all_input_nodes
    return late


def hoist(nodes: Iterable[Node], start: Node) -> None:
    """Move nodes and their inputs before start: an op that reads them will stand there.

    The op then keeps start's place among the other collectives. Nothing is moved if one of these would.
    """
    late = late_inputs(nodes, start)
    if not any(map(communicates, late)):
        for node in sorted(late):
            start.prepend(node)


def size_of_group(group_name: str) -> int:
    """The number of ranks in the group. Raises CannotFuse."""
    try:
        return group.find(group_name).size()
    except ValueError:
        raise CannotFuse("its group is not known when the graph is compiled") from None


def memberships() -> list[tuple[str, int, list[int]]]:
    """Every group's name, this rank's index in it, and its ranks: graphs of one code differ between ranks by these."""
    groups = (pg for pg in c10d._world.pg_map if pg.rank() >= 0)
    return sorted((pg.group_name, pg.rank(), c10d.get_process_group_ranks(pg)) for pg in groups)


def has_parts_of_other_sizes(node: Node) -> bool:
    """Whether ranks have parts of different sizes here, so that their computations and graphs differ.

    All parts empty counts too: it may be that this rank alone has none. Symbols all count as one number in any plan.
    """
    if node.meta.get(UNEVEN) or argument_of(node, "rank") is not None:
        return True
    sizes = {size for name in SPLITS for size in _sizes(node, name)} - {None}
    return any(not getattr(size, "is_Symbol", False) for size in sizes) and (len(sizes) > 1 or 0 in sizes)


def _check_even_splits(start: Node, group_size: int) -> None:
    """Raises CannotFuse where the parts of an all_to_all are not known to be equal."""
    rows = value(argument_of(start, "input")).shape[0]
    received, sent = (_sizes(start, name) for name in SPLITS)
    refuse(None in (*received, *sent), "its splits are not known when the graph is compiled")
    for values in (received, sent):
        even = len(set(values)) == 1 and len(values) == group_size and _is_block(values[0], rows, group_size)
        if not even or 0 in values:  # all 0: it may be that this rank alone has no part
            raise CannotFuse(f"its splits are not known to be even: it sends {sent} and receives {received} rows")


def _is_block(size: Size, rows: int | torch.SymInt, group_size: int) -> bool:
    """Whether size is rows / R. Of symbolic rows it may be rows // R: torch fails where R does not divide them."""
    if not isinstance(rows, torch.SymInt) or size != size_of(rows // group_size):
        return bool(size * group_size == size_of(rows))
    return not rows.node.has_hint() or hint(rows) % group_size == 0


def _sizes(node: Node, name: str) -> list[Any]:
    """The splits that an argument has; None for one that is not known when the graph is compiled."""
    given = [each.meta.get("val") if isinstance(each, Node) else each for each in argument_of(node, name) or ()]
    return [size_of(each) if isinstance(each, int | torch.SymInt) else None for each in given]
