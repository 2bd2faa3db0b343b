"""The memory of a rank's own calls, exchanged by the process group's collectives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.plan.builder import Device, Memory


class CallMemory:
    """A rank of a group on a device. A `Workspace` adds memory that the peers reach."""

    def __init__(self, rank: int, group_size: int, group_name: str, device: torch.device) -> None:
        self.rank, self.group_size, self.group_name, self.device = rank, group_size, group_name, device
        self.in_order = True  # False: this rank has left a call without its collectives, which the peers wait for

    def memory_facts(self) -> Memory:
        return Memory(self.rank, self.group_size, 0, 0, 0, HeaderLayout(self.group_size).for_kernels)

    def device_facts(self) -> Device:
        return Device(is_gpu=self.device.type == "cuda")

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a result."""
        return torch.empty(shape, dtype=dtype, device=self.device)
