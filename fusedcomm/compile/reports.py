"""The passes' outcome: every collective of the graphs compiled since `enable()`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusedcomm import redistribution
from fusedcomm.memory import members
from fusedcomm.ops.table import OPS
from fusedcomm.plan import planner

_BELOW = tuple(os.path.join(os.path.dirname(str(each.__file__)), "") for each in (torch, redistribution))
_kept: list[CompileReport] | None = None


@dataclass
class FusedCall:
    """A call of an op in a graph: the inputs of its plan."""

    op: str
    args: tuple[Any, ...]  # with fake tensors
    last: str = "at the first call"  # the last result of plan(), kept when the group is destroyed

    @staticmethod
    def of(op: str, node: Node) -> FusedCall:
        return FusedCall(op, map_arg(node.args, lambda n: n.meta["val"]))

    def plan(self) -> str:
        """The planner's choice, once the group has come together at its first call."""
        x, group_name = self.args[0], OPS[self.op].by_name(self.args)["group_name"]
        member = members.known_member(group_name, x.device)
        if member is not None:
            symbolic = any(isinstance(size, torch.SymInt) for size in pytree.tree_leaves([self.args, x.shape]))
            spec, call = OPS[self.op], OPS[self.op].bind(self.args)
            exchange = None if symbolic else spec.exchange_of(call)
            self.last = "by size"
            if exchange is not None:
                facts = spec.sent_dtype(call), member, call.wire, spec.multiplied(call, exchange)
                self.last = planner.plan(self.op, exchange, *facts).algorithm
        return self.last


@dataclass(frozen=True)
class CollectiveReport:
    """One collective of one compiled graph.

    Attributes:
        graph: "forward", "backward" or "inference".
        status: "fused"; "plain", where the op sends and receives alone, without a matmul; "overlapped", if at most 1 %
            of its time is exposed; "exposed", the program's own collective; or "merged" into one that has a line of
            its own.
        collective: "all_to_all", "all_gather", "reduce_scatter", "all_reduce", ...
        source: file:line of the program, where torch has kept it.
        node: its name in the graph.
        op: the op of fusedcomm that stands for it, or None.
        reason: why it was left, or the node that it was merged into; if fused, the ops that it was moved over.
        saving_us: microseconds that fusing it saves per run of the graph, as the cost model estimates them
            (`fusedcomm/plan/cost/model.py`).
        call: the arguments of the op, for `plan`.
        plan: how the op runs: "unfused", "chunked", "fused" or "pipelined"; known after the first call of its group.
    """

    graph: str
    status: str
    collective: str
    source: str
    node: str
    op: str | None = None
    reason: str = ""
    saving_us: float = 0.0
    call: FusedCall | None = field(default=None, repr=False)

    @property
    def plan(self) -> str:
        """The algorithm of the op's plan; known after the group's first call."""
        return "" if self.call is None else self.call.plan()

    def __str__(self) -> str:
        what = self.reason
        if self.status == "plain":
            what = f"{self.op}, {self.reason}"
        elif self.status == "fused":
            what = ", ".join(each for each in (self.op, self.reason, f"saves about {self.saving_us:.0f} us") if each)
        return f"{self.graph} {self.collective} {self.node} ({self.source or 'no source line'}): {self.status}, {what}"


@dataclass
class CompileReport:
    """The outcome of each collective; ``str()`` is a table.

    A graph that Inductor takes from its cache is not looked at again: its collectives are not listed.

    Attributes:
        collectives: a list of `CollectiveReport`, graph by graph in the order in which they were compiled.
    """

    collectives: list[CollectiveReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        if _kept is not None:
            _kept.append(self)

    def __deepcopy__(self, memo: Any) -> CompileReport:
        """Itself: Inductor copies its config, with our pass, at every torch.compile; fake tensors cannot be copied."""
        return self

    def __str__(self) -> str:
        from fusedcomm.launch import console  # imports rich

        return console.as_text(self.__rich__())

    def __rich__(self) -> Any:
        from fusedcomm.launch.console import Column, Table

        if not self.collectives:
            return (
                "no collective in a graph compiled since enable(); graphs from Inductor's cache are not looked at "
                "(TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles them again)"
            )
        here = os.path.join(os.getcwd(), "")
        columns = (
            Column("graph", "forward, backward, or inference", lambda each: each.graph, drop=1, left=True),
            Column("collective", "its node in the graph", lambda each: each.node, left=True, folds=20),
            Column("status", "fused, plain, overlapped, merged or exposed", lambda each: each.status, left=True),
            Column("op, or why not", "the op in its place; else why it was left", _op_or_reason, left=True, folds=21),
            Column("plan", "the algorithm that the op takes", lambda each: each.plan, drop=2, left=True, folds=8),
            Column("saved\nms", "an estimate, per run", _saved_ms, drop=3),
            Column("where", "the program's line", lambda each: each.source.removeprefix(here), left=True, folds=15),
        )
        return Table(columns, self.collectives, others="--json, or the entries of .collectives, have them")


def _op_or_reason(line: CollectiveReport) -> str:
    return ", ".join(each for each in (line.op, line.reason) if each)


def _saved_ms(line: CollectiveReport) -> str:
    return f"{line.saving_us / 1e3:.3g}" if line.status == "fused" else ""


def source_of(node: Node) -> str:
    """file:line of the innermost frame of the user's program that made node, if torch has kept it."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [frame for frame in frames if not frame[0].startswith(_BELOW)] or frames
    return f"{users[-1][0]}:{users[-1][1]}" if users else ""


def keep_reports() -> list[CompileReport]:
    """Every report begun from now on, in a list that grows: a program that calls `enable()` itself begins its own."""
    global _kept
    _kept = []
    return _kept
