"""The sequence of a graph's collectives, and the consent of all ranks to another one."""

import hashlib
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import sympy
import torch
import torch.distributed.distributed_c10d as c10d
from torch import SymInt, Tensor
from torch.distributed import ProcessGroup
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import group_name_of, is_op, kind_of, memberships
from fusedcomm.compile.graph.layout import Size, size_of
from fusedcomm.compile.graph.split_cat import argument_of
from fusedcomm.memory import consent, group
from fusedcomm.memory.consent import YES, Answer

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


class Sequence:
    """The collectives of a graph before it is changed.

    ``phase`` is part of the digest: a backward is compiled right behind its forward, and a rank that comes late to the
    ballot of one must not be taken for one at the ballot of the other.
    """

    def __init__(self, graph: Graph, phase: str) -> None:
        self.phase = phase
        frame = torch._guards.CompileContext.current_compile_id()
        # Equal where Dynamo compiles a function again. After torch._dynamo.reset() it may be another one's.
        self.program = None if frame is None else f"{phase} {frame.frame_id}"
        self.is_first = frame is not None and frame.frame_compile_id == 0
        self.starts = {node.name: (_line(node), group_name_of(node)) for node in communicating(graph)}

    def changed(self, graph: Graph) -> set[str]:
        """The names of collectives that are gone, new, or reordered."""
        now = {node.name: _line(node) for node in communicating(graph)}
        here = [name for name in self.starts if now.get(name) == self.starts[name][0]]
        left = [name for name in now if name in here]
        moved = {name for pair in zip(here, left, strict=True) if pair[0] != pair[1] for name in pair}
        return moved | (now.keys() ^ here) | (self.starts.keys() - here)

    def digest(self, graph: Graph, is_new: Callable[[Node], bool], origin: Callable[[Node], Any]) -> Digest:
        """All that ranks must share: both sequences, ``origin`` of each new collective, and the new nodes."""
        index = {name: i for i, name in enumerate(self.starts)}
        lines = [self.phase, *(line for line, _ in self.starts.values())]
        for node in communicating(graph):
            lines.append(f"{_line(node)} {origin(node) if is_new(node) else index.get(node.name)}")
        nodes = Reader().digest(node for node in graph.nodes if is_new(node))
        return Digest(hashlib.sha256("\n".join([*lines, nodes.text]).encode()).hexdigest()[:16], nodes.symbols)

    def pass_by(self, but: ProcessGroup | None = None) -> None:
        """Tell the peers, but for those of one group, that this rank changes nothing in the graph."""
        for pg in _witnesses({group_name for _, group_name in self.starts.values()}):
            if pg is not but and (ours := consent.of(pg)):
                ours.pass_by(self.program)

    def ask(self, digest: Digest, group_name: str) -> Answer:
        """Whether all ranks of this group, a `voter`, change their graphs alike."""
        pg = group.find(group_name)
        self.pass_by(but=pg)
        ours = consent.of(pg)
        return Answer(YES) if ours is None else ours.ask(digest.text, None, self.program, self.is_first)

    @staticmethod
    def has_peers(group_name: str) -> bool:
        return consent.of(group.find(group_name)) is not None

    def voter(self, groups: Iterable[str]) -> str:
        """The name of the smallest group that has all ranks of these groups."""
        concerned = {rank for name in groups for rank in c10d.get_process_group_ranks(group.find(name))}
        known = [pg for pg in _witnesses({*groups}) if concerned <= set(c10d.get_process_group_ranks(pg))]
        return min(known, key=lambda pg: pg.size()).group_name

    def groups(self, graph: Graph, names: set[str] | None) -> set[str]:
        """The groups of these collectives, before and now; None: of all."""
        now = {node.name: group_name_of(node) for node in communicating(graph)}
        was = {name: group_name for name, (_, group_name) in self.starts.items()}
        return {each[name] for each in (was, now) for name in (each if names is None else names & each.keys())}


def labels() -> dict[str, str]:
    """A name for each group that its ranks share: how far its ranks are apart."""
    groups = ((name, ranks, [b - a for a, b in pairwise(ranks)]) for name, _, ranks in memberships())
    return {name: f"group of {len(ranks)}, {apart} apart" for name, ranks, apart in groups}


def communicating(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if group_name_of(node) is not None and (kind_of(node) or is_op(node))]


def _line(node: Node) -> str:
    name = group_name_of(node)
    return f"{node.target} {argument_of(node, 'reduce_op')} {labels().get(name, name)}"


def _witnesses(names: set[str]) -> list[ProcessGroup]:
    """The groups that have all ranks of one of these groups; of several with equal ranks, the first made."""
    groups = {name: tuple(ranks) for name, _, ranks in memberships()}
    concerned = [set(groups[name]) for name in names if name in groups]
    found: dict[tuple[int, ...], ProcessGroup] = {}
    for pg in c10d._world.pg_map:  # in the order in which they were made
        if any(each <= set(groups.get(pg.group_name, ())) for each in concerned):
            found.setdefault(groups[pg.group_name], pg)
    return list(found.values())


class Reader:
    """Writes nodes as text, in their order, equal if they compute the same from tensors of equal sizes and dtypes.

    Inputs and symbols are numbered by first occurrence.
    """

    def __init__(self) -> None:
        self.labels = labels()
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
