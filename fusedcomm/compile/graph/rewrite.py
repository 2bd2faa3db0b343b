"""Adds nodes to a graph, with the metadata that later passes need, and removes them on failure."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map
from torch.utils._sympy.functions import FloorDiv

from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, Size, hint, product, size_of

aten = torch.ops.aten
STANDS_FOR = "fusedcomm_stands_for"  # in the metadata: the value of the node that this one has replaced
_OPERATORS = {sympy.Add: operator.add, sympy.Mul: operator.mul, sympy.Pow: operator.pow, FloorDiv: operator.floordiv}
_INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "seq_nr",
    "from_node",
    "custom",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "autograd_backward",
)


class Rewriter:
    """Adds nodes before one place of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.created: list[Node] = []  # the nodes that the last `before` added
        self.erased: list[str] = []  # the names of the nodes erased since
        self._like: Node | None = None
        self._place: Node | None = None  # new nodes stand before it, or at the end
        self._sizes: dict[sympy.Expr, Node] = {}

    @contextmanager
    def before(self, node: Node, like: Node) -> Iterator[None]:
        """New nodes stand before ``node``, with the origin of ``like`` in their metadata. All or none are added."""
        self.created, self.erased, self._like = [], [], like
        outer, self._place = self._place, node
        try:
            with self.graph.inserting_before(node):
                yield
        except Exception:
            for created in reversed(self.created):
                self.graph.erase_node(created)
            raise
        finally:
            self._place = outer

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call; sizes may be symbolic."""
        args = tree_map(lambda a: self.size(a) if isinstance(a, sympy.Expr) else a, args)
        node = self.graph.call_function(target, args, kwargs)
        self.created.append(node)
        node.meta["val"] = computed(target, args, kwargs)
        if self._like is not None:
            node.meta.update({key: self._like.meta[key] for key in _INHERITED if key in self._like.meta})
        return node

    def size(self, size: Size) -> int | Node:
        """A node with the value ``size``, before the place of new nodes. Raises CannotFuse."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        known = self._sizes.get(size)
        if known is not None and not known._erased and (self._place is None or known < self._place):
            return known
        op = _OPERATORS.get(size.func)
        made = self._found(size) if op is None else reduce(partial(self.call, op), map(self.size, size.args))
        self._sizes[size] = made  # type: ignore[assignment]
        return made

    def _found(self, size: Size) -> Node:
        for node in self.graph.nodes:
            if node is self._place:
                break
            val = node.meta.get("val")
            if isinstance(val, torch.SymInt) and size_of(val) == size:
                return node
        raise CannotFuse(f"no node of the graph has the size {size}")

    def reshape(self, node: Node, shape: Sequence[Size]) -> Node:
        if [size_of(s) for s in node.meta["val"].shape] == list(shape):
            return node
        return self.call(aten.reshape.default, node, list(shape))

    def arrange(self, node: Node, order: Sequence[Factor], layout: Layout) -> Node:
        """Rearrange ``node``, with factors in ``order``, to ``layout``."""
        runs = consecutive(order, layout.order)
        if len(runs) > 1:
            now = sorted(runs, key=lambda run: list(order).index(run[0]))
            node = self.reshape(node, sizes(now))
            node = self._permute(node, [now.index(run) for run in runs])
        return self.reshape(node, layout.shape)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        same = node.meta["val"].dtype == dtype
        return node if same else self.call(torch.ops.prims.convert_element_type.default, node, dtype)

    def viewed(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype == dtype else self.call(aten.view.dtype, node, dtype)

    def contiguous(self, node: Node) -> Node:
        if node.meta["val"].is_contiguous():
            return node
        return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def result(self, new: Node, old: Node) -> Node:
        """``new`` made to stand for ``old``: cast to its dtype, and with its strides where the user sees them."""
        like, new = old.meta["val"], self.cast(new, old.meta["val"].dtype)
        if new.meta["val"].stride() == like.stride() or not _is_visible(old):
            return new
        return self.strided(new, like)

    def strided(self, node: Node, like: torch.Tensor) -> Node:
        """A copy with the dim order of ``like`` in memory."""
        order = sorted(range(like.ndim), key=lambda d: -hint(like.stride()[d]))
        back = [order.index(d) for d in range(like.ndim)]
        copy = self.call(aten.clone.default, self._permute(node, order), memory_format=torch.contiguous_format)
        return self._permute(copy, back)

    def _permute(self, node: Node, dims: list[int]) -> Node:
        return node if dims == sorted(dims) else self.call(aten.permute.default, node, dims)

    def replace(self, old: Node, new: Node) -> None:
        """Put new in old's place everywhere, and erase old with its inputs that are unused then."""
        stand_for(old, new)
        old.replace_all_uses_with(new)
        self.erase_unused(old)

    def erase_unused(self, node: Node) -> None:
        """Erase node if it is unused, and inputs that only it used, recursively."""
        unused = [node]
        while unused:
            node = unused.pop()
            if not (node.users or node.op != "call_function" or node._erased):
                inputs = node.all_input_nodes
                self.erased.append(node.name)
                self.graph.erase_node(node)
                unused += [each for each in inputs if not each.users]


def computed(target: Any, args: Any, kwargs: Any) -> Any:
    """The value of a call on nodes: fake tensors, where theirs are."""
    args, kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
    with torch._guards.detect_fake_mode((args, kwargs)) or nullcontext():
        return target(*args, **kwargs)


@contextmanager
def held_outputs(graph: Graph) -> Iterator[None]:
    """Each result gets a node of its own, since replacing one argument of the output node means looking at all."""
    output = graph.output_node()
    with graph.inserting_before(output):
        held = {node: graph.call_function(returned, (node,)) for node in output.all_input_nodes}
    output.args = map_arg(output.args, held.__getitem__)
    try:
        yield
    finally:
        output.args = map_arg(output.args, lambda holder: holder.args[0])
        for holder in held.values():
            graph.erase_node(holder)


@contextmanager
def hidden_from(node: Node, users: Sequence[Node]) -> Iterator[None]:
    """These users read something else instead of node meanwhile."""
    with node.graph.inserting_before(node):
        other = node.graph.placeholder("other")
    other.meta.update(node.meta)
    try:
        for user in users:
            user.replace_input_with(node, other)
        yield
    finally:
        other.replace_all_uses_with(node)
        node.graph.erase_node(other)


def returned(result: Any) -> Any:
    """Stands for the output node, as a user of one of its arguments, while passes run."""
    return result


def _is_visible(node: Node) -> bool:
    """Whether the user's function returns node, or a view of it."""
    (output,) = node.graph.find_nodes(op="output")
    visible = output.meta.get("user_visible_output_idxs")
    if visible is None:  # in Inductor's graph, where it is set, views copy where they must
        return True
    results = {output.args[0][i].args[0] for i in visible}  # type: ignore[index]
    views = [node]
    for view in views:  # the list grows meanwhile
        if view in results:
            return True
        views += [user for user in view.users if _is_view(user)]
    return False


def _is_view(node: Node) -> bool:
    if node.target in (operator.getitem, aten.reshape.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def consecutive(order: Sequence[Factor], wanted: Sequence[Factor]) -> list[list[Factor]]:
    """Cut ``wanted`` into as few runs as possible that are contiguous in ``order`` too."""
    follows = dict(pairwise(order))
    runs: list[list[Factor]] = []
    for factor in wanted:
        if runs and follows.get(runs[-1][-1]) is factor:
            runs[-1].append(factor)
        else:
            runs.append([factor])
    return runs


def group_factors(factors: Sequence[Factor], breaks: Sequence[Factor]) -> list[list[Factor]]:
    """Consecutive factors joined to dims; a new dim begins at each of ``breaks``. There is at least one dim."""
    dims: list[list[Factor]] = []
    for factor in factors:
        if not dims or factor in breaks:
            dims.append([])
        dims[-1].append(factor)
    return dims or [[]]


def sizes(dims: Sequence[Sequence[Factor]]) -> list[Size]:
    return [product(factor.size for factor in dim) for dim in dims]


def stand_for(old: Node, new: Node) -> None:
    """Note the strides of old, as traced by its readers, on new; see `strides.settle`."""
    new.meta.setdefault(STANDS_FOR, old.meta.get(STANDS_FOR, old.meta.get("val")))
