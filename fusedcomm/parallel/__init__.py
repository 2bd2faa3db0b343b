"""The styles of `torch.distributed.tensor.parallel`, by fused ops: to import them from here is the whole change.

Parameters are DTensors, as torch's own styles make them, so FSDP2, checkpoints, clipping and optimizers work as they do
there. The other names are torch's own.
"""

from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleOutput,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fusedcomm.parallel.sharded_linear import explain_layers
from fusedcomm.parallel.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "explain_layers",
    "loss_parallel",
    "parallelize_module",
]
