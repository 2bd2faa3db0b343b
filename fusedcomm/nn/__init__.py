"""Linear layers next to a collective. Each replaces a plain nn.Linear in one line and reads its state dict.

`UlyssesQKV` and `UlyssesOut` stand before and behind attention, `ColumnParallelLinear` and `RowParallelLinear` at the
two ends of an MLP or an attention block under tensor parallelism. `shard_tokens` gives a rank its tokens. R is the
number of ranks of a layer's group.
"""

from fusedcomm.nn.parallel_linear import ParallelLinear
from fusedcomm.nn.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.tokens import shard_tokens, unshard_tokens
from fusedcomm.nn.ulysses import UlyssesOut, UlyssesQKV
from fusedcomm.nn.whole_model import full_state_dict, sum_replicated_gradients

__all__ = [
    "ColumnParallelLinear",
    "ParallelLinear",
    "RowParallelLinear",
    "UlyssesOut",
    "UlyssesQKV",
    "full_state_dict",
    "shard_tokens",
    "sum_replicated_gradients",
    "unshard_tokens",
]
