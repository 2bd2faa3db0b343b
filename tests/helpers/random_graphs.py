"""Random FX graphs that compute something: collectives of several groups, matmuls, views, writes, random numbers.

Every tensor holds small integers, so that sums are exact in any order. The same seed and sizes of groups make the same
graph on every rank, except for the names of groups. No graph has a race: what a collective reads is not written, and
what it writes is not touched, until its wait.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

aten, functional = torch.ops.aten, torch.ops._c10d_functional

# integers up to these are exact, with room for a sum over ranks
LIMITS = {torch.float32: 1 << 20, torch.float64: 1 << 30, torch.bfloat16: 128, torch.int64: 1 << 40}
DTYPES = [torch.float32] * 4 + [torch.bfloat16, torch.float64]
SIZES = [1, 2, 3, 4, 4, 5, 8, 8, 12]
RANDOM_OPS = (aten.rand_like.default, aten.native_dropout.default)


@dataclass(frozen=True)
class Peers:
    """A group as this rank sees it."""

    name: str
    size: int
    rank: int


def build(rng: random.Random, groups: Sequence[Peers], steps: int, *, unwaited: bool = False) -> GraphModule:
    """``unwaited``: some collectives are never waited for."""
    return _Builder(rng, groups).build(steps, unwaited)


def inputs(gm: GraphModule, seed: int) -> list[Tensor]:
    """Small integers for the placeholders."""
    generator = torch.Generator().manual_seed(seed)
    vals = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [torch.randint(-2, 3, tuple(val.shape), generator=generator).to(val.dtype) for val in vals]


def storage(val: Tensor) -> int:
    return int(val.untyped_storage()._cdata)


class _Builder:
    def __init__(self, rng: random.Random, groups: Sequence[Peers]) -> None:
        self.rng, self.groups = rng, groups
        self.graph, self.mode, self.module = Graph(), FakeTensorMode(), torch.nn.Module()
        self.last_input: Node | None = None
        self.values: list[Node] = []  # tensors that can be read
        self.bounds: dict[int, float] = {}  # by storage: the largest absolute value
        self.pending: list[tuple[Node, list[Node]]] = []  # starts not waited for yet, and what they read
        self.reads: dict[int, int] = {}  # by storage: how many collectives under way read it
        self.waited: dict[int, int] = {}  # storages of waits, by what was waited for, which is the same memory
        self.touched: set[int] = set()  # storages that collectives under way write in place

    def build(self, steps: int, unwaited: bool) -> GraphModule:
        for _ in range(self.rng.randint(2, 4)):
            self.placeholder([self.size(), self.size()])
        moves: list[Callable[[], Any]] = [self.pointwise] * 3 + [self.matmul] * 3 + [self.view] * 3 + [self.wait] * 4
        moves += [self.collective] * 4 + [self.chain, self.draw, self.cast, self.reduce, self.cat]
        moves += [self.coalesced, self.constant, self.sharded_layers, self.gradients, self.experts]
        if self.rng.random() < 0.5:  # otherwise it can be fused and merged too
            moves += [self.write] * 2 + [self.in_place]
        for _ in range(steps):
            self.rng.choice(moves)()
        while self.pending:
            if unwaited and self.rng.random() < 0.2:
                self.pending.pop()
            else:
                self.wait()
        some = self.rng.sample(self.values, min(len(self.values), self.rng.randint(1, 6)))
        self.graph.output((tuple(some), None) if self.rng.random() < 0.3 else tuple(some))
        self.graph.lint()
        return GraphModule(self.module, self.graph)

    # nodes

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Node:
        front = self.graph.inserting_after(self.last_input) if self.last_input else self.graph.inserting_before(None)
        with front:
            node = self.graph.placeholder(f"input_{sum(n.op == 'placeholder' for n in self.graph.nodes)}")
        self.last_input = node
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype or self.rng.choice(DTYPES))
        self.bounds[self.memory(node.meta["val"])] = 2
        self.values.append(node)
        return node

    def constant(self) -> None:
        """A tensor of the module, which nothing writes."""
        name = f"constant_{len(self.values)}"
        tensor = torch.ones(self.size(), self.size())
        self.module.register_buffer(name, tensor)
        node = self.graph.create_node("get_attr", name)
        node.meta["val"] = self.mode.from_tensor(tensor)
        self.bounds[self.memory(node.meta["val"])] = 1
        self.reads[self.memory(node.meta["val"])] = 1
        self.values.append(node)

    def call(self, target: Any, *args: Any, bound: float | None = None, **kwargs: Any) -> Node:
        """Add a node. ``bound``: the largest absolute value, or None for a view."""
        node = self.graph.call_function(target, args, kwargs)
        vals = pytree.tree_map_only(Node, lambda n: n.meta["val"], (args, kwargs))
        with self.mode:
            node.meta["val"] = target(*vals[0], **vals[1])
        for val in pytree.tree_leaves(node.meta["val"]):
            if bound is not None:
                self.bounds[self.memory(val)] = max(bound, self.bounds.get(self.memory(val), 0))
        if isinstance(node.meta["val"], Tensor):
            self.values.append(node)
        return node

    def getitem(self, node: Node, i: int) -> Node:
        import operator

        item = self.graph.call_function(operator.getitem, (node, i))
        item.meta["val"] = node.meta["val"][i]
        self.values.append(item)
        return item

    def memory(self, val: Tensor) -> int:
        key = storage(val)
        return self.waited.get(key, key)

    # what there is to choose from

    def size(self) -> int:
        return self.rng.choice(SIZES)

    def group(self) -> Peers:
        return self.rng.choice(self.groups)

    def bound(self, node: Node) -> float:
        return self.bounds[self.memory(node.meta["val"])]

    def pick(self, allowed: Callable[[Tensor], bool] = lambda val: True) -> Node | None:
        """One of the values that are not being written: mostly a late one."""
        found = [n for n in self.values if self.memory(n.meta["val"]) not in self.touched and allowed(n.meta["val"])]
        if not found:
            return None
        return self.rng.choice(found[-6:] if self.rng.random() < 0.6 else found)

    def any(self, allowed: Callable[[Tensor], bool] = lambda val: True) -> Node:
        node = self.pick(allowed)
        return node if node is not None else self.placeholder([8, 4], torch.float32)

    def small(self, node: Node, factor: float) -> Node:
        """The node, clamped if ``factor`` times its values would not be exact."""
        if self.bound(node) * factor <= LIMITS[node.meta["val"].dtype]:
            return node
        return self.call(aten.clamp.default, node, -2, 2, bound=2)

    # compute

    def pointwise(self) -> None:
        x = self.any()
        val, op = x.meta["val"], self.rng.choice(["relu", "neg", "clone", "clamp", "add", "sub", "mul"])
        if op == "clamp":
            self.call(aten.clamp.default, x, -2, 2, bound=2)
        elif op in ("relu", "neg", "clone"):
            self.call(getattr(aten, op).default, x, bound=self.bound(x))
        else:
            x = self.small(x, 2 if op != "mul" else self.bound(x))
            y = self.any(lambda other: other.shape == val.shape and other.dtype == val.dtype)
            y = y if y.meta["val"].shape == val.shape and y.meta["val"].dtype == val.dtype else x
            y = self.small(y, 2 if op != "mul" else max(1, self.bound(x)))
            both = self.bound(x) * self.bound(y) if op == "mul" else self.bound(x) + self.bound(y)
            self.call(getattr(aten, op).Tensor, x, y, bound=both)

    def matmul(self) -> None:
        x = self.any(lambda val: val.ndim == 2 and val.is_floating_point() and val.numel() > 0)
        k, dtype = x.meta["val"].shape[1], x.meta["val"].dtype
        w = self.pick(lambda val: val.ndim == 2 and val.shape[0] == k and val.dtype == dtype)
        if w is None or self.rng.random() < 0.3:
            w = self.placeholder([k, self.size()], dtype)
        self.product(x, w)

    def product(self, x: Node, w: Node) -> Node:
        k = max(1, x.meta["val"].shape[1])
        x, w = self.small(x, k * 2), self.small(w, k * 2)
        if self.bound(x) * self.bound(w) * k > LIMITS[x.meta["val"].dtype]:
            x, w = (self.call(aten.clamp.default, each, -1, 1, bound=1) for each in (x, w))
        return self.call(aten.mm.default, x, w, bound=self.bound(x) * self.bound(w) * k)

    def view(self) -> Node:
        x = self.any(lambda val: val.ndim > 0)
        val = x.meta["val"]
        op = self.rng.choice(["view", "t", "slice", "split", "unsqueeze", "select"])
        dim = self.rng.randrange(val.ndim)
        if op == "view" and val.is_contiguous():
            shape = [-1] if val.ndim != 1 else [math.gcd(val.numel(), 4), val.numel() // math.gcd(val.numel(), 4)]
            return self.call(aten.view.default, x, shape)
        if op == "t" and val.ndim == 2:
            return self.call(aten.t.default, x)
        if op == "slice" and val.shape[dim] > 1:
            return self.call(aten.slice.Tensor, x, dim, self.rng.randint(0, 1), val.shape[dim])
        if op == "split" and val.shape[dim] > 1:
            parts = self.call(aten.split.Tensor, x, (val.shape[dim] + 1) // 2, dim)
            for i in range(len(parts.meta["val"])):
                self.getitem(parts, i)
            return parts
        if op == "select" and val.shape[dim] > 0 and val.ndim > 1:
            return self.call(aten.select.int, x, dim, 0)
        return self.call(aten.unsqueeze.default, x, dim) if val.ndim < 4 else x

    def reduce(self) -> None:
        x = self.any(lambda val: val.ndim > 0)
        x = self.small(x, max(1, x.meta["val"].shape[0]))
        bound = self.bound(x) * max(1, x.meta["val"].shape[0])
        self.call(aten.sum.dim_IntList, x, [0], dtype=x.meta["val"].dtype, bound=bound)

    def cat(self) -> None:
        x, val = (node := self.any(lambda val: val.ndim > 0)), node.meta["val"]
        y = self.any(lambda v: v.shape[1:] == val.shape[1:] and v.ndim == val.ndim and v.dtype == val.dtype)
        same = y.meta["val"].shape[1:] == val.shape[1:] and y.meta["val"].dtype == val.dtype
        pair = [x, y if same and y.meta["val"].ndim == val.ndim else x]
        self.call(aten.cat.default, pair, bound=max(map(self.bound, pair)))

    def cast(self) -> None:
        x = self.any(lambda val: val.is_floating_point())
        dtype = self.rng.choice([*DTYPES, torch.int64])
        if self.bound(x) > LIMITS[dtype]:
            x = self.call(aten.clamp.default, x, -2, 2, bound=2)
        self.call(aten._to_copy.default, x, dtype=dtype, bound=self.bound(x))

    def draw(self) -> None:
        x = self.small(self.any(lambda val: val.is_floating_point()), 2)
        if self.rng.random() < 0.5:
            both = self.call(aten.native_dropout.default, x, 0.5, True, bound=2 * self.bound(x))
            self.getitem(both, 0)
            if self.rng.random() < 0.5:
                self.getitem(both, 1)
                self.values.pop()  # a mask: nothing here takes bool
            return
        drawn = self.call(aten.rand_like.default, x, bound=1)
        scaled = self.call(aten.mul.Tensor, drawn, 4.0, bound=4)
        self.call(aten.floor.default, scaled, bound=4)
        del self.values[-3:-1]  # fractions

    # writes

    def write(self) -> None:
        """Write to any value that no collective under way reads: an input, an intermediate, through a view."""
        x = self.pick(lambda val: self.reads.get(self.memory(val), 0) == 0 and val.numel() > 0)
        if x is None:
            return
        val, target = x.meta["val"], self.memory(x.meta["val"])
        op = self.rng.choice(["add_", "copy_", "clamp_", "mul_", "neg_", "zero_"])
        if op in ("add_", "copy_"):
            y = self.any(lambda v: v.shape == val.shape and v.dtype == val.dtype)
            if y.meta["val"].shape != val.shape or y.meta["val"].dtype != val.dtype:
                y = x
            if op == "add_" and self.bound(x) + self.bound(y) > LIMITS[val.dtype]:
                self.call(aten.clamp_.default, x, -2, 2)
                y = self.call(aten.clamp.default, y, -2, 2, bound=2)
            overlaps = y is not x and self.memory(y.meta["val"]) == target
            y = self.call(aten.clone.default, y, bound=self.bound(y)) if overlaps else y
            total = self.bound(y) + (self.bound(x) if op == "add_" else 0)
            op_name = aten.add_.Tensor if op == "add_" else aten.copy_.default
            self.call(op_name, x, y, bound=total)
        elif op == "mul_" and 2 * self.bound(x) <= LIMITS[val.dtype]:
            self.call(aten.mul_.Tensor, x, 2, bound=2 * self.bound(x))
        elif op == "clamp_":
            self.call(aten.clamp_.default, x, -2, 2)
        elif op in ("neg_", "zero_"):
            self.call(getattr(aten, op).default, x)

    # collectives

    def collective(self, x: Node | None = None, group: Peers | None = None, kind: str | None = None) -> Node:
        group = group or self.group()
        x = x or self.any(lambda val: val.ndim > 0 and val.numel() > 0)
        if not x.meta["val"].is_contiguous():
            x = self.call(aten.clone.default, x, memory_format=torch.contiguous_format, bound=self.bound(x))
        r, rows = group.size, x.meta["val"].shape[0]
        kinds = ["all_reduce", "all_reduce", "all_gather", "all_gather", "broadcast", "uneven"]
        kinds += ["reduce_scatter", "all_to_all"] * 2 if rows % r == 0 else []
        kind = kind or self.rng.choice(kinds)
        op = self.rng.choice(["sum", "sum", "max"])
        x = self.small(x, r) if kind in ("all_reduce", "reduce_scatter") and op == "sum" else x
        bound = self.bound(x) * (r if op == "sum" else 1)
        if kind == "all_reduce":
            return self.start(functional.all_reduce.default, x, op, group.name, bound=bound)
        if kind == "reduce_scatter":
            return self.start(functional.reduce_scatter_tensor.default, x, op, r, group.name, bound=bound)
        if kind == "all_gather":
            return self.start(functional.all_gather_into_tensor.default, x, r, group.name, bound=self.bound(x))
        if kind == "broadcast":
            return self.start(functional.broadcast.default, x, 0, group.name, bound=self.bound(x))
        splits = [rows // r] * r
        if kind == "uneven":  # what rank a sends to b is what b sends to a
            parts = [rows // r + (i < rows % r) for i in range(r)]
            splits = [parts[(group.rank + i) % r] for i in range(r)]
        return self.start(functional.all_to_all_single.default, x, splits, splits, group.name, bound=self.bound(x))

    def start(self, target: Any, x: Any, *args: Any, bound: float) -> Node:
        node = self.call(target, x, *args, bound=bound)
        if node in self.values:
            self.values.remove(node)
        read = pytree.tree_leaves(x)
        for each in read:
            key = self.memory(each.meta["val"])
            self.reads[key] = self.reads.get(key, 0) + 1
        self.pending.append((node, read))
        return node

    def wait(self, node: Node | None = None) -> Node | None:
        if not self.pending:
            return None
        i = self.rng.randrange(len(self.pending))
        if node is not None:
            i = next(i for i, (start, _) in enumerate(self.pending) if start is node)
        start, read = self.pending.pop(i)
        for each in read:
            self.reads[self.memory(each.meta["val"])] -= 1
        vals = start.meta["val"]
        results = [start] if isinstance(vals, Tensor) else [self.getitem(start, i) for i in range(len(vals))]
        waited = start
        for each in results:
            if each in self.values:
                self.values.remove(each)
            self.touched.discard(self.memory(each.meta["val"]))
            bound = max([self.bound(each), *(self.bound(n) for n in read)])
            for _ in range(self.rng.choice([1] * 9 + [2])):  # more than once does nothing more
                waited = self.call(functional.wait_tensor.default, each)
                self.waited[storage(waited.meta["val"])] = self.memory(each.meta["val"])
            self.bounds[self.memory(each.meta["val"])] = bound
        return waited

    def coalesced(self) -> None:
        group = self.group()
        found = [self.any(lambda val: val.is_contiguous() and val.ndim > 0 and val.numel() > 0) for _ in range(2)]
        xs = [self.small(x, group.size) for x in found]
        if len({x.meta["val"].dtype for x in xs}) > 1:
            return
        bound = group.size * max(map(self.bound, xs))
        if self.rng.random() < 0.5:
            self.start(functional.all_reduce_coalesced.default, xs, "sum", group.name, bound=bound)
        else:
            target = functional.all_gather_into_tensor_coalesced.default
            self.start(target, xs, group.size, group.name, bound=bound)

    def in_place(self) -> None:
        """An all_reduce of an intermediate, in place."""
        group = self.group()
        x = self.small(self.any(), group.size)
        x = self.call(aten.clone.default, x, memory_format=torch.contiguous_format, bound=self.bound(x))
        bound = group.size * self.bound(x)
        self.start(functional.all_reduce_.default, x, "sum", group.name, bound=bound)
        self.touched.add(self.memory(x.meta["val"]))

    def chain(self) -> None:
        """An all_reduce of an all_gather, and the like."""
        waited = self.wait(self.collective())
        for _ in range(self.rng.randint(1, 2)):
            if waited is not None and waited.meta["val"].numel() < 4096:
                waited = self.wait(self.collective(waited))

    def sharded_layers(self) -> None:
        """Each layer gathers its weight, and often a bias, right before it needs it."""
        group, dtype = self.group(), torch.float32
        x = self.call(aten.clamp.default, self.placeholder([self.size(), 4], dtype), -1, 1, bound=1)
        for _ in range(self.rng.randint(2, 4)):
            w = self.wait(self.collective(self.placeholder([4, 4], dtype), group, "all_gather"))
            b = self.wait(self.collective(self.placeholder([4], dtype), group, "all_gather"))
            assert w is not None and b is not None
            w, b = (self.call(aten.slice.Tensor, each, 0, 0, 4) for each in (w, b))
            y = self.call(aten.add.Tensor, self.product(x, w), b, bound=1 << 10)
            x = self.call(aten.clamp.default, y, -1, 1, bound=1)

    def gradients(self) -> None:
        """Matmuls whose results are summed over the group. A few of them are needed at the end only."""
        group, kind = self.group(), self.rng.choice(["reduce_scatter", "all_reduce"])
        for _ in range(self.rng.randint(2, 4)):
            x = self.placeholder([group.size * self.rng.choice([1, 2]), 4], torch.float32)
            y = self.product(x, self.placeholder([4, self.size()], torch.float32))
            start = self.collective(y, group, kind)
            if self.rng.random() < 0.7:
                self.wait(start)

    def experts(self) -> None:
        """Tokens go to experts and come back, twice."""
        group = self.group()
        x: Node | None = self.placeholder([group.size * self.rng.choice([1, 2, 3]), 4], torch.float32)
        for _ in range(2):
            arrived = self.wait(self.collective(x, group, "all_to_all"))
            assert arrived is not None
            y = self.product(arrived, self.placeholder([4, 4], torch.float32))
            x = self.wait(self.collective(y, group, "all_to_all"))
