"""Random programs whose ranks do different things beside the same sequence of collectives.

A program is data, drawn from a seed; each rank builds steps from it. A step is local, ``step(x, scope) -> x``, or a
collective of dim 0. `expected` takes the steps of all ranks in one process, in float64, with collectives by hand.
Integers keep every sum exact.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as fc
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

functional = torch.ops._c10d_functional
LARGEST = 1 << 22  # of all results: with room for what is summed on the way, exact in float32


@dataclass(frozen=True)
class Change:
    """``ranks`` do ``name`` at ``point``: "matmul", or to the tensor "sent", "received" or "result"."""

    point: str
    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    kind: str
    order: str = "movedim"  # of what an exchange sends
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Program:
    """``grad``: "all" ranks make a backward, "none", "some" (where it has no collective), or "recorded" by some."""

    seed: int
    size: int
    blocks: tuple[Block, ...]
    batch: int = 1
    grad: str = "none"
    some: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32  # of payloads
    tokens: tuple[int, ...] = (2, 2)  # of R, by call
    overlap: bool = False

    def flag_on(self, rank: int, call: int) -> bool:
        """Only ranks that read it compile again."""
        return call > 0 and self.has("flagged", rank)

    def has(self, name: str, rank: int) -> bool:
        return any(each.name == name and rank in each.ranks for block in self.blocks for each in block.changes)

    def backward_on(self, rank: int) -> bool:
        return self.grad == "all" or (self.grad == "some" and rank in self.some)


@dataclass
class Scope:
    w: list[Tensor]
    b: Tensor
    flag: bool
    extras: list[Tensor] = field(default_factory=list)


Step = Callable[[Tensor, Scope], Tensor]

# what a rank may do to a tensor on the way


def note(y: Tensor, scope: Scope, value: Tensor) -> Tensor:
    scope.extras.append(value)
    return y


def printed(y: Tensor, scope: Scope) -> Tensor:
    print(str(y.detach().sum())[:0], end="")  # breaks a graph
    return y


def hooked(y: Tensor, scope: Scope) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 2)
    return y


def broken(y: Tensor, scope: Scope) -> Tensor:
    torch._dynamo.graph_break()
    return y


POINTS: dict[str, Step] = {
    "bias": lambda y, scope: y + scope.b[: y.shape[-1]].to(y.dtype),
    "whole bias": lambda y, scope: y + torch.ones_like(y),
    "doubled": lambda y, scope: y * 2,
    "negated": lambda y, scope: -y,
    "relu": lambda y, scope: y.relu(),
    "statistic": lambda y, scope: note(y, scope, y.detach().to(scope.b.dtype).square().sum()),
    "user": lambda y, scope: note(y, scope, y.to(scope.b.dtype).relu().sum()),
    "first": lambda y, scope: note(y, scope, y.flatten()[0].to(scope.b.dtype)),
    "whole": lambda y, scope: note(y, scope, y.to(scope.b.dtype) + 1),
    "print": printed,
    "break": broken,
    "hook": hooked,
    "cast": lambda y, scope: (y.double() * 2).to(y.dtype),
    "layout": lambda y, scope: y.mT.contiguous().mT,
    "flagged": lambda y, scope: y + scope.b[: y.shape[-1]].to(y.dtype) if scope.flag else y,
    "longer": lambda y, scope: y + scope.b.sum().to(y.dtype),  # b has another length in the second call
    "straight through": lambda y, scope: y + y.detach(),
    "read twice": lambda y, scope: y + y,
}
BOUNDED: dict[str, Step] = {
    "clamp": lambda x, scope: x.clamp(-3, 3),
    "hardtanh": lambda x, scope: F.hardtanh(x, -3, 3),
    "where": lambda x, scope: torch.where(x.abs() <= 3, x, x.sign() * 3),
    "remainder": lambda x, scope: x - (x - x.clamp(-3, 3)).detach(),
}
MATMULS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w.mT),
    "flat": lambda x, w: (x.flatten(0, 1) @ w).unflatten(0, x.shape[:2]),
    "einsum": lambda x, w: torch.einsum("btk,kn->btn", x, w),
    "other K": lambda x, w: torch.cat([x, x], -1) @ torch.cat([w, -2 * w]),
    "half of K": lambda x, w: x[..., ::2] @ w[::2],
    "two": lambda x, w: x @ w + (x * 2) @ w.relu(),
    "chained": lambda x, w: (x @ w) @ torch.eye(w.shape[1], dtype=w.dtype).flip(0),
    "none": lambda x, w: x.unflatten(-1, (-1, w.shape[1])).sum(-2),
    "frozen": lambda x, w: x @ w.detach(),
    "up-cast": lambda x, w: (x.double() @ w.double()).to(x.dtype),
    "checkpoint": lambda x, w: checkpoint(torch.matmul, x, w, use_reentrant=False),
}
ORDERS: dict[str, tuple[Callable[[Tensor, int, int], Tensor], Callable[[Tensor, int], Tensor]]] = {
    "movedim": (lambda t, d, r: t.unflatten(d, (r, -1)).movedim(d, 0), lambda t, d: t.movedim(0, d).flatten(d, d + 1)),
    "stack": (lambda t, d, r: torch.stack(t.chunk(r, d)), lambda t, d: torch.cat(t.unbind(0), d)),
    "rows first": (  # xDiT's: [R, t, b, h, d]
        lambda t, d, r: t.unflatten(d, (r, -1)).movedim(d, 0).transpose(1, 2),
        lambda t, d: t.transpose(1, 2).movedim(0, d).flatten(d, d + 1),
    ),
}


def summed(x: Tensor, op: str, name: str) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), op, name))


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, back: bool, name: str) -> Tensor:
        ctx.op, ctx.back, ctx.name = op, back, name
        return summed(x, op, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, ctx.op, ctx.name) if ctx.back else grad, None, None, None


class Held(torch.autograd.Function):
    """x, which all ranks hold: its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad, "sum", ctx.name), None


