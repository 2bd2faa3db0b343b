"""The ops on float8 values: programs of today by torch._scaled_mm. All scales are 1, so that values stay exact."""

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.bench.op_bench import PROGRAMS, OpBench
from fusedcomm.ops.whole_group import MatmulSize

RECIPES = ("TensorWise", "RowWise")  # those that torch has on CPUs too
_VALUES = torch.float8_e4m3fn
Operand = tuple[Tensor, Tensor]  # values, scales


class ScaledBench(OpBench):
    """A scaled op of x and w in out_dtype, whose float8 values are kept until they are written."""

    recipe = ""

    def payload(self, t: Tensor) -> Tensor:
        return t.to(_VALUES).view(torch.uint8) if self.gathers else t

    def exchanged_bytes(self, size: MatmulSize, dtype: torch.dtype) -> int:
        return super().exchanged_bytes(size, torch.uint8 if self.gathers else dtype)

    def matmul(self, x: Tensor, w: Tensor) -> Tensor:
        return _product(self._operand(x, -1), self._operand(w, -2), x.dtype)

    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        if not self.gathers:
            return self.collective(self.matmul(x, w))
        values, scale = self._operand(x, -1)
        gathered = self.collective(values.view(torch.uint8)).view(_VALUES)
        if scale.ndim and self.kind == "all_gather":
            scale = self.collective(scale)
        elif scale.ndim:  # of this rank's rows: one scale for all sources, as _scaled_mm takes it
            scale = scale.narrow(-2, 0, gathered.shape[-2])
        return _product((gathered, scale), self._operand(w, -2), x.dtype)

    def ours(self, x: Tensor, w: Tensor) -> Tensor:
        (x8, scale_x), (w8, scale_w) = self._operand(x, -1), self._operand(w, -2)
        op = getattr(fusedcomm, f"scaled_{self.op}")
        made: Tensor = op(x8, w8, scale_x, scale_w, *self.dims(x), out_dtype=x.dtype)
        return made

    def plan(self, x: Tensor, w: Tensor) -> fusedcomm.Plan:
        (x8, scale_x), (w8, scale_w) = self._operand(x, -1), self._operand(w, -2)
        return fusedcomm.explain(f"scaled_{self.op}", x8, w8, scale_x, scale_w, *self.dims(x), out_dtype=x.dtype)

    def _operand(self, t: Tensor, k_dim: int) -> Operand:
        key, made = (t.data_ptr(), t._version, k_dim), self.__dict__.setdefault("_made", {})
        if key not in made:
            shape = list(t.shape) if self.recipe == "RowWise" else []
            if shape:
                shape[k_dim] = 1
            values = t.to(_VALUES) if k_dim == -1 else t.mT.to(_VALUES).contiguous().mT
            made[key] = values, torch.ones(shape, device=t.device)
        found: Operand = made[key]
        return found


def _product(x: Operand, w: Operand, dtype: torch.dtype) -> Tensor:
    (values, scale_x), (w8, scale_w) = x, w
    scales = scale_x.flatten(0, -2) if scale_x.ndim else scale_x, scale_w
    rows = torch._scaled_mm(values.flatten(0, -2), w8, *scales, out_dtype=dtype)
    return rows.view(*values.shape[:-1], -1)


SCALED = {
    f"scaled_{op}, {recipe}": type(type(each).__name__, (ScaledBench, type(each)), {"recipe": recipe})()
    for recipe in RECIPES
    for op, each in PROGRAMS.items()
}
BENCHES: dict[str, OpBench] = PROGRAMS | SCALED
