"""The arguments of a call under the same names in all ops."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.plan.geometry.cut import EVEN, Splits
from fusedcomm.plan.planner import CALL


class Arguments(NamedTuple):
    """The arguments of a call. Named as in the schemas; an op without an argument leaves its default."""

    x: Tensor
    ws: Sequence[Tensor]  # one, but in all_gather_matmul; none of a plain collective, or [None] where it has a bias
    biases: Sequence[Tensor | None]  # likewise
    group_size: int
    group_name: str
    splits: Splits = EVEN
    out_shape: Sequence[int] | None = None
    gather_dim: int = 0
    scatter_dim: int = 0
    reduce_op: str = "sum"
    return_gathered: bool = False  # return_exchanged in all_to_all_matmul
    partial_bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    eps: float = 0.0
    out: Tensor | None = None
    residual_out: Tensor | None = None  # likewise a result's memory
    wire: str = CALL
    scale_x: Tensor | None = None
    scale_w: Any = None  # a list beside a list of w
    out_dtype: torch.dtype | None = None
    use_fast_accum: bool = False
    sends_scales: bool = True  # behind the rows of x; otherwise scale_x is that of the gathered x

    @property
    def w(self) -> Any:
        return self.ws[0] if self.ws else None

    @property
    def scales(self) -> list[Tensor]:
        """x's, and of each w; none of a plain op."""
        scale_ws = self.scale_w if isinstance(self.scale_w, (list, tuple)) else [self.scale_w]
        return [] if self.scale_x is None else [self.scale_x, *scale_ws]

    @property
    def dtype(self) -> torch.dtype:
        """The results'."""
        return self.out_dtype or self.x.dtype

    @property
    def n(self) -> int:
        """N of the first w; without one x is the product."""
        return (self.x if self.w is None else self.w).shape[-1]

    @property
    def bias(self) -> Tensor | None:
        return self.biases[0] if self.biases else None

    @property
    def outs(self) -> dict[str, Tensor]:
        """The caller's memory for results, by name."""
        given = {"out": self.out, "residual_out": self.residual_out}
        return {name: each for name, each in given.items() if each is not None}

    @property
    def scale(self) -> float:
        return 1 / self.group_size if self.reduce_op == "avg" else 1.0

    @property
    def group(self) -> tuple[int, str]:
        return self.group_size, self.group_name


class PerTensor(NamedTuple):
    """A value for each tensor of a call: its gradient, or whether one is needed."""

    x: Any
    ws: Sequence[Any]
    biases: Sequence[Any]
    partial_bias: Any = None
    bias: Any = None  # of an op without w
    residual: Any = None
    norm_weight: Any = None
