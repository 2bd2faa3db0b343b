"""Nodes as text that ranks compare: equal if they compute the same from tensors of equal sizes and dtypes."""

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.layout import Size, size_of

aten = torch.ops.aten
# ops that fill a tensor with one number -> index of the number's argument, if there is one
FILLS = {
    aten.full.default: 1,
    aten.scalar_tensor.default: 0,
    aten.empty.memory_format: None,
    aten.zeros.default: None,
    aten.ones.default: None,
}


class Digest(NamedTuple):
    text: str
    symbols: tuple[str, ...] = ()  # the sizes of a call, by first occurrence in the text


class Reader:
    """Writes nodes as text, in their order; inputs and symbols are numbered by first occurrence."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.labels = labels  # of groups, by name
        self.numbers: dict[Node, int] = {}
        self.symbols: dict[str, sympy.Symbol] = {}

    def digest(self, nodes: Iterable[Node]) -> Digest:
        found = hashlib.sha256()
        for node in nodes:
            found.update(f"{self._argument(node)} = {self._call(node)}\n".encode())
        return Digest(found.hexdigest()[:16], tuple(self.symbols))

    def _call(self, node: Node) -> str:
        return f"{node.target}{pytree.tree_map(self._argument, (node.args, node.kwargs))}"

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            if is_fill(arg):
                return self._call(arg)
            val = arg.meta.get("val")
            if isinstance(val, SymInt):
                return self._size(size_of(val))
            return f"%{self.numbers.setdefault(arg, len(self.numbers))}: {pytree.tree_map(self._tensor, val)}"
        if isinstance(arg, torch.device):
            return arg.type
        return self.labels.get(arg, repr(arg)) if isinstance(arg, str) else repr(arg)

    def _tensor(self, val: Any) -> Any:
        return f"{val.dtype}{[self._size(size_of(size)) for size in val.shape]}" if isinstance(val, Tensor) else val

    def _size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        for symbol in sorted(size.free_symbols, key=str):
            self.symbols.setdefault(str(symbol), sympy.Symbol(f"n{len(self.symbols)}"))
        return str(size.xreplace({symbol: self.symbols[str(symbol)] for symbol in size.free_symbols}))


def is_fill(node: Node) -> bool:
    """Whether node is a tensor of one literal number: ranks must share it."""
    if node.target not in FILLS:
        return False
    at = FILLS[node.target]
    return at is None or not isinstance(node.args[at], Node)
