"""The matmul and the collectives of the ops as plain programs: the parts of the `unfused` algorithm.

``cut``: where parts differ in size. ``padded``: whether these are then padded to blocks of one size, for the backend's
own collective; otherwise an all_to_all takes them as they are. All ranks must say the same: `cost` decides.

What graphs never hold runs without functional collectives: on NCCL these take a stream of their own, with events before
and after, copy what an all_reduce gets, and send an all_to_all of equal parts one by one.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fusedcomm.memory.group import find
from fusedcomm.plan.geometry.cut import Cut, Parts
from fusedcomm.run.group_collectives import reduce_scatter_single

_c10d = torch.ops._c10d_functional

# All backends move these dtypes. Other dtypes are sent as bytes.
MOVED = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    }
)


def exchange(
    t: Tensor,
    gather_dim: int,
    scatter_dim: int,
    group_size: int,
    group_name: str,
    cut: Cut | None = None,
    padded: bool = False,
) -> Tensor:
    """Cut t into R parts along scatter_dim, send part p to rank p, concatenate the received parts along gather_dim."""
    gather_dim, scatter_dim = gather_dim % t.ndim, scatter_dim % t.ndim
    if cut is not None:
        return _uneven_exchange(t, gather_dim, scatter_dim, group_name, cut, padded)
    if group_size == 1:
        return t.contiguous()
    blocks = t.unflatten(scatter_dim, (group_size, t.shape[scatter_dim] // group_size)).movedim(scatter_dim, 0)
    received = _equal_all_to_all(blocks.flatten(0, 1).contiguous(), group_name)
    return received.view(blocks.shape).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def _uneven_exchange(t: Tensor, gather_dim: int, scatter_dim: int, group_name: str, cut: Cut, padded: bool) -> Tensor:
    gathered, scattered = cut.both
    group_size = len(gathered.sizes)
    sent = parts(t, scatter_dim, scattered)
    if group_size == 1:
        return sent[0].clone(memory_format=torch.contiguous_format)  # no view of t, as an op's results are no views
    shapes = [list(sent[cut.rank].shape) for _ in range(group_size)]
    for shape, size in zip(shapes, gathered.sizes, strict=True):
        shape[gather_dim] = size
    receives = [math.prod(shape) for shape in shapes]
    if padded:
        outer = math.prod(size for dim, size in enumerate(t.shape) if dim not in (gather_dim, scatter_dim))
        step = _aligned(outer * gathered.largest * scattered.largest, t)
        arrived = _equal_all_to_all(_padded(sent, step), group_name)
        blocks = [block[:size] for block, size in zip(arrived.split(step), receives, strict=True)]
    else:
        blocks = _all_to_all(sent, receives, group_name)
    return torch.cat([block.view(shape) for block, shape in zip(blocks, shapes, strict=True)], gather_dim)


def _equal_all_to_all(sent: Tensor, group_name: str) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=find(group_name))
    return received


def _all_to_all(sent: Sequence[Tensor], receives: list[int], group_name: str) -> list[Tensor]:
    """Each rank's part for this one, flat. ``sent``: by dst_rank; ``receives``: elements by src_rank."""
    flat, sends = torch.cat([part.flatten() for part in sent]), [part.numel() for part in sent]
    return list(_c10d.wait_tensor(_c10d.all_to_all_single(flat, receives, sends, group_name)).split(receives))


def all_gather(
    t: Tensor, gather_dim: int, group_size: int, group_name: str, cut: Cut | None = None, padded: bool = False
) -> Tensor:
    """Every rank's t, concatenated along gather_dim."""
    gather_dim = gather_dim % t.ndim
    if cut is not None and cut.gathered is not None and group_size > 1:
        return _uneven_all_gather(t, gather_dim, group_size, group_name, cut.gathered, padded)
    if group_size == 1:
        return t.contiguous()
    gathered = _c10d.wait_tensor(all_gather_into_tensor(t.contiguous(), group_size, group_name))
    if gather_dim == 0:  # the views below are a tenth of a tiny call
        return gathered
    blocks = gathered.unflatten(0, (group_size, t.shape[0]))
    return blocks.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()


def _uneven_all_gather(
    t: Tensor, gather_dim: int, group_size: int, group_name: str, gathered: Parts, padded: bool
) -> Tensor:
    outer = math.prod([*t.shape[:gather_dim], *t.shape[gather_dim + 1 :]])
    receives = [outer * size for size in gathered.sizes]
    if padded:
        step = _aligned(outer * gathered.largest, t)
        arrived = all_gather_into_tensor(_padded([t], step), group_size, group_name)
        arrived_blocks = _c10d.wait_tensor(arrived).split(step)
        blocks = [block[:size] for block, size in zip(arrived_blocks, receives, strict=True)]
    else:
        blocks = _all_to_all([t] * group_size, receives, group_name)
    shapes = [[*t.shape[:gather_dim], size, *t.shape[gather_dim + 1 :]] for size in gathered.sizes]
    return torch.cat([block.view(shape) for block, shape in zip(blocks, shapes, strict=True)], gather_dim)


