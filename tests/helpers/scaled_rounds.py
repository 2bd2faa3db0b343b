"""Rounds of scaled matmuls whose kernels are compiled: float8 x and w, with every recipe, tile and way to load."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.plan import launches
from fusedcomm.plan.builder import Builder
from fusedcomm.plan.geometry import packed_gathers, shapes
from fusedcomm.plan.scaled_programs import OfPayload
from fusedcomm.plan.scaling import Payload, Scaled

SHAPES: dict[str, Callable[[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]] = {  # of scale_x and scale_w
    "tensor": lambda m, k, n: ((1,), (1,)),
    "rows": lambda m, k, n: ((m, 1), (1, n)),
    "blocks": lambda m, k, n: ((m, -(-k // 128)), (-(-k // 128), -(-n // 128))),
}


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@dataclass(frozen=True)
class ScaledRound:
    """m rows of k elements on each of ``size`` ranks, n columns; ``workspace`` makes one rank's."""

    workspace: Callable[[], Any]
    recipe: str
    m: int
    k: int
    n: int
    out: torch.dtype = torch.bfloat16
    x: torch.dtype = torch.float8_e4m3fn
    w: torch.dtype = torch.float8_e4m3fn
    bias: bool = True
    fast: bool = False

    def push(self) -> None:
        workspace, out = self.workspace(), self.out
        exchange = shapes.matmul_all_to_all((self.m, self.k), (self.k, self.n), None, 0, 1, workspace.group_size)
        (spans,) = exchange.rounds(1 << 62)
        scales = (_meta(*shape) for shape in SHAPES[self.recipe](self.m, self.k, self.n))

        def program(s: Builder, bias: Tensor | None, x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> None:
            launches.push(s, Scaled(x, scale_x, out), Scaled(w, scale_w, out, fast=self.fast), bias, spans)

        operands = _meta(self.m, self.k, dtype=self.x), self._w(self.k), *scales
        launch_now.prepared(program, workspace, 1, self._bias(), *operands)()

    def gather(self, dim: int = 0) -> None:
        workspace, out = self.workspace(), self.out
        num_ks, block = (workspace.group_size if dim else 1), 128 if self.recipe == "blocks" else 0
        whole_k, payload = self.k * num_ks, Payload(self.x, (self.k,) * num_ks, block)
        w_shape = whole_k, self.n
        exchange = packed_gathers.all_gather_matmul((self.m, self.k), [w_shape], dim, workspace.group_size, block=block)
        (spans,) = exchange.rounds(1 << 62)
        _, scale_shape = SHAPES[self.recipe](self.m, *w_shape)

        def program(s: Builder, bias: Tensor | None, to: Tensor, w: Tensor, scale: Tensor) -> None:
            weight = OfPayload(w, scale, out, payload, fast=self.fast)
            launches.gather_matmul(s, to, weight, bias, spans, end_round=True, own=dim == 1)

        operands = _meta(*exchange.out_shape, dtype=out), self._w(whole_k), _meta(*scale_shape)
        launch_now.prepared(program, workspace, 1, self._bias(), *operands)()

    def gather_k(self) -> None:
        self.gather(1)

    def _w(self, k: int) -> Tensor:
        return _meta(self.n, k, dtype=self.w).mT

    def _bias(self) -> Tensor | None:
        return _meta(self.n, dtype=self.out) if self.bias else None


def rounds(workspace: Callable[[], Any]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Launches that need the most registers, with each recipe and tile."""

    def of(recipe: str, m: int, k: int, n: int, **options: Any) -> ScaledRound:
        return ScaledRound(workspace, recipe, m, k, n, **options)

    wide = {"out": torch.float32}
    yield "push float8", of("rows", 16384, 4096, 8192).push
    yield "push float8 blocks", of("blocks", 16384, 4112, 8192, x=torch.float8_e5m2).push
    yield "push float8 tensor 128 rows", of("tensor", 128, 4096, 1024).push
    yield "push float8 odd", of("rows", 4096, 4101, 8196).push
    yield "push float8 fast", of("rows", 16384, 4096, 8192, fast=True).push
    yield "gather float8 fast wide", of("rows", 4096, 4096, 8192, fast=True, **wide).gather
    yield "gather float8", of("rows", 4096, 4096, 8192, w=torch.float8_e5m2).gather
    yield "gather float8 blocks wide", of("blocks", 4096, 4096, 8192, **wide).gather
    yield "gather float8 blocks 128 rows", of("blocks", 128, 4096, 1024).gather
    yield "gather K float8 wide", of("rows", 4096, 1024, 8192, **wide).gather_k
    yield "gather K float8 blocks", of("blocks", 4096, 1024, 8192).gather_k
    yield "gather K float8 ragged", of("rows", 4096, 1040, 8192).gather_k
