"""torch's symmetric memory on CPU tensors, for programs written against torch's own interface::

import fusedcomm.symm_mem

fusedcomm.symm_mem.enable_cpu()
t = torch.distributed._symmetric_memory.empty(1024, device="cpu")
"""

from fusedcomm.memory.topology import no_native
from fusedcomm.symm_mem import cpu_kernels

__all__ = ["enable_cpu"]


def enable_cpu() -> None:
    """Make torch.distributed._symmetric_memory and `torch.ops.symm_mem` work on CPU tensors, in this process.

    fusedcomm becomes torch's backend of symmetric memory for CPU tensors, unless there is one. The ops of
    `torch.ops.symm_mem` without a CPU kernel get one; docs/symmetric_memory.md has a table of them. Ops without an
    implementation raise NotImplementedError with their names. `get_symm_mem_workspace`, `put_signal` and `wait_signal`
    of torch's module take CPU memory. CUDA tensors are not affected, and a second call changes nothing.

    Raises:
        RuntimeError: the native part of fusedcomm cannot be loaded.

    Example, on each of 2 ranks::

        import fusedcomm.symm_mem

        fusedcomm.symm_mem.enable_cpu()
        t = torch.distributed._symmetric_memory.empty(4, device="cpu").fill_(1)
        total = torch.ops.symm_mem.one_shot_all_reduce(t, "sum", torch.distributed.group.WORLD.group_name)
        assert (total == 2).all()
    """
    if reason := no_native():
        raise RuntimeError(f"fusedcomm.symm_mem needs CPU symmetric memory: {reason}")
    cpu_kernels.register()
    cpu_kernels.install_functions()
