"""A simulated world that carries out redistribution steps, and an oracle of what each rank must hold after them.

All ranks of a mesh are in one process: each packs and unpacks, and the collective is made here from its definition
alone. The oracle knows neither boxes nor groups: it holds the whole tensor, or all its parts, and cuts it by
torch.chunk, one mesh dim after the other.
"""

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
from torch import Tensor

from fusedcomm.redistribution import execute, steps
from fusedcomm.redistribution.sharding import Sharding
from fusedcomm.redistribution.steps import Step

Coordinate = tuple[int, ...]
Locals = dict[Coordinate, Tensor]
Traffic = tuple[float, float]  # elements of one group: sent per rank on average, and sent or received by the busiest

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}


def coordinates(mesh_shape: tuple[int, ...]) -> list[Coordinate]:
    return list(itertools.product(*(range(size) for size in mesh_shape)))


@dataclass
class Oracle:
    """``parts``: int64 [size of each mesh dim that is partial, else 1, ..., *tensor]."""

    sharding: Sharding
    parts: Tensor

    def move(self, after: Sharding) -> None:
        for i, (op, left) in enumerate(zip(self.sharding.partial, after.partial, strict=True)):
            if op is not None and left is None:
                total = reduce(COMBINE[op], self.parts.unbind(i))
                if op == "avg":
                    assert not (total % self.parts.shape[i]).any(), "parts must sum to multiples"
                    total = total // self.parts.shape[i]
                self.parts = total.unsqueeze(i)
        self.sharding = after

    def local(self, coordinate: Coordinate) -> Tensor:
        sizes = self.parts.shape
        tensor = self.parts[tuple(c if sizes[i] > 1 else 0 for i, c in enumerate(coordinate))]
        for dim, mesh_dims in enumerate(self.sharding.cuts):
            for i in mesh_dims:
                chunks = tensor.chunk(self.sharding.mesh_shape[i], dim)
                c = coordinate[i]
                tensor = chunks[c] if c < len(chunks) else tensor.narrow(dim, 0, 0)
        return tensor


