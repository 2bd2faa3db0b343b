"""The way of torch to redistribute a DTensor: its own plan, and the bytes of each collective.

The plan is read from torch's private planner, on rank 0 of a world without peers. Nothing is run. What a collective
sends is worked out here from the shapes that torch gives to it, with its padding; rank 0 has the largest shards.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedcomm.redistribution.step_time import MeshLinks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class TorchCollective:
    kind: str
    mesh_dims: tuple[int, ...]
    given: tuple[int, ...]  # the shape that it starts from, padded
    sent: float  # elements that one rank sends


@contextlib.contextmanager
def world(num_ranks: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh(mesh_shape: Sequence[int], flatten: bool) -> DeviceMesh:
    """A mesh, with every flattened mesh that torch could use if ``flatten``."""
    from torch.distributed.device_mesh import init_device_mesh

    names = tuple(f"d{i}" for i in range(len(mesh_shape)))
    made = init_device_mesh("cpu", tuple(mesh_shape), mesh_dim_names=names)
    if flatten:
        for num in range(2, len(names) + 1):
            for some in itertools.combinations(names, num):
                made[some]._flatten("_".join(some))
    return made


def collectives(
    mesh: DeviceMesh, shape: Sequence[int], before: Sequence[Placement], after: Sequence[Placement]
) -> list[TorchCollective]:
    """torch's collectives in their order. torch merges over the flattened meshes that there are."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    whole = torch.empty(tuple(shape), device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    source, target = (DTensorSpec(mesh, tuple(each), tensor_meta=meta) for each in (before, after))
    infos = _redistribute._gen_transform_infos_non_cached(source, target)
    with _quiet(_redistribute.logger):
        merged = _redistribute._optimize_transform_infos(infos, mesh, source.placements, target.placements)
    local = _local_shape(mesh, shape, before)
    found = []
    for info in merged:
        dims = tuple(getattr(info, "original_mesh_dims", (info.mesh_dim,)))
        collective = _follow(local, info, dims, math.prod(mesh.size(i) for i in dims))
        if collective is not None:
            found.append(collective)
    return found


def total(found: Sequence[TorchCollective], itemsize: int, links: MeshLinks) -> tuple[float, int, float]:
    """Seconds, the number of collectives, and the bytes that one rank sends."""
    seconds = sum(links.seconds(each.kind, each.sent * itemsize, each.mesh_dims) for each in found)
    return seconds, len(found), sum(each.sent for each in found) * itemsize


def _local_shape(mesh: DeviceMesh, shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The shape on rank 0."""
    local = list(shape)
    for i, each in enumerate(placements):
        if each.is_shard():
            dim = _dim(each)
            local[dim] = -(-local[dim] // mesh.size(i))
    return local


def _follow(local: list[int], info: Any, mesh_dims: tuple[int, ...], num: int) -> TorchCollective | None:
    """The collective of one transform, or None; ``local``, the shape on rank 0, becomes that after it."""
    source, target = info.src_dst_placements
    if num == 1:
        return None
    if source.is_partial() and target.is_replicate():
        return TorchCollective("all_reduce", mesh_dims, tuple(local), 2 * (num - 1) / num * math.prod(local))
    if target.is_shard():
        kept, given = list(local), list(local)
        chunk = -(-local[_dim(target)] // num)
        given[_dim(target)], kept[_dim(target)] = chunk * num, chunk
        if source.is_replicate():
            local[:] = kept
            return None
        if source.is_partial():
            local[:] = kept
            return TorchCollective("reduce_scatter", mesh_dims, tuple(given), (num - 1) / num * math.prod(given))
        size = info.logical_shape[_dim(source)]
        given[_dim(source)], kept[_dim(source)] = -(-size // num), size
        local[:] = kept
        return TorchCollective("all_to_all", mesh_dims, tuple(given), (num - 1) / num * math.prod(given))
    assert source.is_shard() and target.is_replicate(), f"{source} -> {target}"
    size = info.logical_shape[_dim(source)]
    given = list(local)
    given[_dim(source)] = -(-size // num)
    local[_dim(source)] = size
    return TorchCollective("all_gather", mesh_dims, tuple(given), float((num - 1) * math.prod(given)))


def _dim(placement: Any) -> int:
    return int(placement.dim)


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Inside, torch does not warn of each merge that it cannot make."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
