"""A random call of an op: shapes, dims, dtype, layouts. It is drawn so that every sum in it is exact in its dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from random import Random

import torch

GATHERS = ("all_gather_matmul", "all_to_all_matmul")
REDUCES = ("matmul_all_reduce", "matmul_reduce_scatter")
OPS = (*GATHERS, *REDUCES, "matmul_all_to_all")
WITH_OUT = (*REDUCES, "matmul_all_to_all")  # the ops that can write into a tensor of the caller's
LAYOUTS = ("contiguous", "transposed", "strided")

# All integers up to here, and their negatives, are exact.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}
LARGEST = 2  # bound of the inputs, or 1 where sums would be too large
SMALL_CALL = 1 << 11  # elements: what Triton's interpreter does in a fraction of a second

Shape = tuple[int, ...]


@dataclass(frozen=True)
class SoakCase:
    """What every rank of a group gives to an op. It is equal on all ranks, but the values are not."""

    op: str
    group_size: int
    x: Shape
    ws: tuple[Shape, ...]
    biases: tuple[bool, ...]
    dtype: torch.dtype = torch.float32
    listed: bool = False  # w is a list
    k_dims: int = 1  # dims of x that all_to_all_matmul flattens
    gather_dim: int | None = None
    scatter_dim: int | None = None
    out_shape: Shape | None = None
    reduce_op: str = "sum"
    x_layout: str = "contiguous"
    w_layout: str = "contiguous"
    use: str = "forward"  # "backward": gradients too; "out": into a tensor of the caller's
    frozen: str = ""  # in a backward, "x" or "w" if that needs no gradient
    save: bool = True  # what is gathered, for the backward
    largest: int = LARGEST

    def __str__(self) -> str:
        told = [f for f in fields(self) if f.name not in ("op", "dtype") and getattr(self, f.name) != f.default]
        facts = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in told)
        return f"{self.op}({str(self.dtype).removeprefix('torch.')}, {facts})"

    @property
    def factor(self) -> int:
        """What x and the gradient are multiplied by, so that an average is an integer."""
        return self.group_size if self.reduce_op == "avg" else 1

    @property
    def bias_shapes(self) -> list[Shape | None]:
        own_part = self.op == "matmul_reduce_scatter" and self.scatter_dim in (-1, len(self.x) - 1)
        parts = self.group_size if own_part else 1
        return [(w[-1] // parts,) if bias else None for w, bias in zip(self.ws, self.biases, strict=True)]

    @property
    def out_shapes(self) -> list[Shape]:
        if self.op in GATHERS:
            lead = self._exchanged(self.x)[: -self.k_dims]
            return [(*lead, w[-1]) for w in self.ws]
        return [self._exchanged((*self.x[:-1], *(self.out_shape or self.ws[0][-1:])))]

    def _exchanged(self, shape: Shape) -> Shape:
        sizes = list(shape)
        if self.scatter_dim is not None:
            sizes[self.scatter_dim] //= self.group_size
        if self.gather_dim is not None:
            sizes[self.gather_dim] *= self.group_size
        return tuple(sizes)

    @property
    def num_bytes(self) -> int:
        """At least what a rank's slots would have to hold for a call of one round."""
        return self.group_size * self.dtype.itemsize * max(map(math.prod, (self.x, *self.out_shapes)))

    @property
    def is_small(self) -> bool:
        return sum(map(math.prod, (self.x, *self.ws, *self.out_shapes))) <= SMALL_CALL

    @property
    def bound(self) -> int:
        """A bound of every partial sum of the call and of its backward."""
        reduced = self.group_size if self.op in REDUCES else 1
        bound = self.largest**2 * self.ws[0][-2] * reduced * self.factor + self.largest
        if self.use == "backward":
            rows = max(math.prod(shape[:-1]) for shape in (self.x, *self.out_shapes)) * self.group_size
            columns = sum(w[-1] for w in self.ws)
            bound = max(bound, self.largest**2 * max(rows, columns) * self.group_size * self.factor**2)
        return bound


