"""The work of a node of a graph: FLOP, and bytes that it reads and writes; and its cost. Symbolic sizes are `assumed`.

Inductor makes one kernel of pointwise nodes that read each other, so such a node

    reads      inputs that no pointwise node makes
    writes     its result, if anything but a pointwise node reads it

through views. The rule is local: an input of two nodes of one kernel counts twice, and a reduction does not take its
pointwise inputs, nor a matmul its epilogue, into its kernel. All other nodes read their inputs and write their results;
lookups in a table read as much as they write.
"""

import functools
import math
import operator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import kind_of
from fusedcomm.compile.graph.layout import assumed
from fusedcomm.plan.cost.model import KINDS

aten = torch.ops.aten


@dataclass(frozen=True)
class Transfer:
    """One collective, alone on its link."""

    link: str  # "intra": inside a node; "inter": between nodes
    group: str  # collectives of one group run one after the other, in the order of their starts
    latency_ms: float  # not slowed by other transfers on the link
    wire_ms: float  # bytes / bandwidth: k groups on a link get 1/k of it each

    @property
    def ms(self) -> float:
        return self.latency_ms + self.wire_ms


@dataclass(frozen=True)
class NodeCost:
    """The cost of one node."""

    compute_ms: float = 0.0  # on the compute stream
    transfer: Transfer | None = None  # a start's is asynchronous; that of an op of fusedcomm runs beside its matmul
    fused_ms: float | None = None  # all of an op of fusedcomm, or of a collective without a wait, alone on its link

    @property
    def ms(self) -> float:
        """The time from when the node runs until its result can be read, if nothing else runs."""
        if self.fused_ms is not None:
            return self.fused_ms
        return self.compute_ms + (self.transfer.ms if self.transfer is not None else 0.0)


class Work(Enum):
    NOTHING = auto()
    VIEW = auto()  # the same memory, or an element of a tuple
    POINTWISE = auto()
    CONSTANT = auto()  # pointwise without inputs
    MATMUL = auto()
    FLOPS = auto()  # torch knows its FLOP
    LOOKUP = auto()
    MOVE = auto()  # any other node
    START = auto()
    FUSED = auto()  # an op of fusedcomm


FUSABLE = (Work.POINTWISE, Work.CONSTANT)
_VIEWS = {aten._unsafe_view, aten.lift_fresh, aten.reshape}
_CASTS = {aten._to_copy, torch.ops.prims.convert_element_type}
_CONSTANTS = {"full", "zeros", "ones", "arange", "scalar_tensor", "iota", "full_like", "zeros_like", "ones_like"}
_CONSTANTS |= {"new_full", "new_zeros", "new_ones"}
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_ALLOCATIONS = ("empty", "new_empty", "sym_", "_assert", "device", "dtype")  # and other names of host work
_X = {  # index of x; w is next
    **{aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1, aten.linear: 0, aten.matmul: 0},
    **{aten._scaled_mm: 0, aten._scaled_mm_v2: 0},
}
# parts of names that torch 2.13 does not know
_LIKE_FLASH = ("flash_attention_for_cpu", "fused_attention_overrideable")


def work_of(node: Any) -> Work:
    if not isinstance(node, Node) or node.op in ("placeholder", "get_attr", "output"):
        return Work.NOTHING
    if node.op != "call_function":
        return Work.MOVE
    work = _work(node.target)
    return Work.START if work is Work.NOTHING and kind_of(node) is not None else work


@functools.lru_cache(maxsize=4096)
def _work(target: Any) -> Work:
    """The Work of a target; NOTHING for starts."""
    if target is operator.getitem:
        return Work.VIEW
    if not isinstance(target, torch._ops.OpOverload):
        return Work.FLOPS if isinstance(target, torch._ops.HigherOrderOperator) else Work.MOVE
    namespace, name = target._schema.name.split("::")
    packet = target.overloadpacket
    if namespace in ("_c10d_functional", "_dtensor"):
        return Work.NOTHING
    if namespace == "fusedcomm":
        return Work.FUSED if name in KINDS else Work.MOVE
    if packet in _X:
        return Work.MATMUL
    if flops_formula(target) is not None:
        return Work.FLOPS
    if target.is_view or packet in _VIEWS:
        return Work.VIEW
    if name.startswith(_ALLOCATIONS):
        return Work.NOTHING
    if name in _CONSTANTS:
        return Work.CONSTANT
    if (torch.Tag.pointwise in target.tags or packet in _CASTS) and not target._schema.is_mutable:
        return Work.POINTWISE
    return Work.LOOKUP if name in _LOOKUPS else Work.MOVE


