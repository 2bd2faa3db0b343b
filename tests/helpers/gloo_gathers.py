"""Functional all_gathers of gloo, DTensor's too, by the ``out`` form, for as long as a process lives that imports this.

gloo's two threads assign the name of a finished collective without a lock. ALLGATHER_COALESCED, the one behind the
functional op, is too long for a std::string without memory of its own, so that a rank of a long session dies in malloc
now and then. Modes see the op that a program calls. tests/memory/test_gloo.py fails when torch has mended it.
"""

import torch
import torch.distributed._functional_collectives  # registers the ops
from torch import Tensor

_c10d = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")


def _gather(x: Tensor, group_size: int, group_name: str) -> Tensor:
    if x.is_complex():
        return torch.view_as_complex(_gather(torch.view_as_real(x.resolve_conj()), group_size, group_name))
    out = x.new_empty((group_size * x.shape[0], *x.shape[1:]))
    return _c10d.all_gather_into_tensor_out(x, group_size, group_name, out=out)


_library.impl("all_gather_into_tensor", _gather, "CPU")
_library.impl("all_gather_into_tensor_coalesced", lambda xs, *group: [_gather(x, *group) for x in xs], "CPU")
