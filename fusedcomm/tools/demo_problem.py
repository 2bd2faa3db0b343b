"""A matmul_all_to_all to be measured: its data, its oracle, and the ways to compute it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import fusedcomm
from fusedcomm.bench.timing import Variants
from fusedcomm.ops.exact_problem import difference

ROOF = "matmul alone (roof)"
DTENSOR = "DTensor"
UNFUSED = "matmul + all_to_all"
OURS = "fusedcomm"

DTENSOR_LOGGER = "torch.distributed.tensor._collective_utils"
DTENSOR_GATHERS = "CPU process group does not support alltoall yet"


@dataclass(frozen=True)
class DemoProblem:
    """``exchange((x @ w).view(out_shape), gather_dim, scatter_dim)`` over WORLD, with the shapes of one rank."""

    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    gather_dim: int
    scatter_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        x, w, out = ("x".join(map(str, s)) for s in (self.x_shape, self.w_shape, self.out_shape))
        view = f" viewed as {out}" if len(self.out_shape) > 1 else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"x {x}, w {w}{view}, {dtype}"


def _is_not_dtensor_gathers(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(DTENSOR_GATHERS)


class DemoData:
    """One rank's inputs and the ways to use them.

    The inputs start as integers, small enough for products and sums to be exact in every dtype and order.
    """

    def __init__(self, problem: DemoProblem, device: torch.device) -> None:
        self.problem = problem
        self.device = device
        self.rank, self.group_size = dist.get_rank(), dist.get_world_size()
        self.x, self.w = self._integers(self.rank)

    def randomize(self) -> None:
        """Make the inputs random for timing, after the checks: on integers GPUs draw less power, so they run faster."""
        self.__dict__.pop("_oracle", None)  # it is as large as a result, and wrong from here on
        generator = torch.Generator(self.device).manual_seed(self.rank)
        self.x.normal_(generator=generator)
        self.w.normal_(generator=generator)

    def plan(self) -> fusedcomm.Plan:
        p = self.problem
        return fusedcomm.explain(
            "matmul_all_to_all",
            self.x,
            self.w,
            p.gather_dim,
            p.scatter_dim,
            out_shape=p.out_shape,
        )

    def variants(self, *names: str) -> Variants:
        every: dict[str, Callable[[], Tensor]] = {
            ROOF: lambda: torch.matmul(self.x, self.w),
            UNFUSED: self._unfused,
            OURS: self._ours,
        }
        if DTENSOR in names:  # importing DTensor takes half a second
            every[DTENSOR] = self._dtensor()
        return {name: every[name] for name in names}

    def check(self, name: str, result: Tensor) -> str | None:
        expected = self._product(self.x, self.w) if name == ROOF else self._oracle
        return difference(result, expected)

    def _integers(self, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator(self.device).manual_seed(rank)
        dtype, shapes = self.problem.dtype, (self.problem.x_shape, self.problem.w_shape)
        x, w = (torch.randint(-1, 2, shape, generator=generator, device=self.device, dtype=dtype) for shape in shapes)
        return x, w

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x.float(), w.float()).to(self.problem.dtype)

    @cached_property
    def _oracle(self) -> Tensor:
        """This rank's result, from all ranks' inputs: no communication must be trusted."""
        blocks = []
        for src_rank in range(self.group_size):
            y = self._product(*self._integers(src_rank)).unflatten(-1, self.problem.out_shape)
            blocks.append(y.chunk(self.group_size, self.problem.scatter_dim)[self.rank])
        return torch.cat(blocks, self.problem.gather_dim)

    def _view(self) -> Tensor:
        return torch.matmul(self.x, self.w).unflatten(-1, self.problem.out_shape)

    def _ours(self) -> Tensor:
        p = self.problem
        return fusedcomm.matmul_all_to_all(self.x, self.w, p.gather_dim, p.scatter_dim, out_shape=p.out_shape)

    def _unfused(self) -> Tensor:
        """A user's own program, with a copy to pack and one to unpack, unless dim 0 is gathered."""
        p, y = self.problem, self._view()
        gather_dim, scatter_dim = p.gather_dim % y.ndim, p.scatter_dim % y.ndim
        blocks = y.unflatten(scatter_dim, (self.group_size, -1)).movedim(scatter_dim, 0)
        packed = blocks.contiguous()
        assert dist.group.WORLD is not None
        received = funcol.wait_tensor(funcol.all_to_all_single(packed.flatten(0, 1), None, None, dist.group.WORLD))
        blocks = received.view(packed.shape).movedim(0, gather_dim)
        return blocks.flatten(gather_dim, gather_dim + 1).contiguous()

    def _dtensor(self) -> Callable[[], Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        # The demo says this below its table; in the middle of its output the message reads like an error.
        logging.getLogger(DTENSOR_LOGGER).addFilter(_is_not_dtensor_gathers)
        p = self.problem
        mesh = init_device_mesh(self.device.type, (self.group_size,))

        def redistribute() -> Tensor:
            y = DTensor.from_local(self._view(), mesh, [Shard(p.gather_dim)])
            return y.redistribute(mesh, [Shard(p.scatter_dim)]).to_local()

        return redistribute
