"""The memory that an order of a graph needs: allocations of each node, and frees after the last use.

The fake tensors of a wait, and of a graph that was traced with real tensors, have storages of their own: there the
schemas say which results are views. Results live until the end.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import WAITS
from fusedcomm.compile.graph.effects import writes_before_end
from fusedcomm.compile.graph.layout import assumed
from fusedcomm.compile.graph.split_cat import argument_of


class Memory:
    """The storages of a graph, numbered. Lists go by a node's index in ``nodes``."""

    def __init__(self, graph: Graph, nodes: Sequence[Node], waits_for: Sequence[Sequence[int]]) -> None:
        self.bytes: list[int] = []
        self.makes: list[list[int]] = [[] for _ in nodes]  # the storages that a node allocates
        self.touches: list[list[int]] = [[] for _ in nodes]  # live while the node runs, its own results included
        self.of: list[list[int]] = [[] for _ in nodes]  # the storages that hold the node's results
        index = {node: i for i, node in enumerate(nodes)}
        numbers: dict[int, int] = {}
        kept = _kept(graph)
        in_place = writes_before_end(graph)  # if so, a possible view counts as one
        attributes: dict[str, list[int]] = {}
        self._starts_with: list[int] = []
        for i, node in enumerate(nodes):
            reads = [storage for each in node.all_input_nodes for storage in self.of[index[each]]]
            for start in waits_for[i]:
                reads += self.touches[start]
            shared = self._shared(node, index, in_place)
            if node.op == "get_attr":
                shared = attributes.get(str(node.target), [])
            self.of[i] = self._results(i, node, numbers, shared)
            if node.op == "get_attr":
                attributes.setdefault(str(node.target), self.of[i])
            self.touches[i] = sorted({*reads, *self.of[i]})
            if node.op in ("placeholder", "get_attr"):
                self.makes[i], made = [], self.makes[i]
                self._starts_with += made
                if node in kept:
                    self.touches[i] = []
        self.uses = [0] * len(self.bytes)
        for touched in self.touches:
            for storage in touched:
                self.uses[storage] += 1
        for node in kept:
            for storage in self.of[index[node]]:
                self.uses[storage] += 1  # never freed

    def _shared(self, node: Node, index: dict[Node, int], in_place: bool) -> list[int]:
        """The storages of node's results if these are views, by the node's target."""
        if node.target is operator.getitem and isinstance(node.args[0], Node):
            items, at = self.of[index[node.args[0]]], node.args[1]
            return [items[at]] if isinstance(at, int) and at < len(items) else []
        return [storage for each in _viewed(node, in_place) for storage in self.of[index[each]]]

    def _results(self, i: int, node: Node, numbers: dict[int, int], shared: list[int]) -> list[int]:
        found: list[int] = []
        for val in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(val, Tensor):
                key = _storage(val)
                if key not in numbers and shared:
                    numbers[key] = shared[min(len(found), len(shared) - 1)]
                if key not in numbers:
                    numbers[key] = len(self.bytes)
                    self.bytes.append(num_bytes(val))
                    self.makes[i].append(numbers[key])
                else:
                    self.bytes[numbers[key]] = max(self.bytes[numbers[key]], num_bytes(val))
                found.append(numbers[key])
        return found

    def track(self) -> Tracker:
        return Tracker(self)

    def made(self, i: int) -> int:
        return sum(self.bytes[s] for s in self.makes[i])


class Tracker:
    """Live memory while nodes run one after the other."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.uses = list(memory.uses)
        self.live = sum(memory.bytes[s] for s in memory._starts_with)
        self.peak = self.live

    def run(self, i: int) -> int:
        """Returns the bytes that are live while node i runs."""
        memory = self.memory
        during = self.live + memory.made(i)
        self.live = during
        for storage in memory.touches[i]:
            self.uses[storage] -= 1
            if self.uses[storage] == 0:
                self.live -= memory.bytes[storage]
        self.peak = max(self.peak, during)
        return during


def num_bytes(val: Tensor) -> int:
    """The size of the storage, as far as val reaches; symbolic sizes as in `layout.assumed`."""
    sizes, strides = [assumed(s) for s in val.shape], [assumed(s) for s in val.stride()]
    if 0 in sizes:
        return 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return int(min(reach, math.prod(sizes)) if 0 not in strides else reach) * val.dtype.itemsize


def _storage(val: Tensor) -> int:
    try:
        return int(val.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse or an opaque tensor shares nothing that is known
        return id(val)


def _viewed(node: Node, in_place: bool) -> list[Node]:
    """The inputs that node's results alias for certain; a reshape, as it may copy, counts only if ``in_place``."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target is torch.ops.aten._unsafe_view.default:  # its schema does not say that it is a view
        return node.all_input_nodes
    values = [argument_of(node, name) for name in _viewed_args(node.target, in_place)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Node)]


@functools.cache
def _viewed_args(target: torch._ops.OpOverload, in_place: bool) -> list[str]:
    schema = target._schema
    if target._opname in WAITS:
        return [arg.name for arg in schema.arguments]
    may_copy = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    if (may_copy and not in_place) or all(result.alias_info is None for result in schema.returns):
        return []
    return [arg.name for arg in schema.arguments if arg.alias_info is not None]


def _kept(graph: Graph) -> set[Node]:
    """The inputs that the caller keeps, and the results."""
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    backward = any(node.name.startswith("tangents_") for node in inputs)
    owned = {node for node in inputs if not backward or node.name.startswith("primals_")}
    return owned | set(graph.output_node().all_input_nodes)
