"""Collectives that follow each other over different dims of one mesh become one over these dims together.

In a chain, each next collective is the only reader of the last one's result, rearranged.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fusedcomm.compile.fuse.fuser import products_beside
from fusedcomm.compile.graph import collectives
from fusedcomm.compile.graph.attempt import attempt
from fusedcomm.compile.graph.collectives import Collective, functional
from fusedcomm.compile.graph.effects import has_messages, sort, writes_before_end
from fusedcomm.compile.graph.layout import CannotFuse, Layout
from fusedcomm.compile.graph.matmuls import name_of
from fusedcomm.compile.graph.rewrite import Rewriter, held_outputs, hidden_from
from fusedcomm.compile.graph.views import along, follow, path_back, value
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh, MeshGroup
from fusedcomm.compile.merge.mesh_moves import Moves

aten = torch.ops.aten


@dataclass(frozen=True)
class Chain:
    """``target`` is the last node that only rearranges the result of the last of ``collectives``."""

    x: Node
    x_layout: Layout
    collectives: tuple[Collective, ...]
    moves: Moves
    target: Node
    layout: Layout  # target's layout


class Merger:
    """Merges, and never breaks a graph: other collectives stay, and ``reasons`` says why.

    ``fuse_ops``: merging must not leave fewer collectives that these ops can fuse.
    """

    def __init__(self, graph: Graph, fuse_ops: Sequence[str] = ()) -> None:
        self.graph = graph
        self.rewriter = Rewriter(graph)
        self.fuse_ops = fuse_ops
        self.into: dict[str, str] = {}  # name of a start that is gone -> name of the merged one
        self.reasons: dict[str, list[str]] = {}  # by the name of the start

    def merge(self, mesh: FlattenedMesh) -> None:
        """Merge all chains over dims of the mesh."""
        before, why_not = len(self.into), obstacle(self.graph)
        with held_outputs(self.graph):
            for start in [node for node in self.graph.nodes if _is_over(node, mesh)]:
                if why_not is not None:
                    self.reasons[start.name] = [f"merge: {why_not}"]
                elif start.name not in self.into:
                    for chain in self._attempt(start, find, mesh) or ():
                        if self._attempt(start, self._rewrite, chain):
                            break
        if len(self.into) > before:
            sort(self.graph)

    def _attempt(self, start: Node, act: Callable[..., Any], arg: Any) -> Any:
        reasons: list[str] = []
        result = attempt("merge", act, start, arg, reasons=reasons)
        self.reasons.setdefault(start.name, []).extend(reasons)
        return result

    def _rewrite(self, start: Node, chain: Chain) -> bool:
        num_fused = self._num_fused(each.start for each in chain.collectives)
        old_users = list(chain.x.users)
        with self.rewriter.before(chain.collectives[-1].wait, like=start):
            made, result = _emit(self.rewriter, chain)
        created = self.rewriter.created
        for node in created[: created.index(list(made.values())[-1]) + 1]:
            start.prepend(node)  # keeps the first one's place among other collectives, as all ranks must
        chain.target.replace_all_uses_with(result)
        with hidden_from(chain.x, old_users):
            fewer = num_fused > 0 and self._num_fused(made.values()) < num_fused
        if fewer:
            result.replace_all_uses_with(chain.target)
            for node in reversed(created):
                self.graph.erase_node(node)
            self.rewriter = Rewriter(self.graph)
            raise CannotFuse("merged, fewer of its chain could be fused with matmuls")
        for each in chain.collectives:
            self.into[each.start.name] = made[chain.moves.kind_over(each.group_name)].name
        self.rewriter.erase_unused(chain.target)
        return True

    def _num_fused(self, starts: Iterable[Node]) -> int:
        return sum(bool(products_beside(start, self.fuse_ops)) for start in starts)


def find(start: Node, mesh: FlattenedMesh) -> list[Chain]:
    """The chains from start worth merging, the best first. Raises CannotFuse if there are none."""
    first = collectives.read(start)
    path = path_back(first.sent, through_casts=False)
    try:
        return _find(path, first, mesh)
    except CannotFuse:
        if len(path) == 1:
            raise
        # The dims of the path's first node may hide the exchanged dim. A chain that they only shorten stays short.
        return _find(path[-1:], first, mesh)


def _find(path: list[Node], first: Collective, mesh: FlattenedMesh) -> list[Chain]:
    """The chains that start from the first node of the path."""
    x_layout = Layout.of(value(path[0]).shape)
    moves, members = Moves(mesh, along(path, x_layout)).then(first), [first]
    found: list[Chain] = []
    try:
        while True:
            wait = members[-1].wait
            nodes = follow(wait, moves.layout) if wait.users else [(wait, moves.layout)]
            if moves.is_better_merged:
                contiguous = [each for each in nodes if value(each[0]).is_contiguous()]
                found.append(Chain(path[0], x_layout, tuple(members), moves, *(contiguous or nodes)[-1]))
            node, layout = nodes[-1]
            moves, member = _next(node, replace(moves, layout=layout))
            members.append(member)
    except CannotFuse as reason:
        if not found:
            kinds = ", ".join(kind for kind, _ in moves.sent)
            raise CannotFuse(str(reason) if len(members) == 1 else f"{kinds} are no fewer merged; {reason}") from None
    return sorted(found, key=lambda chain: chain.moves.cost(moves.sent))  # where equal, the shortest


def _next(node: Node, moves: Moves) -> tuple[Moves, Collective]:
    """The next collective of the chain, and the moves with it. Raises CannotFuse at its end."""
    users = list(node.users)
    if len(users) != 1 or users[0].target not in collectives.STARTS:
        raise CannotFuse(f"what arrives goes to {', '.join(map(name_of, users[:3]))}" if users else "nothing reads it")
    try:
        member = collectives.read(users[0])
        return moves.then(member), member
    except CannotFuse as reason:
        raise CannotFuse(f"not with {users[0].name}: {reason}") from None


def _emit(rewriter: Rewriter, chain: Chain) -> tuple[dict[str, Node], Node]:
    """Returns (starts of the merged collectives by kind, replacement of the chain's target)."""
    node, layout, made = chain.x, chain.x_layout, {}
    for kind, group in chain.moves.merged():
        sent, received = _sent_and_received(chain.moves, kind, group, layout)
        node = rewriter.contiguous(rewriter.arrange(node, layout.order, sent))
        made[kind] = _start(rewriter, chain.moves, kind, group, node)
        node, layout = rewriter.call(functional.wait_tensor.default, made[kind]), received
    node = rewriter.arrange(node, layout.order, chain.layout)
    if value(chain.target).is_contiguous():
        return made, rewriter.contiguous(node)
    return made, rewriter.result(node, chain.target)


def _sent_and_received(moves: Moves, kind: str, group: MeshGroup, layout: Layout) -> tuple[Layout, Layout]:
    """Layouts (sent, received) of a merged collective, for a tensor of the given layout."""
    if kind == "all_reduce":
        return layout, layout
    by_dim = dict(moves.by_dim)
    sources = tuple(factor for d in group.dims if (factor := by_dim[d].sources) is not None)
    if kind == "all_gather":
        first, *others = layout.dims or ((),)
        return Layout((first, *others)), Layout(((*sources, *first), *others))
    blocks = tuple(factor for d in group.dims if (factor := by_dim[d].blocks) is not None)
    rest = layout
    for factor in (leaf for block in blocks for leaf in block.leaves()):
        rest = rest.without(factor)
    return Layout((blocks, *rest.dims)), Layout((sources, *rest.dims))


def _start(rewriter: Rewriter, moves: Moves, kind: str, group: MeshGroup, sent: Node) -> Node:
    size = collectives.size_of_group(group.name)
    if kind == "all_gather":
        return rewriter.call(functional.all_gather_into_tensor.default, sent, size, group.name)
    if kind == "all_to_all":
        splits = [1] * size
        return rewriter.call(functional.all_to_all_single.default, sent, splits, splits, group.name)
    reduce_op, divisor = moves.reduction(group)
    if divisor != 1:  # before the sum, which might overflow where the averages do not
        sent = rewriter.call(aten.div.Tensor, sent, divisor)
    if kind == "all_reduce":
        return rewriter.call(functional.all_reduce.default, sent, reduce_op, group.name)
    return rewriter.call(functional.reduce_scatter_tensor.default, sent, reduce_op, size, group.name)


def _is_over(node: Node, mesh: FlattenedMesh) -> bool:
    return node.target in collectives.STARTS and mesh.named(collectives.group_name_of(node)) is not None


def obstacle(graph: Graph) -> str | None:
    """Why nothing in the graph can be merged, or None."""
    if writes_before_end(graph):  # a merged collective reads its operand where the chain's first stands
        return "the graph writes in place"
    if has_messages(graph.nodes):
        return "the graph sends messages from point to point"
    return None
