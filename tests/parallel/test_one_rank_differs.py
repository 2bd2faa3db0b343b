"""Random chains of styled layers that some ranks change after the styles were applied, beside torch's styles."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import assert_close
from tests.helpers.tiers import nightly_but

BATCH, EACH, WIDTH = 2, 2, 12  # tokens of each rank; R divides the width


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 2


def wrapped(m: Any) -> None:
    if m.given == Shard(2):  # torch sums behind forward
        return
    inner = m.forward
    m.forward = lambda x: inner(x) * 2


def written(m: Any) -> None:
    with torch.no_grad():
        m.weight.to_local().mul_(2)


def of_x(m: Any, change: Callable[[Tensor], Tensor]) -> None:
    m.before.append(change)  # torch's style has made another x of it where hooks see it


def of_y(m: Any, change: Callable[[Tensor], Any]) -> None:
    m.register_forward_hook(lambda m, args, y: change(y))


def doubled(y: Tensor) -> None:
    if y.requires_grad:
        y.register_hook(lambda g: g * 2)


def as_dtensor(m: Any, x: Tensor) -> Tensor:
    return DTensor.from_local(x, m.weight.device_mesh, [m.given], run_check=False)


# what a rank does to a layer; each keeps its collectives
CHANGES: dict[str, Callable[[Any], Any]] = {
    "reads y": lambda m: of_y(m, lambda y: print(end="" if float(y.detach().norm()) < 1e30 else "large")),
    "reads x": lambda m: of_x(m, lambda x: (float(x.detach().norm()), x)[1]),
    "scales y": lambda m: of_y(m, lambda y: y * 2),
    "casts y": lambda m: of_y(m, lambda y: y.double().sin().float()),
    "scales the gradient": lambda m: of_y(m, doubled),
    "another user": lambda m: of_y(m, lambda y: y + y.relu()),
    "x in another layout": lambda m: of_x(m, lambda x: x.mT.contiguous().mT),
    "x as a DTensor": lambda m: of_x(m, lambda x: as_dtensor(m, x)) if m.given != Replicate() else None,  # its own sum
    "backward hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "forward": wrapped,
    "compiled": lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")),
    "frozen weight": lambda m: m.weight.is_leaf and m.weight.requires_grad_(False),  # not where it is parametrized
    "frozen bias": lambda m: m.bias.requires_grad_(isinstance(m.given, Shard)),  # a Row's is summed by its backward
    "written": written,
    "parametrized": lambda m: parametrize.register_parametrization(m, "weight", Twice()),
    "hook of the weight": lambda m: m.weight.requires_grad and m.weight.register_hook(lambda g: g * 2),
}


@dataclass(frozen=True)
class Chain:
    """``layouts``: of x before each pair of layers, and of the result. ``changes``: (layer, name, ranks)."""

    layouts: tuple[Any, ...]
    changes: tuple[tuple[int, str, tuple[int, ...]], ...]
    grad_ranks: tuple[int, ...]  # they record a graph; all make a backward if all record


def drawn(rng: random.Random, size: int) -> Chain:
    layouts = tuple(rng.choice([Shard(1), Replicate()]) for _ in range(rng.randint(2, 3)))

    def some() -> tuple[int, ...]:
        return tuple(sorted(rng.sample(range(size), rng.choice([1, 1, size - 1, size]))))

    layers = 2 * len(layouts) - 2
    names = rng.sample(sorted(CHANGES), rng.randint(1, 4))
    recording = tuple(range(size)) if rng.random() < 0.75 else some()
    return Chain(layouts, tuple((rng.randrange(layers), name, some()) for name in names), recording)


def model(styles: Any, chain: Chain, mesh: DeviceMesh, rank: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * len(chain.layouts) - 2)]
    for i, (before, after) in enumerate(zip(chain.layouts, chain.layouts[1:], strict=False)):
        column, row = layers[2 * i : 2 * i + 2]
        torch_parallel.parallelize_module(column, mesh, styles.ColwiseParallel(input_layouts=before))
        torch_parallel.parallelize_module(row, mesh, styles.RowwiseParallel(output_layouts=after))
        column.given, row.given, column.before, row.before = before, Shard(2), [], []
    for index, name, ranks in chain.changes:
        if rank in ranks:
            CHANGES[name](layers[index])
    return nn.Sequential(*layers)


def step(styles: Any, chain: Chain, mesh: DeviceMesh, rank: int) -> list[Any]:
    torch._dynamo.reset()
    size = mesh.size()
    x = torch.randn(BATCH, EACH * size, WIDTH, generator=torch.Generator().manual_seed(1))
    x = (x.chunk(size, 1)[rank] if chain.layouts[0] == Shard(1) else x).clone()
    recording = rank in chain.grad_ranks
    layers = model(styles, chain, mesh, rank)
    with torch.set_grad_enabled(recording):
        y = x.requires_grad_(recording)
        for layer in layers:
            for change in layer.before:
                y = change(y)
            y = layer(y)
    if len(chain.grad_ranks) < size:
        return [y.detach()]
    y.backward(torch.arange(1.0, 1.0 + y.numel()).view(y.shape).sin())
    grads = [x.grad, *(p.grad for p in layers.parameters())]
    return [y.detach(), *(g.to_local() if isinstance(g, DTensor) else g for g in grads)]


def check(rank: int, seeds: range) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for seed in seeds:
        chain = drawn(random.Random(seed), mesh.size())
        want = step(torch_parallel, chain, mesh, rank)
        try:
            assert_close(step(our_parallel, chain, mesh, rank), want)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {chain}") from error


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("first", nightly_but([0], [0, *range(1000, 1200, 50)]))
def test_changes_after_the_style(rank: int, world_size: int, first: int) -> None:
    check(rank, range(first, first + 50 if first else 40 // world_size))
