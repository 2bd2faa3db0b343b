"""What a scheduled graph must keep, found without the pass: writes, random numbers, values, memory, bytes sent.

`Accesses` reads aliases from the operators' schemas, where the pass reads storages from fake tensors. `executed` runs a
graph as one of R ranks that all hold the same data. Collectives take their operands at the start, or late, at the wait.
"""

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fusedcomm.ops.table import OPS
from tests.helpers.random_graphs import RANDOM_OPS, Peers, functional

WAIT = functional.wait_tensor.default
INPUTS = ("placeholder", "get_attr")
Root = tuple[Node, int]  # a result: its node, and which of the node's tensors it is


def is_start(node: Node) -> bool:
    return str(node.target).startswith("_c10d_functional.") and node.target is not WAIT


def results_of(node: Node) -> list[Tensor]:
    return [val for val in pytree.tree_leaves(node.meta.get("val")) if isinstance(val, Tensor)]


def group_of(node: Node) -> str:
    return str(node.args[-1])


class Accesses:
    """What memory each node of an unchanged graph reads and writes."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = list(nodes)
        self.roots: dict[Node, list[list[Root]]] = {}  # for each result, the memory that it is in
        self.touched: dict[Node, set[Root]] = {}
        self.written: dict[Node, set[Root]] = {}
        for node in self.nodes:
            self.roots[node] = self._results(node)
            read = [node] if node.target is operator.getitem else node.all_input_nodes
            self.touched[node] = {root for each in read for root in self._all(each)}
            self.written[node] = self._writes(node)
            if node.target is WAIT:
                start = node.args[0]
                start = start.args[0] if start.target is operator.getitem else start  # type: ignore[union-attr]
                self.touched[node] |= self.touched[start]  # type: ignore[index]
                self.written[node] |= self.written[start]  # type: ignore[index]

    def _all(self, node: Node) -> list[Root]:
        return [root for each in self.roots[node] for root in each]

    def _results(self, node: Node) -> list[list[Root]]:
        if node.target is operator.getitem:
            return [self.roots[node.args[0]][node.args[1]]]  # type: ignore[index]
        vals = results_of(node)
        own = [[(node, i)] for i in range(len(vals))]
        if node.target is WAIT:
            return self.roots[node.args[0]]  # type: ignore[index]
        if node.op != "call_function":
            return own
        schema = node.target._schema  # type: ignore[union-attr]
        for arg, given in zip(schema.arguments, node.args, strict=False):
            if arg.alias_info is not None and any(r.alias_info is not None for r in schema.returns):
                assert isinstance(given, Node)
                return [self._all(given) for _ in vals]
        return own

    def _writes(self, node: Node) -> set[Root]:
        if node.op != "call_function" or node.target is operator.getitem:
            return set()
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        written = [
            given
            for arg, given in zip(arguments, node.args, strict=False)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]
        return {root for each in written if isinstance(each, Node) for root in self._all(each)}

    def violations(self, new: Sequence[Node]) -> list[str]:
        """What the order ``new`` breaks, for nodes that are in both."""
        at = {node: i for i, node in enumerate(new)}
        kept = [node for node in self.nodes if node in at]
        found = [f"{n} is before its input {a}" for n in new for a in n.all_input_nodes if at[a] > at[n]]
        if [node for node in kept if node.op == "placeholder"] != [n for n in new if n.op == "placeholder"]:
            found.append("the inputs are in another order")
        last: dict[Any, list[Node]] = {}
        for node in kept:
            for root in self.touched[node] | self.written[node]:
                for other in last.get(root, []):
                    both_read = root not in self.written[node] and root not in self.written[other]
                    if not both_read and at[other] > at[node]:
                        found.append(f"{node} is before {other}: both touch {root[0]}, and one writes")
                last.setdefault(root, []).append(node)
        draws = [node for node in kept if node.target in RANDOM_OPS]
        if draws != sorted(draws, key=at.__getitem__):
            found.append(f"random numbers are drawn in another order than {draws}")
        return found


def sent(gm: GraphModule) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for node in gm.graph.nodes:
        if is_start(node):
            kind = str(node.target).split(".")[1].removesuffix("_").removesuffix("_coalesced").removesuffix("_out")
            vals = [each.meta["val"] for each in pytree.tree_leaves(node.args[0]) if isinstance(each, Node)]
            found[kind, group_of(node)] += sum(val.numel() * val.itemsize for val in vals)
    return found


def peak_bytes(gm: GraphModule) -> int:
    """The most memory that is live at once. Inputs and results stay; what a start reads stays until its wait."""
    nodes = list(gm.graph.nodes)
    accesses, at = Accesses(nodes), {node: i for i, node in enumerate(nodes)}
    sizes: dict[Root, int] = {}
    first: dict[Root, int] = {}
    last: dict[Root, int] = {}
    for node in nodes:
        vals = results_of(node)
        for val, roots in zip(vals, accesses.roots[node], strict=True):
            for root in roots:
                sizes.setdefault(root, val.numel() * val.itemsize)
                first.setdefault(root, 0 if node.op in INPUTS else at[node])
                last[root] = len(nodes) if node.op in INPUTS else max(last.get(root, 0), at[node])
        for root in accesses.touched[node]:
            last[root] = max(last[root], len(nodes) if node.op == "output" else at[node])
    changes = Counter[int]()
    for root, size in sizes.items():
        changes[first[root]] += size
        changes[last[root] + 1] -= size
    live, peak = 0, 0
    for i in sorted(changes):
        live += changes[i]
        peak = max(peak, live)
    return peak


def executed(gm: GraphModule, inputs: Sequence[Tensor], groups: Sequence[Peers], *, late: bool) -> list[Tensor]:
    """The results, and the inputs afterwards. ``late``: collectives take their operands at the wait."""
    own = [tensor.clone() for tensor in inputs]
    torch.manual_seed(0)
    results = _OneOfEqualRanks(gm, groups, late).run(*own)
    return [*(leaf.clone() for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)), *own]


class _OneOfEqualRanks(Interpreter):
    """Runs a graph. The result of a collective is garbage until the wait."""

    def __init__(self, gm: GraphModule, groups: Sequence[Peers], late: bool) -> None:
        super().__init__(gm)
        self.groups = {group.name: group for group in groups}
        self.late = late
        self.under_way: dict[int, tuple[Tensor, Any]] = {}

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is WAIT:
            result, operand = self.under_way.pop(id(args[0]), (None, None))
            return args[0] if result is None else result.copy_(operand())
        if str(target).startswith("fusedcomm."):
            named = OPS[target._opname].by_name(args)
            return fused(target._opname, args, self.groups[named["group_name"]], named.get("partial_bias"))
        if not str(target).startswith("_c10d_functional."):
            return super().call_function(target, args, kwargs)
        name, group = str(target).split(".")[1], self.groups[args[-1]]
        listed = isinstance(args[0], (list, tuple))
        results = [self._start(name, x, args[1:-1], group) for x in (args[0] if listed else args[:1])]
        return results if listed else results[0]

    def _start(self, name: str, x: Tensor, args: Sequence[Any], group: Peers) -> Tensor:
        now = received(name, x, args, group)
        result = x if name == "all_reduce_" else torch.full_like(now, 77)
        if name == "all_reduce_":
            before = x.clone()
            x.fill_(77)
            self.under_way[id(x)] = (x, lambda: received(name, before, args, group))
        else:
            self.under_way[id(result)] = (
                result,
                (lambda: received(name, x, args, group)) if self.late else lambda: now,
            )
        return result


def received(name: str, x: Tensor, args: Sequence[Any], group: Peers) -> Tensor:
    """The result of a collective if all peers send the same. With uneven splits they send what this rank sends."""
    r = group.size
    if name.startswith("all_reduce"):
        return x * r if args[0] == "sum" else x.clone()
    if name.startswith("all_gather"):
        return torch.cat([x] * r)
    if name.startswith("reduce_scatter"):
        own = x.chunk(r)[group.rank]
        return own * r if args[0] == "sum" else own.clone()
    if name == "broadcast":
        return x.clone()
    assert name == "all_to_all_single", name
    even = len(set(args[0])) == 1
    return torch.cat([x.chunk(r)[group.rank]] * r) if even else x.clone()


def fused(name: str, args: Sequence[Any], group: Peers, partial_bias: Tensor | None = None) -> Any:
    """What an op of fusedcomm returns, if all peers hold the same."""
    x, w, bias, r = args[0], args[1], args[2], group.size
    if name == "matmul_all_reduce":
        return _plus(received("all_reduce", _plus(x @ w, partial_bias), args[3:4], group), bias)
    if name == "matmul_reduce_scatter":
        y = _plus(x @ w, partial_bias)
        return _plus(y.chunk(r, args[4])[group.rank] * (r if args[3] == "sum" else 1), bias)
    if name == "all_gather_matmul":
        gathered = torch.cat([x] * r, args[3])
        return [_plus(gathered @ w, bias) for w, bias in zip(args[1], args[2], strict=True)], gathered
    if name == "matmul_all_to_all":
        y = _plus(x @ w, bias)
        return _exchanged(y.unflatten(-1, args[3]) if args[3] is not None else y, args[4], args[5], group)
    assert name == "all_to_all_matmul", name
    exchanged = _exchanged(x, args[3], args[4], group)
    num_rows = exchanged.numel() // w.shape[-2]
    lead = next(i for i in range(exchanged.ndim + 1) if exchanged.shape[:i].numel() == num_rows)
    return _plus(exchanged.flatten(lead) @ w, bias), exchanged


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def _exchanged(t: Tensor, gather_dim: int, scatter_dim: int, group: Peers) -> Tensor:
    return torch.cat([t.chunk(group.size, scatter_dim)[group.rank]] * group.size, gather_dim)


class Traced:
    """A graph of fake tensors. ``own``: each value has a storage of its own, as after tracing real tensors."""

    def __init__(self, own: bool = False) -> None:
        self.graph, self.root, self.own, self.mode = Graph(), torch.nn.Module(), own, FakeTensorMode()

    def empty(self, like: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)

    def input(self, *shape: int, name: str = "", **options: Any) -> Node:
        node = self.graph.placeholder(name or f"x_{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, **options)
        return node

    def attribute(self, name: str) -> Node:
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = self.empty(getattr(self.root, name))
        return node

    def add(self, op: str, target: Any, args: tuple[Any, ...]) -> Node:
        if op == "call_module":
            self.root.add_module(target, torch.nn.ReLU(inplace=True))
        return self.graph.create_node(op, target, args)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        vals = pytree.tree_map_only(Node, lambda each: each.meta["val"], (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*vals[0], **vals[1])
        if self.own and isinstance(node.meta["val"], Tensor):
            node.meta["val"] = self.empty(node.meta["val"])
        return node

    def waited(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.call(WAIT, self.call(target, *args, **kwargs))

    def returns(self, *results: Node) -> GraphModule:
        self.graph.output(results)
        self.graph.lint()
        return GraphModule(self.root, self.graph)