def with_dtype(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The values in ``dtype``, where whole numbers stay different as far as the dtype can tell them apart."""
    if dtype == torch.bool:
        return (values * 40503 >> 4) % 2 == 1
    if dtype.is_complex:
        return torch.complex(values.float(), -3.0 * values.float()).to(dtype)
    return values.to(dtype)


def strided(tensor: Tensor, rng: random.Random) -> Tensor:
    dims = rng.sample(range(tensor.ndim), tensor.ndim)
    back = sorted(range(tensor.ndim), key=dims.__getitem__)
    return tensor.permute(dims).contiguous().permute(back)


def exchanged(sents: list[execute.Sent]) -> tuple[list[Tensor], Traffic]:
    size, blocks = len(sents), []
    for sent in sents:
        assert (sent.input_splits is None) == (sent.output_splits is None)
        if sent.input_splits is None:
            assert sent.tensor.shape[0] % size == 0
        blocks.append(sent.tensor.split(sent.input_splits or [sent.tensor.shape[0] // size] * size))
    results, sends, receives = [], [], []
    for k, sent in enumerate(sents):
        arriving = [blocks[sender][k] for sender in range(size)]
        if sent.output_splits is not None:
            assert sent.output_splits == [block.shape[0] for block in arriving]
        results.append(torch.cat(arriving))
        sends.append(sent.tensor.numel() - blocks[k][k].numel())
        receives.append(results[-1].numel() - blocks[k][k].numel())
    return results, (sum(sends) / size, max(*sends, *receives))


def collective(kind: str, reduce_op: str | None, sents: list[execute.Sent]) -> tuple[list[Tensor], Traffic]:
    tensors, size = [sent.tensor for sent in sents], len(sents)
    if kind == steps.SLICE:
        return tensors, (0, 0)
    assert all(tensor.is_contiguous() for tensor in tensors)
    if kind == steps.ALL_TO_ALL:
        return exchanged(sents)
    assert all(sent.input_splits is None and sent.output_splits is None for sent in sents)
    assert len({tensor.shape for tensor in tensors}) == 1
    if kind == steps.ALL_GATHER:
        return [torch.cat(tensors) for _ in range(size)], ((size - 1) * tensors[0].numel(),) * 2
    total = reduce(COMBINE[str(reduce_op)], tensors)
    share = (size - 1) / size * total.numel()
    if kind == steps.ALL_REDUCE:
        return [total.clone() for _ in range(size)], (2 * share, 2 * share)
    assert kind == steps.REDUCE_SCATTER and total.shape[0] % size == 0
    blocks = total.unflatten(0, (size, total.shape[0] // size)).unbind(0)
    return [block.clone() for block in blocks], (share, share)


def groups_of(step: Step) -> list[list[Coordinate]]:
    """The ranks that communicate, each group in row-major order."""
    found: dict[Coordinate, list[Coordinate]] = {}
    for coordinate in coordinates(step.before.mesh_shape):
        found.setdefault(tuple(-1 if i in step.mesh_dims else c for i, c in enumerate(coordinate)), []).append(
            coordinate
        )
    return list(found.values())


def carry_out(step: Step, held: Locals, rng: random.Random, shuffle: bool) -> Locals:
    """A step by all ranks, whose order in groups may be shuffled; what they send is ``step.traffic``."""
    result: Locals = {}
    for members in groups_of(step):
        size = len(members)
        order = tuple(rng.sample(range(size), size)) if shuffle else tuple(range(size))
        ranks = [members[index] for index in order]
        sents = [execute.pack(step, rank, order, held[rank]) for rank in ranks]
        received, traffic = collective(step.sends_as, step.reduce_op, sents)
        for rank, tensor in zip(ranks, received, strict=True):
            result[rank] = execute.unpack(step, rank, order, tensor)
        if members[0] == (0,) * len(members[0]):
            rounded = pytest.approx(step.traffic, rel=1e-12)  # what is divided by a number of ranks
            assert traffic == rounded, f"{step} sent {traffic}"
    return result


@dataclass(frozen=True)
class Plan:
    path: tuple[Sharding, ...]
    dtype: torch.dtype

    @property
    def steps(self) -> list[Step]:
        found = [steps.step(a, b) for a, b in itertools.pairwise(self.path)]
        assert None not in found
        return [step for step in found if step is not None]


def parts_of(sharding: Sharding, rng: random.Random) -> Tensor:
    """Whole numbers whose reductions are exact in bfloat16. Without reductions all of them differ."""
    sizes = [size if op else 1 for size, op in zip(sharding.mesh_shape, sharding.partial, strict=True)]
    shape = (*sizes, *sharding.shape)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    ops = set(sharding.partial) - {None}
    if not ops:
        return torch.randperm(math.prod(shape), generator=generator).reshape(shape)
    if "product" in ops:
        return torch.tensor([-2, -1, 1, 2])[torch.randint(4, shape, generator=generator)]
    factor = math.prod(size for size, op in zip(sizes, sharding.partial, strict=True) if op == "avg")
    most = max(16 // factor, 1)
    return factor * torch.randint(-most, most + 1, shape, generator=generator)


def check(start: Sharding, steps: Sequence[Step], dtype: torch.dtype, rng: random.Random, shuffle: bool) -> None:
    """Each rank has what the oracle says after each step, in new memory, and keeps what it had."""
    oracle = Oracle(start, parts_of(start, rng))
    ranks = coordinates(start.mesh_shape)
    held = {rank: strided(with_dtype(oracle.local(rank), dtype), rng) for rank in ranks}
    for step in steps:
        was = {rank: tensor.clone() for rank, tensor in held.items()}
        now = carry_out(step, held, rng, shuffle)
        oracle.move(step.after)
        for rank in ranks:
            got, want = now[rank], with_dtype(oracle.local(rank), dtype)
            where = f"{step.kind} {step.before} -> {step.after} at {rank}, {shuffle=}"
            assert got.shape == want.shape and got.dtype == want.dtype, f"{where}: {got.shape}, not {want.shape}"
            assert torch.equal(got, want), f"{where}: {got}, not {want}"
            assert got.is_contiguous(), where
            assert got.numel() == 0 or got.untyped_storage().data_ptr() != held[rank].untyped_storage().data_ptr()
            assert torch.equal(held[rank], was[rank]), f"{where}: input changed"
        held = now


def sharding_of(shape: Sequence[int], mesh: Sequence[int], placed: Sequence[int | str | None]) -> Sharding:
    cuts = [[i for i, p in enumerate(placed) if p == dim] for dim in range(len(shape))]
    return Sharding.of(shape, mesh, cuts, [p if isinstance(p, str) else None for p in placed])
