"""Ops with their weights, for inference engines, which decide call by call.

`RowParallelTail` ends a tensor parallel half layer, `Linear` is one of three plain ops. All ranks of the group make
them together, in the same order, and call them with the same number of rows. They run without gradients and autocast.
Where CUDA graphs will hold their calls, make them and warm them up inside `fusedcomm.before_capture`.
"""

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fusedcomm.memory import flight_recorder
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.group import Group, find, resolve, store
from fusedcomm.memory.members import members
from fusedcomm.memory.vote import agree
from fusedcomm.ops import call_check
from fusedcomm.ops.arguments import LISTS
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.dispatch import prepare
from fusedcomm.ops.explain import arguments_of
from fusedcomm.ops.table import OPS
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan
from fusedcomm.run import calls

__all__ = ["Linear", "RowParallelTail"]

_TAIL = "matmul_all_reduce_norm"
_FIXED: dict[str, dict[str, Any]] = {
    "all_gather_matmul": {"gather_dim": 0},
    "matmul_all_reduce": {},
    "matmul_reduce_scatter": {"scatter_dim": 0},
    _TAIL: {},
}


class Linear:
    """A linear layer next to a collective: one op, along the first dim of x.

    x is [rows, K], this rank's. Making it is a collective of the group: the ranks vote on how many rows should run so.

    Args:
        op: "all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", or that of `RowParallelTail`.
        w: [K, N], as in the op; a list of them for "all_gather_matmul", which then returns a list.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        max_rows: the most rows of a call that may run fused.
        bias: as in the op. Its other arguments may follow, but for memory of results.

    Attributes:
        reason: why a call of max_rows rows runs as it does.

    Raises:
        ValueError: an argument is not as described here.
        TypeError: likewise, where it is of another type.
        PeerMismatchError: ranks gave different arguments.
        PeerTimeoutError: a peer did not come to the vote within ``FUSEDCOMM_TIMEOUT_S``.
    """

    def __init__(self, op: str, w: Any, group: Group, max_rows: int, *, bias: Any = None, **options: Any) -> None:
        self.op, self.max_rows = op, max_rows
        self._like: Any = next(iter(w), w) if isinstance(w, LISTS) else w
        fixed = _FIXED.get(op, {}) if isinstance(op, str) else {}
        self._fixed = {"w": w, "group": group, "bias": bias} | fixed | options
        pg, facts = self._group, dict[str, Any]()

        def vote(call: dict[str, Any]) -> list[dict[str, Any]]:
            return [each["call"] for each in self._all({"call": call})]

        with call_check.same_arguments(op, pg.group_name, pg.rank(), vote, facts):
            self._check(options.keys() & {"x", "residual", "out", "residual_out"})
            args, exchange = self._call(max_rows)
            facts |= {"max_rows": max_rows, "dtype": str(args.x.dtype).removeprefix("torch.")}
            facts |= flight_recorder.Record(op, args.group_name, args.x.device, exchange).arguments
            facts |= call_check.operand_facts(args, exchange.cut is None)
        self._vote()

    def _check(self, of_calls: Collection[str]) -> None:
        if not isinstance(self.op, str) or self.op not in _FIXED:
            raise ValueError(f"op must be one of {', '.join(_FIXED)}, got {self.op!r}")
        if type(self.max_rows) is not int or self.max_rows < 1:
            raise ValueError(f"max_rows must be an int, at least 1, got {self.max_rows!r}")
        if of_calls:
            raise ValueError(f"inputs and results are those of each call, got {', '.join(sorted(of_calls))}")
        if not isinstance(self._like, Tensor) or self._like.ndim != 2:
            raise ValueError(f"w must be [K, N], got {getattr(self._like, 'shape', self._like)}")
        k, n = self._like.shape
        self._columns = {"x": k, "residual": n} if self.op.endswith("_norm") else {"x": k}

    def can_run(self) -> bool:
        """Whether `should_run` is True of some number of rows. If it is not, `reason` says why."""
        return any(self._runs)

    def should_run(self, num_rows: int) -> bool:
        """Whether the op is expected to beat the plain program at so many rows: up to max_rows, by the planner's
        estimate for the next power of two. It is the same on all ranks, which voted on it when they made the object,
        and again at the end of `warm_up`.
        """
        return 0 < num_rows <= self.max_rows and self._runs[(num_rows - 1).bit_length()]

    def warm_up(self, rows: Iterable[int] | None = None) -> None:
        """Make the memory, plans and kernels of calls, and NCCL's communicator if some run unfused. Afterwards no call
        of these numbers of rows, of contiguous and aligned tensors, makes any, until another op of the group makes its
        memory grow. It is a collective.

        Args:
            rows: the numbers of rows that will come, the same on all ranks; None for 1 to max_rows.
        """
        every = list(range(1, self.max_rows + 1) if rows is None else rows)
        runs = [each for each in every if self.should_run(each)]
        runs.sort(key=lambda each: -self._plan(each).slot_bytes)
        unfused = [each for each in every if each not in runs][:1]
        for each in (*unfused, *runs[:1], *runs, *runs):  # memory grows once; the second call prepares those behind it
            self.apply(*self._inputs(each).values())
        self._vote()  # an algorithm may have failed its proof, or memory may be missing

    @torch.no_grad()
    def apply(self, *tensors: Tensor) -> Any:
        """Run the op, or the plain program where `should_run` is False of x's rows; in torch.compile the op, which
        decides when it runs.
        """
        if len(tensors) != len(self._columns):
            raise TypeError(f"a call takes {' and '.join(self._columns)}, got {len(tensors)} arguments")
        with torch.autocast(self._like.device.type, enabled=False):
            return self._apply(dict(zip(self._columns, tensors, strict=True)))

    __call__ = apply

    def _apply(self, given: dict[str, Tensor]) -> Any:
        if call_check.is_traced(given["x"]) or self.should_run(given["x"].shape[:-1].numel()):
            return OPS[self.op].function(**self._fixed, **given)
        spec, args = arguments_of(self.op, **self._fixed, **given)
        plan = Plan(self.op, "unfused", "should_run is False", exchange=spec.exchange_of(args))
        memory = CallMemory(0, *args.group, args.x.device)
        results = calls.run(plan, memory, spec.program, *spec.operands(args)).returned
        if spec.num_results > 1:
            return tuple(results)
        return results if isinstance(self._fixed["w"], LISTS) else results[0]

    def _inputs(self, rows: int) -> dict[str, Tensor]:
        return {name: self._like.new_zeros(rows, columns) for name, columns in self._columns.items()}

    @torch.no_grad()
    def _call(self, rows: int) -> tuple[Arguments, Exchange]:
        with torch.autocast(self._like.device.type, enabled=False):
            spec, args = arguments_of(self.op, **self._fixed, **self._inputs(rows))
        return args, spec.exchange_of(args)

    def _plan(self, rows: int) -> Plan:
        args, exchange = self._call(rows)
        return prepare(self.op, exchange, args.x.dtype, args.x.device, args.group_name)[0]

    @property
    def _group(self) -> ProcessGroup:
        return find(resolve(self._fixed["group"])[1])

    def _all(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's facts, of the same keys."""
        pg = self._group
        if pg.size() == 1 or dist.get_backend(pg) == "fake":
            return [copy.deepcopy(facts) for _ in range(pg.size())]
        departures = next((each.departures for each in members(pg)), None)
        return agree(store(pg, "inference"), pg.rank(), pg.size(), facts, what=self.op, departures=departures)

    def _vote(self) -> None:
        """Find the numbers of rows, powers of two, that no rank runs unfused."""
        rows = [min(1 << i, self.max_rows) for i in range((self.max_rows - 1).bit_length() + 1)]
        plans = [self._plan(each) for each in rows]
        own = {"runs": [each.algorithm != "unfused" for each in plans], "reason": plans[-1].reason}
        votes = self._all(own)
        self._runs = [all(each) for each in zip(*(vote["runs"] for vote in votes), strict=True)]
        self.reason = next((vote["reason"] for vote in votes if not vote["runs"][-1]), own["reason"])


class RowParallelTail(Linear):
    """The end of a tensor parallel half layer: `fusedcomm.matmul_all_reduce_norm` of x and residual.

    x is [rows, K], residual [rows, N].

    Args:
        w: [K, N], this rank's rows of the weight.
        norm_weight: [N], float32 too beside 16 bits, or None: ones.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        max_rows: the most rows of a call that may run fused.
        eps: as in the op.
        bias: [N], or None.

    Example, on each of 2 ranks::

        tail = fusedcomm.inference.RowParallelTail(torch.ones(3, 8), torch.ones(8), None, max_rows=4, eps=0.0)
        tail.warm_up()
        normed, residual = tail(torch.ones(2, 3), torch.zeros(2, 8))
        assert (residual == 6).all() and (normed == 1).all()
    """

    def __init__(
        self,
        w: Tensor,
        norm_weight: Tensor | None,
        group: Group,
        max_rows: int,
        eps: float = 1e-6,
        *,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__(_TAIL, w, group, max_rows, bias=bias, norm_weight=norm_weight, eps=eps)
