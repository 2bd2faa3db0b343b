"""All that is computed in exchanged layouts, as a digest that ranks compare when the graph first runs.

An exchange moves over an op only if that op, every number in it, and the shapes and dtypes that it reads are the same
on all ranks: the tensors of each rank meet the ops of another. A rank sees its own graph alone when it compiles, so the
graphs call `same_moves` in front, with the sizes that only a call knows.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.commute.places import is_fill
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.layout import CannotFuse, Size, size_of
from fusedcomm.compile.graph.rewrite import Rewriter
from fusedcomm.compile.graph.views import WAIT, value

MOVED = "fusedcomm_moved"  # in the metadata of what is computed in the exchanged layout: the group's name
_DIGEST = "fusedcomm_digest"  # in the metadata of every collective of a group whose exchanges were moved


class Digest(NamedTuple):
    text: str
    symbols: tuple[str, ...]  # the sizes of a call, in the order in which the text first has them


class Check(NamedTuple):
    """What `same_moves` compares."""

    digest: Digest
    device_type: str
    group_name: str


def note(graph: Graph) -> None:
    """Keep the digests with the graph's collectives, through the partitioner, for `check_first`."""
    groups = {node.meta[MOVED] for node in graph.nodes if MOVED in node.meta}
    found = {group_name: _Reader(graph, group_name).digest() for group_name in groups}
    inputs = _symbols_of_inputs(graph)
    for name in (name for digest in found.values() for name in digest.symbols):
        if name not in inputs:
            raise CannotFuse(f"the size {name} is known too late to be compared between ranks")
    for node in graph.nodes:
        if digest := found.get(_group_of(node)):
            node.meta[_DIGEST] = digest


def find(graph: Graph) -> list[Check]:
    checks = {
        Check(node.meta[_DIGEST], value(node).device.type, _group_of(node)): None  # type: ignore[arg-type]
        for node in graph.nodes
        if _DIGEST in node.meta
    }
    return list(checks)


def check_first(graph: Graph, checks: list[Check]) -> None:
    """Let the graph compare its digests with those of the other ranks before all else."""
    if not checks:
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    inputs = _symbols_of_inputs(graph)
    rewriter = Rewriter(graph)
    with rewriter.before(first, like=first):
        for digest, device_type, group_name in checks:
            # a backward has the symbols that its forward has saved; the forward has compared them all
            sizes = [_size(rewriter, *inputs[name]) for name in digest.symbols if name in inputs]
            group_size = collectives.size_of_group(group_name)
            args = digest.text, sizes, device_type, group_size, group_name
            check = rewriter.call(torch.ops.fusedcomm.same_moves.default, *args)
            rewriter.call(WAIT, check)  # keeps it: Inductor drops what is not read


def _symbols_of_inputs(graph: Graph) -> dict[str, tuple[Node, int | None]]:
    """Symbols that inputs of the graph are, or have as their size in a dim."""
    found: dict[str, tuple[Node, int | None]] = {}
    for node in graph.find_nodes(op="placeholder"):
        val = node.meta.get("val") if "tangents_" not in node.name else None  # no inputs of the forward
        if isinstance(val, SymInt):
            found[str(size_of(val))] = node, None
        elif isinstance(val, Tensor):
            for dim, size in enumerate(val.shape):
                found.setdefault(str(size_of(size)), (node, dim))
    return found


def _size(rewriter: Rewriter, node: Node, dim: int | None) -> Node:
    return node if dim is None else rewriter.call(torch.ops.aten.sym_size.int, node, dim)


def _group_of(node: Node) -> str | None:
    at = collectives.STARTS.get(node.target, (None, None))[1]  # type: ignore[call-overload]
    return None if at is None else node.args[at]  # type: ignore[return-value]


class _Reader:
    """Writes nodes by their order, what they read by the order in which it is first read, and symbols likewise."""

    def __init__(self, graph: Graph, group_name: str) -> None:
        self.graph, self.group_name = graph, group_name
        self.numbers: dict[Node, int] = {}
        self.symbols: dict[str, sympy.Symbol] = {}

    def digest(self) -> Digest:
        found = hashlib.sha256()
        for node in self.graph.nodes:
            if node.meta.get(MOVED) == self.group_name:
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
        return "group" if arg == self.group_name else repr(arg)

    def _tensor(self, val: Any) -> Any:
        return f"{val.dtype}{[self._size(size_of(size)) for size in val.shape]}" if isinstance(val, Tensor) else val

    def _size(self, size: Size) -> str:
        if isinstance(size, int):
            return str(size)
        for symbol in sorted(size.free_symbols, key=str):
            self.symbols.setdefault(str(symbol), sympy.Symbol(f"n{len(self.symbols)}"))
        return str(size.xreplace({symbol: self.symbols[str(symbol)] for symbol in size.free_symbols}))
