"""What an op would do with given arguments, and why, without running it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.group import Group, resolve
from fusedcomm.ops import matmul_all_to_all
from fusedcomm.ops.dispatch import prepare
from fusedcomm.planner import Plan


def explain(
    op: str,
    x: Tensor,
    w: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group: Group = None,
    *,
    bias: Tensor | None = None,
    out_shape: Sequence[int] | None = None,
    verbose: bool = True,
) -> Plan:
    """The plan for ``fusedcomm.<op>`` with these arguments, printed unless ``verbose`` is False.

    x and w can be meta tensors (``torch.empty(..., device="meta")``): then the plan is that of the GPU if there is
    one, else of the CPU. Raises the op's ValueErrors. The first call on a group is a collective, as the op's own is.
    """
    if op != matmul_all_to_all.OP:
        raise ValueError(f"op must be {matmul_all_to_all.OP!r}, got {op!r}")
    group_size, group_name = resolve(group)
    exchange = matmul_all_to_all.exchange_of(x, w, bias, out_shape, gather_dim, scatter_dim, group_size)
    device = x.device
    if device.type == "meta":
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan, _ = prepare(op, exchange, x.dtype, device, group_name)
    if verbose:
        print(plan)
    return plan
