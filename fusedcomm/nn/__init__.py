"""Linear layers next to Ulysses attention. Each replaces a plain nn.Linear in one line and reads its state dict.

`UlyssesQKV` stands before attention and `UlyssesOut` behind it. `shard_tokens` gives a rank its tokens. R is the number
of ranks of a layer's group. Tensor parallelism has its linear layers in `fusedcomm.parallel`.
"""

from fusedcomm.nn.tokens import shard_tokens, unshard_tokens
from fusedcomm.nn.ulysses import UlyssesOut, UlyssesQKV
from fusedcomm.nn.whole_model import full_state_dict, sum_replicated_gradients

__all__ = [
    "UlyssesOut",
    "UlyssesQKV",
    "full_state_dict",
    "shard_tokens",
    "sum_replicated_gradients",
    "unshard_tokens",
]
