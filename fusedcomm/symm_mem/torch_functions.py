"""Functions of torch.distributed._symmetric_memory that know CUDA alone: they get a branch for CPU memory."""

from functools import wraps
from typing import Any

import torch
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from fusedcomm.symm_mem.peers import timeout_ms, workspace

_get_symm_mem_workspace = symm_mem.get_symm_mem_workspace


@wraps(_get_symm_mem_workspace)
def get_symm_mem_workspace(group_name: str, min_size: int) -> Any:
    if torch.cuda.is_available():  # the caller names no device
        return _get_symm_mem_workspace(GroupName(group_name), min_size)
    return workspace(group_name, min_size)


def install() -> None:
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
