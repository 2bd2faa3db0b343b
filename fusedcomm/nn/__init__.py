"""Linear layers next to a collective: each replaces a plain nn.Linear in one line and reads its state dict."""

from fusedcomm.nn.parallel_linear import ParallelLinear
from fusedcomm.nn.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.ulysses import UlyssesOut, UlyssesQKV
from fusedcomm.nn.whole_model import full_state_dict, sum_replicated_gradients

__all__ = [
    "ColumnParallelLinear",
    "ParallelLinear",
    "RowParallelLinear",
    "UlyssesOut",
    "UlyssesQKV",
    "full_state_dict",
    "sum_replicated_gradients",
]
