"""A case run by fusedcomm's ops. The results are compared with ``KnownValues.expected``."""

from typing import Any

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.memory.group import resolve
from tests.helpers.op_problems import as_list
from tests.helpers.problems import EVEN, unflat
from tests.soak.known_values import KnownValues

SAVES = {"all_gather_matmul": "save_gathered", "all_to_all_matmul": "save_exchanged"}


def arguments(data: KnownValues, rank: int, inputs: Any, group: Any) -> tuple[list[Any], dict[str, Any]]:
    case = data.case
    args, options = case.problem.user_arguments(unflat(case.problem, inputs), group)
    return args, options | ({SAVES[case.op]: case.save} if case.op in SAVES else {})


def results(data: KnownValues, rank: int, inputs: Any, group: Any) -> list[Tensor]:
    """The results of ``rank``, and in a backward the gradients of its inputs."""
    case = data.case
    if case.use == "out":
        op, out = getattr(torch.ops.fusedcomm, case.op), inputs[0].new_full(case.shapes[2][0], float("nan"))
        return [op.out(*inputs, *case.problem.arguments(case.group_size), *EVEN[case.op], *resolve(group), out=out)]
    args, options = arguments(data, rank, inputs, group)
    outs = as_list(getattr(fusedcomm, case.op)(*args, **options))
    if case.use != "backward":
        return outs
    grads = [grad.to(out) for grad, out in zip(data.exact_grads(rank), outs, strict=True)]
    found = torch.autograd.grad(outs, data.trained(inputs), grads, materialize_grads=True)
    return [*(out.detach() for out in outs), *found]
