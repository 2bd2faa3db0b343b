"""A chain of collectives over dims of one mesh, as one move of the tensor per mesh dim; these moves commute.

Let rank c, with coordinate c[d] in mesh dim d, hold x_c. In the end it has x_p, where, for each d,
    all_gather      p[d] is the index of a new factor, the sources
    all_to_all      likewise, and only block c[d] of x is taken
    reduce_scatter  all p[d] are reduced, and only block c[d] of x is taken
    all_reduce      all p[d] are reduced
The order of mesh dims does not matter if every block is cut from x itself and all reductions can be done as one. Moves
of one kind are one collective over the flattened group. A reduce_scatter and an all_gather over one mesh dim are an
all_reduce.

Two collectives of one kind never send less than the merged one does. For R = a b ranks, each with a tensor of size 1:
    all_gather      (a - 1) + a (b - 1) = R - 1                         the same merged
    reduce_scatter  (1 - 1/a) + (1 - 1/b) / a = 1 - 1/R                 the same merged
    all_to_all      (1 - 1/a) + (1 - 1/b) >= 1 - 1/R                    all_reduce: twice that
If there are several kinds, moves that shrink the tensor come first, and moves that grow it last, so that the others
send no more than before. Only an all_reduce in place of a reduce_scatter and an all_gather can enlarge the moves
between them; `traffic` shows it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from fusedcomm.compile.graph.collectives import Collective
from fusedcomm.compile.graph.layout import CannotFuse, Factor, Layout, refuse
from fusedcomm.compile.graph.views import value
from fusedcomm.compile.merge.flattened_mesh import FlattenedMesh, MeshGroup
from fusedcomm.redistribution.sharding import REDUCE_OPS
from fusedcomm.redistribution.steps import merged_op

KINDS = ("reduce_scatter", "all_reduce", "all_to_all", "all_gather")  # in the order of sending


@dataclass(frozen=True)
class Move:
    kind: str
    blocks: Factor | None = None  # cut from x
    sources: Factor | None = None  # index of the sender
    reduce_op: str | None = None


@dataclass(frozen=True)
class Moves:
    """``sent`` has the kind and number of ranks of each collective of the chain as it is."""

    mesh: FlattenedMesh
    layout: Layout  # of the chain's result so far
    by_dim: tuple[tuple[int, Move], ...] = ()
    sent: tuple[tuple[str, int], ...] = ()

    def then(self, collective: Collective) -> Moves:
        """The moves with one more collective. Raises CannotFuse where it does not commute."""
        group = self.mesh.named(collective.group_name)
        if group is None:
            raise CannotFuse("its group is of no dims of the mesh")
        if collective.reduce_op is not None:
            self._check_reduction(collective)
        layout, moves = self.layout, dict(self.by_dim)
        new = {}
        for d in group.dims:
            blocks = None
            if collective.kind in ("all_to_all", "reduce_scatter"):
                blocks = self._blocks(layout, 0, self.mesh.sizes[d])
                layout = layout.without(blocks)
            new[d] = _after(moves.get(d), collective, blocks, self.mesh.sizes[d])
        for _, arriving in reversed(new.values()):
            if arriving is not None:
                layout = layout.insert(0, arriving)
        moves.update({d: move for d, (move, _) in new.items()})
        sent = (*self.sent, (collective.kind, collective.group_size))
        return Moves(self.mesh, layout, tuple(moves.items()), sent)

    def merged(self) -> list[tuple[str, MeshGroup]]:
        """The collectives that do these moves, at most one of each kind, in their order."""
        found = []
        for kind in KINDS:
            dims = [d for d, move in self.by_dim if move.kind == kind]
            if dims:
                found.append((kind, self.mesh.of(dims)))
        return found

    @property
    def is_better_merged(self) -> bool:
        """Whether merging leaves fewer collectives that send no more, or as many that send less."""
        before, after = (len(self.sent), traffic(self.sent)), self.cost(self.sent)
        return after < before and after[1] <= before[1]

    def cost(self, chain: Sequence[tuple[str, int]]) -> tuple[int, Fraction]:
        """Returns (number of collectives left, traffic) of a chain that begins with the moves merged here."""
        left = [(kind, self._size(group.dims)) for kind, group in self.merged()] + list(chain[len(self.sent) :])
        return len(left), traffic(left)

    def kind_over(self, group_name: str) -> str:
        """The kind of the merged collective that contains one over that group."""
        group = self.mesh.named(group_name)
        assert group is not None
        return dict(self.by_dim)[group.dims[0]].kind

    def reduction(self, group: MeshGroup) -> tuple[str, int]:
        """Returns (reduce_op, divisor of the operand) for a group of ``merged``."""
        moves = dict(self.by_dim)
        ops = [str(moves[d].reduce_op) for d in group.dims]
        if len(ops) == 1:
            return ops[0], 1
        op = merged_op(ops)
        assert op is not None
        return op, self._size([d for d, each in zip(group.dims, ops, strict=True) if each == "avg"])

    def _check_reduction(self, collective: Collective) -> None:
        op = str(collective.reduce_op)
        refuse(op not in REDUCE_OPS, f"its reduce_op must be one of {', '.join(REDUCE_OPS)}, got {op}")
        refuse(op == "avg" and not value(collective.sent).dtype.is_floating_point, "it rounds averages of integers")
        for _, move in self.by_dim:
            if move.reduce_op is not None and merged_op([move.reduce_op, op]) is None:
                raise CannotFuse(f"{op} of {move.reduce_op} is no one reduction")

    def _blocks(self, layout: Layout, dim: int, num_blocks: int) -> Factor:
        blocks = layout.leading(dim, num_blocks)
        if any(move.sources is not None and blocks in move.sources.leaves() for _, move in self.by_dim):
            raise CannotFuse("its blocks are what came from one rank each")
        return blocks

    def _size(self, dims: Sequence[int]) -> int:
        return math.prod(self.mesh.sizes[d] for d in dims)


def traffic(sent: Sequence[tuple[str, int]]) -> Fraction:
    """A rank's traffic in a chain of collectives (kind, number of ranks), in units of its first tensor."""
    total, size = Fraction(0), Fraction(1)
    for kind, num_ranks in sent:
        others = Fraction(num_ranks - 1, num_ranks)
        if kind == "all_gather":
            size *= num_ranks
        total += size * others * (2 if kind == "all_reduce" else 1)
        if kind == "reduce_scatter":
            size /= num_ranks
    return total


def _after(move: Move | None, collective: Collective, blocks: Factor | None, size: int) -> tuple[Move, Factor | None]:
    """Returns (move of one mesh dim after one more collective, factor of the senders in its result)."""
    kind = collective.kind
    if move is not None:
        if (move.kind, kind) != ("reduce_scatter", "all_gather"):
            raise CannotFuse(f"it is over ranks that the chain has been over with {move.kind}")
        return Move("all_reduce", reduce_op=move.reduce_op), move.blocks
    sources = Factor(size) if kind in ("all_gather", "all_to_all") else None
    return Move(kind, blocks, sources, collective.reduce_op), sources
