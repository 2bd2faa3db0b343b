"""Graphs built node by node, each op called on fake tensors as it is added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from tests.helpers.order_checks import WAIT


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
