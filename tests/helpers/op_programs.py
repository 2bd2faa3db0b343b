"""A small program around each op, for what traces whole programs: torch.compile, torch.export, AOTInductor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import fusedcomm


def program_of(op: str) -> Callable[[Tensor, list[Tensor]], list[Tensor]]:
    """A program with x [2, tokens, 8] and weights [8 or 16, 8], in which the op stands between two others."""

    def matmul_all_to_all(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_all_to_all(x.relu(), ws[0], 1, 2, bias=ws[0][0], out_shape=[4, 2]).sigmoid()]

    def all_to_all_matmul(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.all_to_all_matmul(x.relu(), torch.cat([ws[0], ws[1]]), 2, 1, bias=ws[0][0]).sigmoid()]

    def all_gather_matmul(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        outs = fusedcomm.all_gather_matmul(x.relu(), [ws[0], ws[1]], 1, bias=[None, ws[0][0]])
        return [out.sigmoid() for out in [*outs, fusedcomm.all_gather_matmul(x, ws[1], 0, save_gathered=False)]]

    def matmul_reduce_scatter(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_reduce_scatter(x.relu(), ws[0], -2, bias=ws[0][0], reduce_op="avg").sigmoid()]

    def matmul_all_reduce(x: Tensor, ws: list[Tensor]) -> list[Tensor]:
        return [fusedcomm.matmul_all_reduce(x.relu()[:, 1:], ws[0], bias=ws[0][0]).sigmoid()]

    return locals()[op]
