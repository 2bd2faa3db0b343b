"""Problems with exact sums in every dtype and order: all ranks' inputs, and every rank's results."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fusedcomm.ops import exchanges
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.whole_group import MatmulSize, WholeGroup
from fusedcomm.plan.geometry import norm
from fusedcomm.plan.geometry.cut import EVEN, Splits
from fusedcomm.plan.geometry.exchange import Exchange

_MOST_SUMMED = 16  # ranks


class ExactProblem:
    """An op, and all ranks' inputs: integers so small that every sum is exact, up to a K of 128 of each rank.

    Where more than 16 ranks would add up, each row has zeros in all but 16, so that bfloat16 holds every partial sum.
    The size that the group divides is ``size`` times its ranks; the others stay as odd as they are. If ``uneven``, rank
    r has r more than rank 0 at the gathered dim, and the last rank gets one less than the others at the scattered dim.
    """

    def __init__(
        self,
        program: WholeGroup,
        size: MatmulSize,
        num_ranks: int,
        seed: int,
        bias: bool = False,
        uneven: bool = False,
    ) -> None:
        self.program, self.num_ranks, self.seed, self.uneven = program, num_ranks, seed, uneven
        size = _divisible(program, size, num_ranks)
        shapes = [list(program.x_shape(size, num_ranks)) for _ in range(num_ranks)]
        k, n = size.k, size.n
        if uneven:
            for rank, shape in enumerate(shapes):
                shape[-2] -= program.scatter_dim == -2
                if program.gather_dim is not None:
                    shape[program.gather_dim] += rank
            k += sum(range(num_ranks)) if program.gather_dim == -1 else 0
            n -= program.scatter_dim == -1
        self.xs = [self.integers(tuple(shape), 0, rank) for rank, shape in enumerate(shapes)]
        if program.kind in ("reduce_scatter", "all_reduce"):
            step = -(-num_ranks // _MOST_SUMMED)
            for rank, x in enumerate(self.xs):
                x.masked_fill_(((torch.arange(x.shape[-2], device="cpu") + rank) % step != 0).unsqueeze(-1), 0)
        self.ws = [self.integers((k, n), 1, rank) for rank in range(num_ranks)]
        same = program.same_grad_on_all_ranks
        self.biases = [self.integers((n,), 3, 0 if same else rank) for rank in range(num_ranks)] if bias else []

    def splits(self, rank: int) -> Splits:
        dim = self.program.gather_dim
        if not self.uneven:
            return EVEN
        return Splits(None if dim is None else tuple(x.shape[dim] for x in self.xs), rank=rank)

    def exchange(self, rank: int) -> Exchange:
        """The geometry of a rank's call."""
        return self.program.exchange(self.xs[rank], self.ws[rank], self.num_ranks, self.splits(rank))

    @property
    def payloads(self) -> list[Tensor]:
        """Every rank's tensor that the collective sends."""
        if self.program.gathers:
            return self.xs
        return [torch.matmul(x.double(), w.double()) for x, w in zip(self.xs, self.ws, strict=True)]

    def results(self) -> list[Tensor]:
        """Every rank's result, in float64, by the program of all ranks: no communication to trust."""
        xs, ws, biases = ([t.double() for t in ts] for ts in (self.xs, self.ws, self.biases))
        return self.program.program(xs, ws, biases)

    def integers(self, shape: tuple[int, ...], which: int, rank: int) -> Tensor:
        """From -1 to 1, equal in every process. ``which``: the number of the tensor on its rank."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * rank + which)
        return torch.randint(-1, 2, tuple(shape), generator=generator, device="cpu")


class NormProblem:
    """An all_reduce or a reduce_scatter of rows with a residual and a norm behind it; ``sums`` is without. Every row of
    the sum has the root mean square 2, so that normed rows are exact too, with an eps of 0.
    """

    def __init__(
        self, program: WholeGroup, size: MatmulSize, num_ranks: int, seed: int = 0, uneven: bool = False
    ) -> None:
        self.program, self.num_ranks = program, num_ranks
        self.sums = sums = ExactProblem(program, size, num_ranks, seed, bias=True, uneven=uneven)
        rows, n = sums.xs[0].shape[-2], size.n
        signs = 1 - 2 * sums.integers((rows, n), 4, 0).abs()
        out = (signs * torch.tensor([3, 3, 1, 1, 0] * (n // 5) + [2] * (n % 5), device="cpu")).double()
        self.scatters = program.scatter_dim is not None
        self.outs = out.chunk(num_ranks, -2) if self.scatters else [out] * num_ranks
        self.residuals = [out - total for out, total in zip(self.outs, sums.results(), strict=True)]
        self.weight = sums.integers((n,), 5, 0) + 2
        self.sends_whole = True  # terms too, of an all_reduce

    def exchange(self, rank: int) -> Exchange:
        """The geometry of the reduce_scatter, or of an all_reduce that sends all to all."""
        if self.scatters:
            return self.sums.exchange(rank)
        return norm.one_shot(tuple(self.outs[0].shape), self.sums.xs[0].shape[-1], 0.0, self.num_ranks)

    def calls(self, rank: int) -> Iterator[tuple[str, list[Tensor | None], Exchange]]:
        """Calls of each op, each way: (op, [x, w, bias, residual, norm_weight], geometry)."""
        x, w = self.sums.xs[rank], self.sums.ws[rank]
        others = self.sums.biases[rank], self.residuals[rank], self.weight
        if self.scatters:
            yield "matmul_reduce_scatter_norm", [x, w, *others], self.exchange(rank)
            return
        given = ("matmul_all_reduce_norm", x, w), ("all_reduce_norm", self.sums.payloads[rank], None)
        for op, terms, weight in given:
            shape = None if weight is None else weight.shape
            ways = self.exchange(rank), norm.two_shot(terms.shape, shape, 0.0, self.num_ranks)
            for exchange in ways if self.sends_whole else ways[1:]:
                yield op, [terms, weight, *others], exchange

    def results(self, rank: int) -> list[Tensor]:
        """(normed, residual_out), in float64."""
        return [self.outs[rank] / 2 * self.weight, self.outs[rank]]


class ScaledProblem(ExactProblem):
    """The same on float8 values. Scales, of rows and columns or ``tensor_wise``, are powers of two, so that sums stay
    exact. N is a multiple of 16 where K is: such products torch multiplies itself.
    """

    def __init__(
        self,
        program: WholeGroup,
        size: MatmulSize,
        num_ranks: int,
        seed: int = 0,
        uneven: bool = False,
        tensor_wise: bool = False,
    ) -> None:
        if size.k % 16 == 0:
            size = replace(size, n=-(-size.n // 16) * 16)
        super().__init__(program, size, num_ranks, seed, bias=True, uneven=uneven)
        self.tensor_wise = tensor_wise
        self.values = list(zip(self.xs, self.ws, strict=True))
        whole = [torch.tensor([each], dtype=torch.float32, device="cpu") for each in (2.0, 0.5)]
        self.scales = [
            whole if tensor_wise else (_powers(x.shape[-2]).unsqueeze(-1), _powers(w.shape[-1]).unsqueeze(0))
            for x, w in self.values
        ]
        self.xs, self.ws = (
            [operands[i] * scales[i] for operands, scales in zip(self.values, self.scales, strict=True)] for i in (0, 1)
        )

    def exchange(self, rank: int) -> Exchange:
        found: Exchange = getattr(exchanges, f"scaled_{self.program.op}")(self.call(rank))
        return found

    def call(
        self, rank: int, device: torch.device | None = None, out_dtype: torch.dtype = torch.bfloat16, name: str = ""
    ) -> Arguments:
        x, w, scale_x, scale_w = (t.to(device) for t in (*self.values[rank], *self.scales[rank]))
        w = w.mT.to(torch.float8_e4m3fn).contiguous().mT
        many = self.program.op == "all_gather_matmul"
        return Arguments(
            x.to(torch.float8_e4m3fn),
            [w],
            [self.biases[rank].to(device, out_dtype)],
            self.num_ranks,
            name,
            self.splits(rank),
            gather_dim=self.program.gather_dim or 0,
            scatter_dim=self.program.scatter_dim or 0,
            scale_x=scale_x,
            scale_w=[scale_w] if many else scale_w,
            out_dtype=out_dtype,
        )

    def scale_of_gathered(self, rank: int) -> Tensor:
        scales = [scale for scale, _ in self.scales]
        return scales[rank] if self.tensor_wise else self.program.exchanged(scales)[rank][:, :1]


def _powers(size: int) -> Tensor:
    return (2.0 ** (torch.arange(size, device="cpu") % 3 - 1)).float()


def difference(result: Tensor, expected: Tensor) -> str | None:
    """Where the values differ, or None."""
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, must be {tuple(expected.shape)}"
    if result.dtype != expected.dtype:
        return f"{result.dtype}, must be {expected.dtype}"
    wrong = int((result != expected).sum())
    if wrong == 0:
        return None
    where = (result != expected).nonzero()[0].tolist()
    got, must = result[tuple(where)].item(), expected[tuple(where)].item()
    return f"{wrong} of {result.numel()} elements, first at {where}: {got}, must be {must}"


def _divisible(program: WholeGroup, size: MatmulSize, num_ranks: int) -> MatmulSize:
    rows, k, n = (each * (num_ranks if program.cut == cut else 1) for cut, each in _cuts(size))
    return MatmulSize(rows, k, n, size.batch)


def _cuts(size: MatmulSize) -> tuple[tuple[str, int], ...]:
    return ("rows", size.rows), ("k", size.k), ("n", size.n)
