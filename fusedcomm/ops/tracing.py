"""Traced ops keep their place, as in eager: none is dropped, moved, or communicated again.

FX drops a node that nothing reads, Inductor's `reorder_for_locality` moves one to its first reader in inference
graphs, and under an activation memory budget torch recomputes it: ranks that read other results would then run other
sequences of ops. torch spares what a wait_tensor reads, and nodes marked MUST_SAVE. So each op gets a wait of its own,
unread, which other readers do not see; at run time it finds nothing to wait for.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fusedcomm.ops.library import lib
from fusedcomm.ops.routed import COLLECTIVES
from fusedcomm.ops.table import OPS

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def _keep(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    result = mode.__torch_dispatch__(op, types, args, kwargs)
    if traceback.current_meta.get("partitioner_tag") != "is_backward":  # a wait there would keep a copy in the forward
        traced = [get_proxy_slot(each, mode.tracer, None) for each in pytree.tree_leaves(result)]
        for each in filter(None, traced):
            each.proxy.node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)  # unless a checkpoint has it
        mode.__torch_dispatch__(_WAIT, (), (pytree.tree_leaves(result)[0],))
    return result


for _name in (*OPS, *COLLECTIVES):
    torch.library.register_torch_dispatch(f"fusedcomm::{_name}", ProxyTorchDispatchMode, _keep, lib=lib)
