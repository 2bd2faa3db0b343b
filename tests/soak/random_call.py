"""A random call of an op: shapes, dims, dtype, layouts. It is drawn so that every sum in it is exact in its dtype."""

import math
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch

from tests.helpers.problems import GATHERS, Problem

REDUCES = ("matmul_all_reduce", "matmul_reduce_scatter")
OPS = ("all_gather_matmul", "all_to_all_matmul", *REDUCES, "matmul_all_to_all")
WITH_OUT = (*REDUCES, "matmul_all_to_all")  # the ops that can write into a tensor of the caller's
LAYOUTS = ("contiguous", "transposed", "strided")

# All integers up to here, and their negatives, are exact.
EXACT = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11, torch.float32: 1 << 24}
LARGEST = 2  # bound of the inputs, or 1 where sums would be too large
SMALL_CALL = 1 << 11  # elements: what Triton's interpreter does in a fraction of a second


@dataclass(frozen=True)
class SoakCase:
    """What every rank of a group gives to an op. It is equal on all ranks, but the values are not."""

    problem: Problem
    group_size: int
    dtype: torch.dtype = torch.float32
    x_layout: str = "contiguous"
    w_layout: str = "contiguous"
    use: str = "forward"  # "backward": gradients too; "out": into a tensor of the caller's
    frozen: str = ""  # in a backward, "x" or "w" if that needs no gradient
    save: bool = True  # what is gathered, for the backward
    largest: int = LARGEST

    def __str__(self) -> str:
        told = [f for f in fields(self) if f.name != "dtype" and getattr(self, f.name) != f.default]
        facts = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in told)
        return f"{self.op}({str(self.dtype).removeprefix('torch.')}, {facts})"

    @property
    def op(self) -> str:
        return self.problem.op

    @property
    def factor(self) -> int:
        """Factor of x and of the gradient, so that an average is an integer."""
        return self.group_size if self.problem.reduce_op == "avg" else 1

    @property
    def shapes(self) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """x's, each w's and each result's."""
        x, ws, columns = self.problem.sizes(self.group_size)
        if self.op in GATHERS:
            lead = self.problem.gathered_shape(x, self.group_size)[: -self.problem.k_dims]
            return x, ws, [[*lead, w[-1]] for w in ws]
        return x, ws, [self.problem.gathered_shape([*x[:-1], *(columns or ws[0][-1:])], self.group_size)]

    @property
    def num_bytes(self) -> int:
        """At least what a rank's slots would have to hold for a call of one round."""
        x, _, outs = self.shapes
        return self.group_size * self.dtype.itemsize * max(map(math.prod, (x, *outs)))

    @property
    def is_small(self) -> bool:
        x, ws, outs = self.shapes
        return sum(map(math.prod, (x, *ws, *outs))) <= SMALL_CALL

    @property
    def bound(self) -> int:
        """A bound of every partial sum of the call and of its backward."""
        x, ws, outs = self.shapes
        reduced = self.group_size if self.op in REDUCES else 1
        bound = self.largest**2 * ws[0][-2] * reduced * self.factor + self.largest
        if self.use == "backward":
            rows = max(math.prod(shape[:-1]) for shape in (x, *outs)) * self.group_size
            columns = sum(w[-1] for w in ws)
            bound = max(bound, self.largest**2 * max(rows, columns) * self.group_size * self.factor**2)
        return bound


def draw(random: Random, group_size: int) -> SoakCase:
    """Any call that ``group_size`` ranks can make: mostly small, so that many fit into a minute."""
    op = random.choice(OPS)
    rows, k, n = _size(random)
    lead = [*(random.randint(1, 4) for _ in range(random.choice((0, 0, 1, 2)))), rows]
    problem = (_draw_gather if op in GATHERS else _draw_push)(random, op, lead, k, n)
    uses = ["forward"] * 8 + ["backward"] * 2 + ["out"] * 2 * (op in WITH_OUT)
    case = SoakCase(
        problem,
        group_size,
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


def _draw_gather(random: Random, op: str, lead: list[int], k: int, n: int) -> Problem:
    ks = [k]
    if op == "all_to_all_matmul" and random.random() < 0.4:
        ks = [random.randint(2, 6), random.randint(1, 6)]  # a single head would not be needed to make up K
    x, num_ws = (*lead, *ks), random.choice((1, 1, 2, 3)) if op == "all_gather_matmul" else 1
    gather_dim, scatter_dim = random.sample(range(len(x)), 2)
    batched, biases = random.random() < 0.3, tuple(random.random() < 0.5 for _ in range(num_ws))
    dims: dict[str, Any] = {"gather_dim": _either_sign(random, gather_dim, len(x))}
    if op == "all_to_all_matmul":
        dims["scatter_dim"] = _either_sign(random, scatter_dim, len(x))
    ns = tuple(n + i for i in range(num_ws)) if num_ws > 1 else n
    return Problem("soak", x, ns, **dims, batched=batched, bias=biases, op=op, k_dims=len(ks))


def _draw_push(random: Random, op: str, lead: list[int], k: int, n: int) -> Problem:
    heads = op == "matmul_all_to_all" and random.random() < 0.4
    columns = (*(random.randint(1, 4) for _ in range(random.randint(1, 2))), n) if heads else (n,)
    num_dims = len(lead) + len(columns)
    gather_dim, scatter_dim = random.sample(range(num_dims), 2)
    batched, bias = random.random() < 0.3, random.random() < 0.5
    return Problem(
        "soak",
        (*lead, k),
        math.prod(columns),
        _either_sign(random, gather_dim, num_dims) if op == "matmul_all_to_all" else None,
        _either_sign(random, scatter_dim, num_dims) if op != "matmul_all_reduce" else None,
        columns if heads else None,
        batched,
        bias,
        op=op,
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
