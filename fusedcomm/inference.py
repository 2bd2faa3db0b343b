"""Ops with their weights, for inference engines, which decide call by call.

`RowParallelTail` ends a tensor parallel half layer, `Linear` is one of three plain ops. All ranks of the group make
them together, in the same order, and call them with the same number of rows. They run without gradients and autocast.
Where CUDA graphs will hold their calls, make them and warm them up inside `fusedcomm.before_capture`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.group import Group
from fusedcomm.memory.group_member import check_same_call
from fusedcomm.memory.vote import agree
from fusedcomm.ops.arguments import LISTS
from fusedcomm.ops.dispatch import prepare
from fusedcomm.ops.explain import arguments_of
from fusedcomm.ops.table import OPS
from fusedcomm.plan.call_plan import CALL, Plan, fingerprint_of, wire_facts
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
        if op not in _FIXED:
            raise ValueError(f"op must be one of {', '.join(_FIXED)}, got {op!r}")
        if not isinstance(max_rows, int) or max_rows < 1:
            raise ValueError(f"max_rows must be an int, at least 1, got {max_rows!r}")
        if memory := options.keys() & {"out", "residual_out"}:
            raise ValueError(f"results have memory of their own, got {', '.join(sorted(memory))}")
        self.op, self.max_rows, self._like = op, max_rows, w[0] if isinstance(w, LISTS) else w
        if not isinstance(self._like, Tensor) or self._like.ndim != 2:
            raise ValueError(f"w must be [K, N], got {getattr(self._like, 'shape', self._like)}")
        self._fixed = {"w": w, "group": group, "bias": bias} | _FIXED[op] | options
        k, n = self._like.shape[-2:]
        self._columns = {"x": k, "residual": n} if op.endswith("_norm") else {"x": k}
        self._vote()

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
        """Make the memory, plans and kernels of calls. Afterwards no call of these numbers of rows, of contiguous and
        aligned tensors, makes any, until another op of the group makes its memory grow. It is a collective.

        Args:
            rows: the numbers of rows that will come, the same on all ranks; None for 1 to max_rows.
        """
        every = range(1, self.max_rows + 1) if rows is None else rows
        runs = [each for each in every if self.should_run(each)]
        runs.sort(key=lambda each: -self._plan(each)[0].slot_bytes)
        for each in (*runs[:1], *runs, *runs):  # memory grows once; the second call prepares those behind it
            self.apply(*self._inputs(each).values())
        self._vote()  # an algorithm may have failed its proof, or memory may be missing

    @torch.no_grad()
    def apply(self, *tensors: Tensor) -> Any:
        """Run the op, or the plain program where `should_run` is False of x's rows."""
        with torch.autocast(self._like.device.type, enabled=False):
            return self._apply(dict(zip(self._columns, tensors, strict=True)))

    __call__ = apply

    def _apply(self, given: dict[str, Tensor]) -> Any:
        if self.should_run(given["x"].shape[:-1].numel()):
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

    def _plan(self, rows: int) -> tuple[Plan, Any]:
        spec, args = arguments_of(self.op, **self._fixed, **self._inputs(rows))
        return prepare(self.op, spec.exchange_of(args), args.x.dtype, args.x.device, args.group_name)

    def _vote(self) -> None:
        """Find the numbers of rows, powers of two, that no rank runs unfused."""
        rows = [min(1 << i, self.max_rows) for i in range((self.max_rows - 1).bit_length() + 1)]
        plans = [self._plan(each) for each in rows]
        plan, ours = plans[-1]
        own: dict[str, Any] = {"runs": [each.algorithm != "unfused" for each, _ in plans], "reason": plan.reason}
        votes = [own]
        if ours is not None and ours.topology.backend != "fake":
            assert plan.exchange is not None
            same = fingerprint_of(self.op, self._like.dtype, rows, *wire_facts(CALL, plan.exchange, 0))
            facts = {"op": self.op, "fingerprint": same, "stage": "inference"} | own
            store = PrefixStore("inference", ours.store)
            votes = agree(store, ours.rank, ours.group_size, facts, what=self.op, departures=ours.departures)
            check_same_call(votes, ours.rank, self.op, ours.group_name)
        self._runs = [all(each) for each in zip(*(vote["runs"] for vote in votes), strict=True)]
        self.reason = next((vote["reason"] for vote in votes if not vote["runs"][-1]), plan.reason)


class RowParallelTail(Linear):
    """The end of a tensor parallel half layer: `fusedcomm.matmul_all_reduce_norm` of x and residual.

    x is [rows, K], residual [rows, N].

    Args:
        w: [K, N], this rank's rows of the weight.
        norm_weight: [N], or None: ones.
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
