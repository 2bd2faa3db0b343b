"""torch's symmetric memory on CPU tensors, for programs written against torch's own interface::

    import torch.distributed._symmetric_memory as symm_mem, fusedcomm.symm_mem

    t = symm_mem.empty(1024, device="cpu")
    symm_mem.rendezvous(t, dist.group.WORLD)
    total = torch.ops.symm_mem.one_shot_all_reduce(t, "sum", dist.group.WORLD.group_name)

Importing this module makes fusedcomm torch's backend for CPU tensors, unless torch has one, and gives CPU kernels to
the ops of `torch.ops.symm_mem` that have none. It needs the native part.
"""

from fusedcomm.runtime.topology import no_native
from fusedcomm.symm_mem import cpu_kernels, torch_functions

__all__: list[str] = []

if reason := no_native():
    raise ImportError(f"fusedcomm.symm_mem needs CPU symmetric memory: {reason}")

cpu_kernels.register()
torch_functions.install()