def splits_of(kind: str, x: Tensor, size: int, rank: int) -> list[int]:
    """The splits of an exchange, both ways: in an uneven one each rank keeps twice as much."""
    kept = 2 if kind == "uneven" else 1
    rows = x.shape[0] // (size - 1 + kept)
    return [rows * (kept if i == rank else 1) for i in range(size)]


def collective(kind: str, x: Tensor, size: int, rank: int, name: str) -> Tensor:
    if kind in SUMS:
        return Sum.apply(x, "avg" if kind == "average" else "sum", kind != "sum", name)
    if kind == "held":
        return Held.apply(x, name)
    if kind in EXCHANGES:
        splits = splits_of(kind, x, size, rank)
        return fc.all_to_all_single_autograd(x.contiguous(), splits, splits, name)
    if kind == "scatter":
        return fc.reduce_scatter_tensor_autograd(x, "sum", 0, name)
    return fc.all_gather_tensor_autograd(x, 0, name)


def by_hand(kind: str, xs: list[Tensor]) -> list[Tensor]:
    """The results on all ranks, whose gradients are those of `collective`."""
    size = len(xs)
    if kind == "sum":
        return [sum((x if i == p else x.detach() for i, x in enumerate(xs)), torch.zeros(())) for p in range(size)]
    if kind == "held":
        zero = sum((x - x.detach() for x in xs), torch.zeros(()))
        return [x.detach() + zero for x in xs]
    if kind in ("summed", "average", "scatter"):
        total = sum(xs, torch.zeros(()))
        if kind == "scatter":
            return list(total.chunk(size))
        return [total / (size if kind == "average" else 1) for _ in xs]
    if kind == "gather":
        return [torch.cat(xs) for _ in xs]
    parts = [x.split(splits_of(kind, x, size, rank)) for rank, x in enumerate(xs)]
    return [torch.cat([part[p] for part in parts]) for p in range(size)]


SUMS = ("sum", "summed", "average")  # the gradient of "sum" is not summed
EXCHANGES = ("push", "pull", "uneven")
KINDS = [*SUMS, "held", "scatter", "gather", *EXCHANGES]
LATE = ("held", "gather", "pull")  # whose matmul is behind
WIDE = ("pull",)  # whose matmul has R times N inputs

# a rank's steps


def steps(p: Program, rank: int) -> Iterator[Step | str]:
    """The name of a kind stands for the collective."""
    for i, block in enumerate(p.blocks):
        yield from _steps(p, i, block, rank)


