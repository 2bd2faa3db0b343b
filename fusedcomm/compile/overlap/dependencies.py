"""Dependencies between nodes beyond their arguments: writes, effects, messages.

A wait reads and writes the same memory as its start: until the wait, the collective may still do so.
"""

from collections.abc import Sequence

from torch.fx import Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph import opaque
from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.effects import differs_by_rank, has_effects, is_builtin
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.compile.overlap.memory import Memory


def predecessors(nodes: Sequence[Node], waits_for: Sequence[Sequence[int]], memory: Memory) -> list[list[int]]:
    """For each node, the indices of the nodes that it must stay after."""
    index = {node: i for i, node in enumerate(nodes)}
    before = [{index[each] for each in node.all_input_nodes} for node in nodes]
    writes = [_writes(node, index, memory) for node in nodes]
    for i, starts in enumerate(waits_for):
        writes[i] = writes[i].union(*(writes[start] for start in starts))
    written = set().union(*writes)
    last_write: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    last_effect = -1
    ordered = differs_by_rank(nodes)
    for i, node in enumerate(nodes):
        before[i] |= set(waits_for[i])
        for storage in memory.touches[i]:
            if storage not in written:
                continue
            if storage in last_write:
                before[i].add(last_write[storage])
            if storage in writes[i]:
                before[i] |= set(reads.pop(storage, ()))
                last_write[storage] = i
            else:
                reads.setdefault(storage, []).append(i)
        if has_effects(node) or (ordered and _communicates(node)):
            if last_effect >= 0:
                before[i].add(last_effect)
            last_effect = i
        if node.op == "output":
            before[i] |= set(range(i))
        before[i].discard(i)
    return [sorted(each) for each in before]


def _communicates(node: Node) -> bool:
    """Whether node starts a collective, or has one inside, as ops of fusedcomm and of other packages."""
    return kind_of(node) is not None or argument_of(node, "group_name") is not None or opaque.name_of(node) is not None


def _writes(node: Node, index: dict[Node, int], memory: Memory) -> set[int]:
    """The storages that node writes to, except its own results."""
    if node.op in ("placeholder", "get_attr", "output"):
        return set()
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.op != "call_function":
        inputs = [] if is_builtin(node) else node.all_input_nodes  # a higher-order op may write to all that it gets
        return {storage for each in inputs for storage in memory.of[index[each]]}
    return {
        storage
        for arg in schema.arguments
        if arg.alias_info is not None and arg.alias_info.is_write
        for each in pytree.tree_leaves(argument_of(node, arg.name))
        if isinstance(each, Node)
        for storage in memory.of[index[each]]
    }
