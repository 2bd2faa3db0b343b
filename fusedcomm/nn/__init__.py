"""Linear layers next to Ulysses attention, and mixtures of experts.

`UlyssesQKV` stands before attention and `UlyssesOut` behind it; each replaces a plain nn.Linear in one line and reads
its state dict. `shard_tokens` gives a rank its tokens. `ExpertParallel` has the experts of this rank. R is the number
of ranks of a layer's group. Tensor parallelism has its linear layers in `fusedcomm.parallel`.
"""

from fusedcomm.nn.expert_parallel import ExpertParallel
from fusedcomm.nn.tokens import shard_tokens, unshard_tokens
from fusedcomm.nn.ulysses import UlyssesOut, UlyssesQKV
from fusedcomm.nn.whole_model import full_state_dict, sum_replicated_gradients

__all__ = [
    "ExpertParallel",
    "UlyssesOut",
    "UlyssesQKV",
    "full_state_dict",
    "shard_tokens",
    "sum_replicated_gradients",
    "unshard_tokens",
]
