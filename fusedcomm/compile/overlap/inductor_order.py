"""Inductor's generated code keeps the order of a scheduled graph: collectives, waits, matmuls and other whole kernels.

Inductor moves kernels when it fuses pointwise ops (a fused kernel stands where its first op stood, and pulls up its
inputs, such as a wait) and when it looks for an order of less memory. So each whole kernel of a `mark`ed graph comes
after the one before it, by the same edges without data that Inductor puts between collectives, from each start to its
wait: where nothing is in flight, Inductor finds the order of least memory as it would without this pass. Pointwise
kernels and reductions get no edge: they fuse, and move, as far as the others leave them room.

Importing this imports Inductor, which takes a second.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor import config, custom_graph_pass, ir
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.dependencies import WeakDep
from torch.fx import Graph
from torch.utils._ordered_set import OrderedSet

from fusedcomm import files
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.overlap.program import starts_of

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

_MARK = "fusedcomm_order"
# A pass over kernels that has a uuid must be of this class for Inductor's cache: the former in newer torch, else the
# latter.
_Base: Any = getattr(custom_graph_pass, "CustomSchedulerPass", CustomGraphPass)


def mark(graph: Graph) -> None:
    """Let the graph's order be kept as it is now, from each start to its last wait."""
    nodes = list(graph.nodes)
    index = {node: i for i, node in enumerate(nodes)}
    last_wait = {start: i for i, node in enumerate(nodes) for start in starts_of(node, index)}
    until = 0
    for i, node in enumerate(nodes):
        until = max(until, last_wait.get(i, 0))
        node.meta[_MARK] = i < until  # whether anything is in flight when it is done


def is_marked(graph: Graph) -> bool:
    return any(_MARK in node.meta for node in graph.nodes)


class KeepOrder(_Base):  # type: ignore[misc]
    """A pass that runs right before Inductor fuses, and after the pass that was set before, if any."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        if self.before is not None:
            nodes = self.before(nodes)
        attempt("order", _keep, nodes)
        return nodes

    def uuid(self) -> Any:
        """A key for Inductor's cache, or None if the pass before has none: then Inductor must cache nothing."""
        key = files.cache_key(torch.__version__)
        if self.before is None:
            return key
        key_before = self.before.uuid() if isinstance(self.before, _Base) else None
        return key_before and (key, key_before)


_set: Any = None  # by install()


def install() -> None:
    """Keep the order of marked graphs that are compiled from now on."""
    global _set
    remove()
    keep_order = KeepOrder(config._pre_fusion_custom_pass)
    # Inductor looks only at the class: for a plain function it caches nothing.
    config._pre_fusion_custom_pass = _set = keep_order if keep_order.uuid() is not None else keep_order.__call__


def remove() -> None:
    """Restore the setting before `install()`; a pass that was set since stays."""
    global _set
    current: Any = config._pre_fusion_custom_pass
    if _set is not None and current is _set:
        config._pre_fusion_custom_pass = getattr(current, "__self__", current).before
    _set = None


def _is_whole(node: BaseSchedulerNode) -> bool:
    """Whether node is one call or template: neither a pointwise kernel of Inductor, nor a part of a result."""
    whole = isinstance(node.node, (ir.ExternKernel, ir.TemplateBuffer)) and not isinstance(node.node, ir.MultiOutput)
    return whole and bool(node.outputs)


def _keep(nodes: list[BaseSchedulerNode]) -> None:
    kernels: list[Any] = [node for node in nodes if _is_whole(node)]
    pairs = [(first, second) for first, second in pairwise(kernels) if _in_flight(first)]
    for first, second in pairs:
        # mutating_buf gets an op's name in place of a buffer's, as nothing is mutated.
        second.add_fake_dep(WeakDep(first.outputs[0].get_name(), mutating_buf=second.get_name(), is_fake=True))
    if pairs:
        _find_ancestors(nodes)


def _in_flight(kernel: Any) -> bool:
    return any(origin.meta.get(_MARK) for origin in kernel.node.origins)


def _find_ancestors(nodes: list[BaseSchedulerNode]) -> None:
    """Find ancestors again, with the new edges: by them Inductor tells whether a fusion would make a cycle.

    Scheduler.compute_ancestors does the same, but cannot once ops of a foreach stand in one node.
    """
    found: dict[str, OrderedSet[str]] = {}
    for node in nodes:
        ancestors: OrderedSet[str] = OrderedSet()
        for dep in node.unmet_dependencies:
            op = node.scheduler.name_to_buf[dep.name].defining_op_name()
            ancestors.add(op)
            ancestors |= found.get(op, ())
        node.ancestors = ancestors - node.get_operation_names()
        found.update(dict.fromkeys(node.get_operation_names(), node.ancestors))