def draw(random: Random, group_size: int) -> SoakCase:
    """Any call that ``group_size`` ranks can make: mostly small, so that many fit into a minute."""
    op = random.choice(OPS)
    rows, k, n = _size(random)
    lead = [*(random.randint(1, 4) for _ in range(random.choice((0, 0, 1, 2)))), rows]
    case = (_draw_gather if op in GATHERS else _draw_push)(random, op, group_size, lead, k, n)
    uses = ["forward"] * 8 + ["backward"] * 2 + ["out"] * 2 * (op in WITH_OUT)
    case = replace(
        case,
        x_layout=random.choice((LAYOUTS[0], *LAYOUTS)),
        w_layout=random.choice((LAYOUTS[0], *LAYOUTS)),
        use=random.choice(uses),
        frozen=random.choice(("", "", "x", "w")),
        save=random.random() < 0.7,
    )
    return _exact(random, case)


def _size(random: Random) -> tuple[int, int, int]:
    kind = random.random()
    if kind < 0.8:
        return random.randint(0, 9), random.choice((0, *range(1, 13))), random.randint(1, 6)
    if kind < 0.96:
        return random.choice((15, 16, 17, 31, 33, 64, 65)), random.randint(1, 40), random.randint(1, 17)
    return random.randint(100, 300), random.randint(8, 40), random.randint(16, 64)


def _draw_gather(random: Random, op: str, group_size: int, lead: list[int], k: int, n: int) -> SoakCase:
    ks = [k]
    if op == "all_to_all_matmul" and random.random() < 0.4:
        ks = [random.randint(2, 6), random.randint(1, 6)]  # a single head would not be needed to make up K
    x, num_ws = [*lead, *ks], random.choice((1, 1, 2, 3)) if op == "all_gather_matmul" else 1
    gather_dim, scatter_dim = random.sample(range(len(x)), 2)
    if op == "all_to_all_matmul":
        x[scatter_dim] *= group_size
    made = list(x)
    made[gather_dim] *= group_size
    if op == "all_to_all_matmul":
        made[scatter_dim] //= group_size
    batches = made[: len(lead) - 1] if random.random() < 0.3 else []
    return SoakCase(
        op,
        group_size,
        tuple(x),
        tuple((*batches, math.prod(made[len(lead) :]), n + i) for i in range(num_ws)),
        tuple(random.random() < 0.5 for _ in range(num_ws)),
        listed=num_ws > 1,
        k_dims=len(ks),
        gather_dim=_either_sign(random, gather_dim, len(x)),
        scatter_dim=_either_sign(random, scatter_dim, len(x)) if op == "all_to_all_matmul" else None,
    )


def _draw_push(random: Random, op: str, group_size: int, lead: list[int], k: int, n: int) -> SoakCase:
    heads = op == "matmul_all_to_all" and random.random() < 0.4
    columns = [*(random.randint(1, 4) for _ in range(random.randint(1, 2))), n] if heads else [n]
    y = [*lead, *columns]
    gather_dim, scatter_dim = random.sample(range(len(y)), 2)
    if op != "matmul_all_reduce":
        y[scatter_dim] *= group_size
    lead, columns = y[: len(lead)], y[len(lead) :]
    batches = lead[:-1] if random.random() < 0.3 else []
    return SoakCase(
        op,
        group_size,
        (*lead, k),
        ((*batches, k, math.prod(columns)),),
        (random.random() < 0.5,),
        gather_dim=_either_sign(random, gather_dim, len(y)) if op == "matmul_all_to_all" else None,
        scatter_dim=_either_sign(random, scatter_dim, len(y)) if op != "matmul_all_reduce" else None,
        out_shape=tuple(columns) if heads else None,
        reduce_op=random.choice(("sum", "avg")) if op in REDUCES else "sum",
    )


def _either_sign(random: Random, dim: int, num_dims: int) -> int:
    return random.choice((dim, dim - num_dims))


def _exact(random: Random, case: SoakCase) -> SoakCase:
    """The case in a random dtype of those that hold its sums."""
    for dtype in random.sample(list(EXACT), len(EXACT)):
        for largest in (LARGEST, 1):
            drawn = replace(case, dtype=dtype, largest=largest)
            if drawn.bound <= EXACT[dtype]:
                return drawn
    raise AssertionError(f"float32 must hold all sums of {case}, got {case.bound}")
