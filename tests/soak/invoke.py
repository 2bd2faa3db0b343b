"""A case run by fusedcomm's ops. The results are compared with ``KnownValues.expected``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.memory.group import resolve
from tests.helpers.problems import EVEN
from tests.soak import uneven_call
from tests.soak.known_values import KnownValues, SoakInputs
from tests.soak.random_call import SoakCase
from tests.soak.uneven_call import UnevenValues


def arguments(data: KnownValues | UnevenValues, rank: int, inputs: Any, group: Any) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(data, UnevenValues):
        return uneven_call.arguments(data, rank, inputs, group)
    case = data.case
    w, bias = (inputs.ws, inputs.biases) if case.listed else (inputs.ws[0], inputs.biases[0])
    dims = [dim for dim in (case.gather_dim, case.scatter_dim) if dim is not None]
    options: dict[str, dict[str, Any]] = {
        "all_gather_matmul": {"save_gathered": case.save},
        "all_to_all_matmul": {"save_exchanged": case.save},
        "matmul_all_reduce": {"reduce_op": case.reduce_op},
        "matmul_reduce_scatter": {"reduce_op": case.reduce_op},
        "matmul_all_to_all": {"out_shape": case.out_shape},
    }
    return [inputs.x, w, *dims, group], {"bias": bias, **options[case.op]}


def results(data: KnownValues | UnevenValues, rank: int, inputs: Any, group: Any) -> list[Tensor]:
    """The results of ``rank``, and in a backward the gradients of its inputs."""
    if isinstance(data, UnevenValues):
        return uneven_call.results(data, rank, inputs, group)
    case = data.case
    if case.use == "out":
        return [_into_out(case, inputs, group)]
    args, options = arguments(data, rank, inputs, group)
    result = getattr(fusedcomm, case.op)(*args, **options)
    outs = list(result) if case.listed else [result]
    if case.use != "backward":
        return outs
    leaves = inputs.trained(case.frozen)
    grads = [grad.to(out) for grad, out in zip(data.exact_grads(rank), outs, strict=True)]
    return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, grads, materialize_grads=True)]


def _into_out(case: SoakCase, inputs: SoakInputs, group: Any) -> Tensor:
    (shape,) = case.out_shapes
    out = inputs.x.new_full(shape, float("nan"))
    own: dict[str, list[Any]] = {
        "matmul_all_to_all": [case.out_shape, case.gather_dim, case.scatter_dim],
        "matmul_reduce_scatter": [case.reduce_op, case.scatter_dim],
        "matmul_all_reduce": [case.reduce_op],
    }
    op = getattr(torch.ops.fusedcomm, case.op)
    return op.out(inputs.x, inputs.ws[0], inputs.biases[0], *own[case.op], *EVEN[case.op], *resolve(group), out=out)