def kept_twice(x: Tensor, size: int, rank: int) -> Tensor:
    parts = x.chunk(size)
    return torch.cat([*parts[:rank], parts[rank] * 2, *parts[rank:]])


def kept_once(x: Tensor, size: int, rank: int) -> Tensor:
    rows = x.shape[0] // (size + 1)
    return torch.cat([x[: rows * rank], x[rows * (rank + 1) :]])


def _steps(p: Program, i: int, block: Block, rank: int) -> Iterator[Step | str]:
    mine = [change for change in block.changes if rank in change.ranks]
    named: dict[str, list[str]] = {}
    for change in mine:
        named.setdefault(change.point, []).append(change.name)
    kind, size = block.kind, p.size
    yield BOUNDED[named.get("bounded", ["clamp"])[0]]
    multiply = MATMULS.get(named.get("matmul", [""])[0], torch.matmul)
    to, back = ORDERS[named.get("order", [block.order])[0]]

    def matmul(x: Tensor, scope: Scope) -> Tensor:
        return multiply(x, scope.w[i])

    def heads(x: Tensor, scope: Scope) -> Tensor:
        return x.unflatten(-1, (-1, 2))

    late = kind in LATE
    if not late:
        yield matmul
    yield from (POINTS[name] for name in named.get("sent", ()))
    if p.dtype != torch.float32:
        yield lambda x, scope: x.to(p.dtype) if scope.b.dtype == torch.float32 else x
    if kind in ("push", "pull"):
        dim = 2 if kind == "push" else 1
        yield heads
        yield lambda x, scope: to(x, dim, size).flatten(0, 1)
        yield kind
        yield lambda x, scope: back(x.unflatten(0, (size, -1)), 3 - dim).flatten(2)
    elif kind == "uneven":
        yield lambda x, scope: kept_twice(x.flatten(0, 1), size, rank)
        yield kind
        yield lambda x, scope: kept_once(x, size, rank).unflatten(0, (p.batch, -1))
    elif kind == "scatter":
        yield lambda x, scope: x.unflatten(1, (size, -1)).movedim(1, 0).flatten(0, 1)
        yield kind
    elif kind == "gather":
        yield kind
        yield lambda x, scope: x.unflatten(0, (size, -1)).movedim(0, 1).flatten(1, 2)
    else:
        yield kind
    if p.dtype != torch.float32:
        yield lambda x, scope: x.to(scope.b.dtype)
    yield from (POINTS[name] for name in named.get("received", ()))
    if late:
        yield matmul
        yield from (POINTS[name] for name in named.get("result", ()))
    if kind in ("scatter", "pull"):
        yield lambda x, scope: x.repeat(1, size, 1)
    elif kind == "gather":
        yield lambda x, scope: x.unflatten(1, (size, -1)).sum(1)
    elif kind == "push":
        yield lambda x, scope: x.reshape(x.shape[0], x.shape[1] // size, x.shape[2] * size)


Inputs = list[Tensor]  # x, b, then a weight per block


def inputs(p: Program, rank: int, call: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(1000 * p.seed + 10 * rank + call)
    n = 2 * p.size

    def integers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    x = integers(p.batch, p.size * p.tokens[call], n)
    weights = [integers(p.size * n if block.kind in WIDE else n, n) for block in p.blocks]
    return [x, integers(p.size * n + (call if p.has("longer", rank) else 0)), *weights]


def program_of(p: Program, rank: int, name: str) -> Callable[..., Any]:
    """As this rank writes it: a line a step, as Dynamo would leave all of a loop in which a graph breaks to eager."""

    def communicate(kind: str) -> Step:
        return lambda x, scope: collective(kind, x, p.size, rank, name)

    mine = [communicate(step) if isinstance(step, str) else step for step in steps(p, rank)]
    names: dict[str, Any] = {"Scope": Scope, **{f"step_{i}": step for i, step in enumerate(mine)}}
    lines = ["x, b, *w = args", "scope = Scope(w, b, flag)", *(f"x = step_{i}(x, scope)" for i in range(len(mine)))]
    exec("\n    ".join(["def program(args, flag):", *lines, "return x, scope.extras"]), names)
    program: Callable[..., Any] = names["program"]
    return program


def loss_of(x: Tensor, extras: Sequence[Tensor]) -> Tensor:
    weights = (torch.arange(x.numel()) % 5 - 2).to(x.dtype).view(x.shape)
    return sum((e.sum() for e in extras if e.requires_grad), (x * weights).sum())


def results(outs: Any, grads: Iterable[Tensor | None] = ()) -> list[Tensor]:
    return [outs[0].detach(), *(e.detach() for e in outs[1]), *(g for g in grads if g is not None)]


def expected(p: Program, call: int) -> list[list[Tensor]]:
    args = [inputs(p, rank, call, torch.float64) for rank in range(p.size)]
    for rank, mine in enumerate(args):
        for each in mine:
            each.requires_grad_(p.backward_on(rank))
    scopes = [Scope(mine[2:], mine[1], p.flag_on(rank, call)) for rank, mine in enumerate(args)]
    xs = [mine[0] for mine in args]
    for row in zip(*(_phases(p, rank) for rank in range(p.size)), strict=True):
        for rank, (local, _) in enumerate(row):
            for step in local:
                xs[rank] = step(xs[rank], scopes[rank])
        if row[0][1]:
            xs = by_hand(row[0][1], xs)
    outs = [(x, scope.extras) for x, scope in zip(xs, scopes, strict=True)]
    leaves = [each for rank, mine in enumerate(args) if p.backward_on(rank) for each in mine]
    if not leaves:
        return [results(out) for out in outs]
    total = sum((loss_of(*out) for rank, out in enumerate(outs) if p.backward_on(rank)), torch.zeros(()))
    grads = iter(torch.autograd.grad(total, leaves, allow_unused=True))
    return [
        results(out, [next(grads) for _ in args[rank]] if p.backward_on(rank) else ()) for rank, out in enumerate(outs)
    ]


def _phases(p: Program, rank: int) -> Iterator[tuple[list[Step], str]]:
    local: list[Step] = []
    for step in steps(p, rank):
        if isinstance(step, str):
            yield local, step
            local = []
        else:
            local.append(step)
    yield local, ""


def is_exact(wants: list[list[Tensor]]) -> bool:
    return all(each.abs().max() < LARGEST for mine in wants for each in mine if each.numel())


# draws
def drawn(seed: int, size: int, compiled: bool) -> Program:
    rng = random.Random(seed)
    grad = rng.choice(["all"] * 4 + ["none"] * 3 + ["some", "recorded"])
    dtype = torch.float32 if grad in ("all", "some") else rng.choice([torch.float32] * 2 + [torch.bfloat16])
    kinds = [kind for kind in KINDS if kind != "average" or size == 2]
    if grad == "some":
        kinds = ["sum"]
    elif grad != "all":
        kinds.remove("held")
    blocks = tuple(_block(rng, rng.choice(kinds), size, compiled) for _ in range(rng.randint(1, 4)))
    tokens = (2, 2) if rng.random() < 0.8 else (2, 3)
    overlap = compiled and rng.random() < 0.25
    return Program(seed, size, blocks, rng.randint(1, 2), grad, _ranks(rng, size), dtype, tokens, overlap)


def _ranks(rng: random.Random, size: int) -> tuple[int, ...]:
    count = rng.choice([1] * 5 + [size - 1, size])
    return tuple(sorted(rng.sample(range(size), count)))


def _block(rng: random.Random, kind: str, size: int, compiled: bool) -> Block:
    points = ["matmul", "bounded", "sent", "sent", "received", "received"]
    points += ["result"] * 2 if kind in LATE else []
    points += ["order"] if kind in ("push", "pull") else []
    order = rng.choice(["movedim", "movedim", "rows first"])
    changes = []
    for point in rng.sample(points, rng.randint(0, 3)):
        names: Iterable[str] = POINTS
        if point == "matmul":
            names = MATMULS
        elif point == "bounded":
            names = BOUNDED
        elif point == "order":
            names = ["movedim", "stack"] if order == "movedim" else [order]
        elif not compiled:
            names = set(POINTS) - {"print", "break"}
        changes.append(Change(point, rng.choice(sorted(names)), _ranks(rng, size)))
    return Block(kind, order, tuple(changes))
