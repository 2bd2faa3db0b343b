"""The CPU kernels of `torch.ops.symm_mem`, and torch's functions beside them. Ranks meet before each op, which ends its
reads of peers with a barrier.

Inputs may alias memory that the op writes, on this rank or a peer: they are copied before the ranks meet, and results
are written behind the last barrier.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from fusedcomm.memory.group import resolve
from fusedcomm.plan.geometry.cut import EVEN
from fusedcomm.symm_mem.peers import Peers, is_symmetric, same_call, timeout_ms, total, workspace

_get_symm_mem_workspace = symm_mem.get_symm_mem_workspace
_lib = torch.library.Library("symm_mem", "IMPL", "CPU")
_DTYPES = (torch.float32, torch.bfloat16)  # the dtypes that torch's CUDA kernels reduce


def register() -> None:
    """Register a CPU kernel for each op of this torch without one; unimplemented ops get a kernel that raises."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, op = name.partition("::")
        if namespace == "symm_mem" and not torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
            _lib.impl(op, KERNELS.get(op) or _refusal(op))


def _refusal(op: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"torch.ops.symm_mem.{op} has no CPU implementation")

    return refuse


def _check(op: str, must: str, holds: bool, got: object) -> None:
    if not holds:
        raise ValueError(f"torch.ops.symm_mem.{op}: {must}, got {got}")


def _check_reduced(op: str, reduce_op: str, **tensors: Tensor) -> None:
    """Check a sum of the first tensor over the ranks, which is symmetric; the others hold parts or results of it."""
    first, summed = next(iter(tensors.items()))
    _check(op, "reduce_op must be 'sum'", reduce_op == "sum", repr(reduce_op))
    dtype, made = summed.dtype, "made by torch.distributed._symmetric_memory.empty"
    _check(op, "dtype must be float32 or bfloat16", dtype in _DTYPES, dtype)
    for name, t in tensors.items():
        _check(op, f"{name} must be contiguous", t.is_contiguous(), f"strides {list(t.stride())}")
        _check(op, f"{name} must be {dtype}", t.dtype == dtype, t.dtype)
    _check(op, f"{first} must be {made}", is_symmetric(summed), "another tensor")


def _check_shape(op: str, name: str, t: Tensor, shape: Sequence[int]) -> None:
    _check(op, f"{name} must have shape {list(shape)}", t.shape == torch.Size(shape), list(t.shape))


# Sums of symmetric tensors


def one_shot_all_reduce(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return one_shot_all_reduce_out(input, reduce_op, group_name, torch.empty_like(input))


def one_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, out: Tensor) -> Tensor:
    return _one_shot("one_shot_all_reduce", input, None, reduce_op, group_name, out)


def one_shot_all_reduce_copy(symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    return one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, torch.empty_like(local_input))


def one_shot_all_reduce_copy_out(
    symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str, out: Tensor
) -> Tensor:
    return _one_shot("one_shot_all_reduce_copy", symm_buffer, local_input, reduce_op, group_name, out)


def _one_shot(
    op: str, input: Tensor, local_input: Tensor | None, reduce_op: str, group_name: str, out: Tensor
) -> Tensor:
    """Every rank reads all of every peer's tensor."""
    local = {} if local_input is None else {"local_input": local_input.clone()}
    with same_call(op, group_name, input=input, reduce_op=reduce_op):
        _check_reduced(op, reduce_op, input=input, **local, out=out)
        for name, t in {**local, "out": out}.items():
            _check_shape(op, name, t, input.shape)
    peers = Peers.of(op, "input", input, group_name)
    for t in local.values():
        input.copy_(t)
        peers.barrier()
    reduced = total(peers.tensors)
    peers.barrier()
    return out.copy_(reduced)


def two_shot_all_reduce_(input: Tensor, reduce_op: str, group_name: str) -> Tensor:
    op = "two_shot_all_reduce_"
    with same_call(op, group_name, input=input, reduce_op=reduce_op):
        _check_reduced(op, reduce_op, input=input)
    _two_shot(op, input, group_name)
    return input