def reduce_scatter(
    t: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group_size: int,
    group_name: str,
    cut: Cut | None = None,
    padded: bool = False,
) -> Tensor:
    """Part r, of R along scatter_dim, of the sum or average of every rank's t."""
    scatter_dim = scatter_dim % t.ndim
    if cut is not None:
        t = averaged(t, reduce_op, group_size)
        return _uneven_reduce_scatter(t, scatter_dim, group_size, group_name, cut, padded)
    if group_size == 1:
        return t.contiguous()
    t = averaged(t, reduce_op, group_size)
    blocks = t.unflatten(scatter_dim, (group_size, t.shape[scatter_dim] // group_size)).movedim(scatter_dim, 0)
    sent = blocks.flatten(0, 1).contiguous()
    return _equal_reduce_scatter(sent, group_size, group_name).view(blocks.shape[1:])


def _uneven_reduce_scatter(
    t: Tensor, scatter_dim: int, group_size: int, group_name: str, cut: Cut, padded: bool
) -> Tensor:
    assert cut.scattered is not None
    sent = parts(t, scatter_dim, cut.scattered)
    own = sent[cut.rank]
    if group_size == 1:
        return own.clone(memory_format=torch.contiguous_format)  # as above
    if padded:
        outer = math.prod(size for dim, size in enumerate(t.shape) if dim != scatter_dim)
        flat = _padded(sent, _aligned(outer * cut.scattered.largest, t))
        total = _equal_reduce_scatter(flat, group_size, group_name)
        return total[: own.numel()].view(own.shape)
    blocks = _all_to_all(sent, [own.numel()] * group_size, group_name)
    total = blocks[0].to(torch.promote_types(t.dtype, torch.float32))
    for block in blocks[1:]:  # in rank order, and rounded once
        total = total + block
    return total.to(t.dtype).view(own.shape)


def _equal_reduce_scatter(sent: Tensor, group_size: int, group_name: str) -> Tensor:
    total = sent.new_empty(sent.shape[0] // group_size, *sent.shape[1:])
    reduce_scatter_single(total, sent, group=find(group_name))
    return total


def parts(t: Tensor, dim: int, parts: Parts) -> list[Tensor]:
    """Each rank's part of ``dim``."""
    return [t.narrow(dim, start, size) for start, size in zip(parts.starts, parts.sizes, strict=True)]


def _padded(sent: Sequence[Tensor], step: int) -> Tensor:
    return torch.cat([pad(part.flatten(), (0, step - part.numel())) for part in sent])


def _aligned(numel: int, t: Tensor) -> int:
    """``numel``, at least 1, rounded up to a multiple of 16 bytes, as NCCL moves them fastest."""
    step = 16 // t.element_size()
    return -(-(numel or 1) // step) * step


def all_reduce(t: Tensor, reduce_op: str, group_size: int, group_name: str, *, owned: bool = False) -> Tensor:
    """The sum or average of every rank's t. ``owned``: in t's memory, and in no graph."""
    if group_size == 1:
        return t.contiguous()
    part = averaged(t, reduce_op, group_size).contiguous()
    if owned:
        dist.all_reduce(part, group=find(group_name))
        return part
    return _c10d.wait_tensor(_c10d.all_reduce(part, "sum", group_name))


def averaged(part: Tensor, reduce_op: str, group_size: int) -> Tensor:
    """This rank's summand. Averages are divided first, as float16 may hold them but not their sum."""
    return part / group_size if reduce_op == "avg" else part


def matmul(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ w + bias``, rounded once; w is [K, N] or has x's batch dims."""
    if bias is None:
        return torch.matmul(x, w)
    if w.ndim == 2:
        return torch.nn.functional.linear(x, w.mT, bias)
    return torch.baddbmm(bias, x.flatten(0, -3), w.flatten(0, -3)).unflatten(0, x.shape[:-2])


def all_gather_into_tensor(t: Tensor, group_size: int, group_name: str) -> Tensor:
    """Starts ``_c10d_functional.all_gather_into_tensor``, over gloo by another of its collectives that sends the same.

    The coalesced all_gather behind this op ends processes in torch 2.11 to 2.15: gloo gets the pointers of CUDA tensors
    (pytorch/pytorch#152645), and on every device two threads of gloo write its name, too long for a std::string without
    memory of its own, and take no lock. A graph for CPUs keeps the op: the passes know its name.
    """
    on_cpu = t.is_cpu and not torch.compiler.is_compiling()
    if (t.is_cuda or on_cpu) and _is_gloo(group_name, t.device.type):
        if t.is_complex():  # torch's functional collectives send it as real numbers, their out forms refuse it
            real = all_gather_into_tensor(torch.view_as_real(t.resolve_conj()), group_size, group_name)
            return torch.view_as_complex(real)
        out = t.new_empty((group_size * t.shape[0], *t.shape[1:]))
        return _c10d.all_gather_into_tensor_out(t, group_size, group_name, out=out)
    return _c10d.all_gather_into_tensor(t, group_size, group_name)


def _is_gloo(group_name: str, device_type: str) -> bool:
    return bool(find(group_name)._get_backend(torch.device(device_type)).name() == "gloo")


_is_gloo._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as torch.compiler.assume_constant_result does


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements: [..., bytes of one element]."""
    return tensor.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8)