def flops_formula(target: Any) -> Any:
    """torch's formula, which takes shapes; None where it has none."""
    from torch.utils.flop_counter import flop_registry

    for name in _LIKE_FLASH:
        if name in getattr(target, "_opname", ""):
            return flop_registry.get(getattr(aten, target._opname.replace(name, "flash_attention"), None))
    return flop_registry.get(getattr(target, "overloadpacket", target))


def flops(node: Node) -> float:
    """FLOP by torch's formula; 0 where it cannot tell."""
    formula = flops_formula(node.target)
    if formula is None:
        return 0.0
    args, kwargs = pytree.tree_map(stand_in, (node.args, node.kwargs))
    try:
        return float(formula(*args, **kwargs, out_val=pytree.tree_map(stand_in, node.meta.get("val"))))
    except Exception:  # torch's formula got arguments that it does not expect
        return 0.0


def stand_in(each: Any) -> Any:
    """A meta tensor, or int, in place of a node or its value: no data, plain sizes."""
    if isinstance(each, Node):
        return pytree.tree_map(stand_in, each.meta.get("val"))
    if isinstance(each, Tensor):
        return torch.empty(tuple(map(assumed, each.shape)), dtype=each.dtype, device="meta")
    return assumed(each) if isinstance(each, torch.SymInt) else each


def matmul_sizes(node: Node) -> tuple[torch.dtype, int, int, int, int] | None:
    """dtype, batches, M, K, N of a MATMUL; None where its tensors are not known."""
    at = _X[node.target.overloadpacket]  # type: ignore[union-attr]
    x, w, y = (each.meta.get("val") if isinstance(each, Node) else None for each in (*_pair(node.args, at), node))
    if not (isinstance(x, Tensor) and isinstance(w, Tensor) and isinstance(y, Tensor)):
        return None
    n = assumed(y.shape[-1]) if w.ndim > 1 else 1
    batches = math.prod(map(assumed, w.shape[:-2]))
    rows = math.prod(map(assumed, y.shape)) // max(1, n * batches)
    return x.dtype, batches, rows, assumed(x.shape[-1]), n


def _pair(args: tuple[Any, ...], at: int) -> tuple[Any, Any]:
    return (args[at], args[at + 1]) if len(args) > at + 1 else (None, None)


def num_bytes(val: Any) -> int:
    """The size of a node's value: a tensor, or several; 0 for anything else."""
    if isinstance(val, Tensor):
        return math.prod(map(assumed, val.shape)) * val.dtype.itemsize
    return sum(map(num_bytes, val)) if isinstance(val, list | tuple) else 0


def bytes_of(node: Node) -> int:
    return num_bytes(node.meta.get("val"))


def traffic(node: Node, work: Work) -> tuple[int, bool]:
    """Bytes read and written, and whether the node ends a kernel, that is, whether it writes."""
    if work in FUSABLE:
        read = 0 if work is Work.CONSTANT else sum(map(_read, node.all_input_nodes))
        return (read + bytes_of(node), True) if _is_written(node) else (read, False)
    written = bytes_of(node)
    mutates = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    if work is Work.LOOKUP or not (written or mutates):
        return 2 * written, written > 0
    read = sum(map(bytes_of, node.all_input_nodes))
    return read if mutates else read + written, True  # a mutated tensor is among its inputs


def _read(source: Node) -> int:
    origin = source
    while work_of(origin) is Work.VIEW and origin.all_input_nodes:
        origin = origin.all_input_nodes[0]
    if work_of(origin) in FUSABLE:
        return 0
    return min(bytes_of(source), bytes_of(origin))  # a part counts as that part, an expanded tensor as its storage


def _is_written(node: Node) -> bool:
    """Whether any user, perhaps of a view, does not read the result inside the kernel."""
    users = list(node.users)
    while users:
        user = users.pop()
        work = work_of(user)
        if work is Work.VIEW:
            users += user.users
        elif work is not Work.POINTWISE:
            return True
    return False