def two_shot_all_reduce_out(input: Tensor, reduce_op: str, group_name: str, output: Tensor) -> Tensor:
    op = "two_shot_all_reduce_out"
    with same_call(op, group_name, input=input, reduce_op=reduce_op):
        _check_reduced(op, reduce_op, input=input, output=output)
        _check_shape(op, "output", output, input.shape)
    peers = _two_shot(op, input, group_name)
    reduced = input.clone()
    peers.barrier()  # a peer that has returned may write input
    return output.copy_(reduced)


def _two_shot(op: str, input: Tensor, group_name: str) -> Peers:
    """Every rank reads one part of every peer's tensor, which nobody else reads, and writes the sum there."""
    peers = Peers.of(op, "input", input.view(-1), group_name)
    parts = peers.part(0)
    reduced = total(parts)
    for part in parts:
        part.copy_(reduced)
    peers.barrier()
    return peers


def reduce_scatter_out(input: Tensor, group_name: str, split_last_dim: bool, output: Tensor) -> Tensor:
    op = "reduce_scatter_out"
    with same_call(op, group_name, input=input, split_last_dim=split_last_dim):
        _check_reduced(op, "sum", input=input, output=output)
        wanted = "input must have at least 1 dim" if split_last_dim else "input must have 1 dim without split_last_dim"
        _check(op, wanted, input.dim() >= 1 if split_last_dim else input.dim() == 1, input.dim())
        _check_divisible(op, "last dim of input", input.shape[-1], group_name)
        _check_shape(op, "output", output, [*input.shape[:-1], input.shape[-1] // resolve(group_name)[0]])
    peers = Peers.of(op, "input", input, group_name)
    reduced = total(peers.part(-1))
    peers.barrier()
    return output.copy_(reduced)


def _check_divisible(op: str, name: str, size: int, group_name: str) -> None:
    group_size, _ = resolve(group_name)
    _check(op, f"{name} must be divisible by group_size={group_size}", size % group_size == 0, size)


# Collectives of any tensor, over a workspace


def _low_contention_all_gather(tensor: Tensor, group_name: str) -> Tensor:
    op = "_low_contention_all_gather"
    tensor = tensor.contiguous().clone()
    with same_call(op, group_name, tensor=tensor):
        _check(op, "tensor must have at least 1 dim", tensor.dim() > 0, 0)
    peers = Peers.with_copy(op, tensor, group_name)
    peers.barrier()
    gathered = torch.cat(peers.tensors)
    peers.barrier()
    return gathered


def _low_contention_reduce_scatter(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    op = "_low_contention_reduce_scatter"
    tensor = tensor.contiguous().clone()
    with same_call(op, group_name, tensor=tensor, reduce_op=reduce_op):
        _check(op, "reduce_op must be 'sum' or 'avg'", reduce_op in ("sum", "avg"), repr(reduce_op))
        dtypes = (*_DTYPES, torch.float16)
        _check(op, "dtype must be float32, float16 or bfloat16", tensor.dtype in dtypes, tensor.dtype)
        _check(op, "tensor must have at least 1 dim", tensor.dim() > 0, 0)
        _check_divisible(op, "dim 0 of tensor", tensor.shape[0], group_name)
    peers = Peers.with_copy(op, tensor, group_name)
    peers.barrier()
    reduced = total(peers.part(0), len(peers.tensors) if reduce_op == "avg" else 1)
    peers.barrier()
    return reduced


# Matmuls with a collective


def fused_all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """Return torch's strides: compiled programs rely on them."""
    args = gather_dim, return_A, *EVEN.to_gather, *resolve(group_name)
    with torch._C._AutoDispatchBelowAutograd():  # as on CUDA, where a program must not rely on gradients either
        results, gathered = torch.ops.fusedcomm.all_gather_matmul(A, Bs, [None] * len(Bs), *args)
    if gather_dim % A.dim() != A.dim() - 1:
        restride = symm_mem.restride_A_shard_for_fused_all_gather_matmul
        results = [restride(result, gather_dim) for result in results]
        gathered = restride(gathered, gather_dim) if return_A else gathered
    return gathered if return_A else None, results


def fused_matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        args = reduce_op, scatter_dim, *EVEN.to_scatter, *resolve(group_name)
        return torch.ops.fusedcomm.matmul_reduce_scatter(A, B, None, *args)


# Memory


def get_remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    op = "get_remote_tensors"
    _check(op, "x must be contiguous", x.is_contiguous(), f"strides {list(x.stride())}")
    return Peers.of(op, "x", x, group_name).tensors


def memset32_(input: Tensor, offset: int, val: int, count: int) -> Tensor:
    _words("memset32_", input, offset, val, count).fill_(val)
    return input


def stream_write_value32_(input: Tensor, offset: int, val: int) -> Tensor:
    """A store after all earlier writes of this thread, as cuStreamWriteValue32 orders them in its stream."""
    from fusedcomm.kernels.cpu import native

    native.store32(_words("stream_write_value32_", input, offset, val, 1).data_ptr(), val)
    return input


def _words(op: str, input: Tensor, offset: int, val: int, count: int) -> Tensor:
    flat = input.dim() == 1 and input.is_contiguous() and input.dtype == torch.uint32
    _check(op, "input must be flat, contiguous and uint32", flat, f"{input.dtype}, strides {list(input.stride())}")
    _check(op, "val must be in [0, 2**32)", 0 <= val < 1 << 32, val)
    inside = offset >= 0 and count > 0 and offset + count <= input.numel()
    _check(op, f"[offset, offset + count) must be in [0, {input.numel()})", inside, f"offset {offset}, count {count}")
    return input[offset : offset + count]


KERNELS: dict[str, Callable[..., Any]] = {
    "_low_contention_all_gather": _low_contention_all_gather,
    "_low_contention_reduce_scatter": _low_contention_reduce_scatter,
    "fused_all_gather_matmul": fused_all_gather_matmul,
    "fused_matmul_reduce_scatter": fused_matmul_reduce_scatter,
    "get_remote_tensors": get_remote_tensors,
    "memset32_": memset32_,
    "one_shot_all_reduce": one_shot_all_reduce,
    "one_shot_all_reduce_copy": one_shot_all_reduce_copy,
    "one_shot_all_reduce_copy_out": one_shot_all_reduce_copy_out,
    "one_shot_all_reduce_out": one_shot_all_reduce_out,
    "reduce_scatter_out": reduce_scatter_out,
    "stream_write_value32_": stream_write_value32_,
    "two_shot_all_reduce_": two_shot_all_reduce_,
    "two_shot_all_reduce_out": two_shot_all_reduce_out,
}


# Functions of torch.distributed._symmetric_memory


@wraps(_get_symm_mem_workspace)
def get_symm_mem_workspace(group_name: str, min_size: int) -> Any:
    if torch.cuda.is_available():  # the caller names no device
        return _get_symm_mem_workspace(GroupName(group_name), min_size)
    return workspace(group_name, min_size)


def install_functions() -> None:
    """Give functions of torch.distributed._symmetric_memory that know CUDA alone a branch for CPU memory."""
    if symm_mem.get_symm_mem_workspace is get_symm_mem_workspace:
        return
    symm_mem.get_symm_mem_workspace = get_symm_mem_workspace
    if hasattr(symm_mem, "put_signal"):  # not in every release of torch
        _install_signals()


def _install_signals() -> None:
    cuda_put_signal, cuda_wait_signal = symm_mem.put_signal, symm_mem.wait_signal

    @wraps(cuda_put_signal)
    def put_signal(src: Tensor, hdl: Any, peer: int) -> None:
        if src.device.type == "cpu":
            if not 0 <= peer < hdl.world_size:
                raise ValueError(f"put_signal: peer must be in [0, {hdl.world_size}), got {peer}")
            if hdl.offset % src.itemsize:
                raise ValueError(f"put_signal: offset must be a multiple of {src.itemsize} bytes, got {hdl.offset}")
            hdl.get_buffer(peer, src.shape, src.dtype, hdl.offset // src.itemsize).copy_(src)
            hdl.put_signal(peer, timeout_ms=timeout_ms())
        else:
            cuda_put_signal(src, hdl, peer)

    @wraps(cuda_wait_signal)
    def wait_signal(hdl: Any, peer: int) -> None:
        if hdl.device.type == "cpu":
            hdl.wait_signal(peer, timeout_ms=timeout_ms())
        else:
            cuda_wait_signal(hdl, peer)

    symm_mem.put_signal, symm_mem.wait_signal = put_signal, wait_signal
