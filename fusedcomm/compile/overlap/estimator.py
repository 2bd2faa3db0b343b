"""The time of each node of a graph, by formulas and a few constants of the machine (docs/overlap.md). Nothing is run.

Ranks must agree, or they order their collectives differently: see `Estimator.agreed`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fusedcomm.compile.graph.collectives import WAITS, group_name_of, kind_of, memberships
from fusedcomm.compile.overlap import node_work
from fusedcomm.compile.overlap.node_work import NodeCost, Transfer, Work
from fusedcomm.memory import group, members
from fusedcomm.memory.group import store
from fusedcomm.memory.topology import tf32_allowed
from fusedcomm.memory.vote import agree
from fusedcomm.ops.table import OPS
from fusedcomm.plan import planner
from fusedcomm.plan.cost import in_pieces, links, tuned
from fusedcomm.plan.cost.model import (
    DEFAULTS,
    ITEMSIZE,
    KINDS,
    TUNED,
    Constants,
    TimedCall,
    across_hosts,
    decode_reason,
    estimate,
)
from fusedcomm.plan.geometry.exchange import Exchange


class Estimator:
    """The times of a graph's nodes, by the formulas and constants of `fusedcomm/plan/cost/`.

    An Estimator never changes, and equals another of the same digest. `docs/overlap.md` has the formulas.

    Args:
        device_type: "cuda" or "cpu".
        constants: of that device_type; None: the default ones: of one H200, published ones of its links, and guesses.
        ranks_per_node: global ranks 0 to that - 1 are the first node, and so on.
        times: ms by the name of a node, in place of an estimate.

    Attributes:
        device_type: "cuda" or "cpu".
        constants: the constants that it estimates with.
        ranks_per_node: how many successive global ranks are a node.
        inter_bandwidth: bytes per second of one rank between nodes, one way; Inductor's ``inter_node_bw`` where that is
            set.
        tf32: whether float32 matmuls count as TF32, as torch's setting was.
        times: ms by the name of a node.

    Raises:
        ValueError: device_type is another one or not that of constants, ranks_per_node is less than 1, or a time is
            negative or not finite.
    """

    def __init__(
        self,
        device_type: str = "cuda",
        *,
        constants: Constants | None = None,
        ranks_per_node: int = 8,
        times: Mapping[str, float] | None = None,
    ) -> None:
        if device_type not in DEFAULTS:
            raise ValueError(f"device_type must be one of {', '.join(DEFAULTS)}, got {device_type!r}")
        constants = constants or DEFAULTS[device_type]
        if constants.device_type != device_type:
            raise ValueError(f"constants must be of device_type {device_type!r}, got {constants.device_type!r}")
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
        for name, ms in (times or {}).items():
            if not 0 <= ms < math.inf:  # NaN is not
                raise ValueError(f"times[{name!r}] must be a finite number of ms, at least 0, got {ms}")
        intra, inter = _inductor_bandwidths()
        self.device_type = device_type
        self.constants = _within(constants, intra)
        self.ranks_per_node = ranks_per_node
        self.inter_bandwidth = 1e9 * inter if inter else links.INTER_BANDWIDTH
        self.tf32 = device_type == "cuda" and tf32_allowed()
        self.times = {name: float(ms) for name, ms in (times or {}).items()}

    @staticmethod
    def of(graph: Graph) -> Estimator:
        """Make one for the device of the graph's tensors, with the tuned numbers of the first of its groups that has
        some.
        """
        device_type = device_type_of(graph)
        device = torch.device(device_type)
        names = dict.fromkeys(name for node in graph.nodes if (name := group_name_of(node)))
        known = (members.known_member(name, device) for name in names)
        measured = (member.topology.constants for member in known if member is not None)
        return Estimator(device_type, constants=next((each for each in measured if each is not None), None))

    def digest(self) -> str:
        """Return a text, equal for Estimators with equal estimates."""
        return hashlib.sha256(json.dumps(self._facts, sort_keys=True).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Estimator) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @property
    def _facts(self) -> dict[str, Any]:
        return vars(self) | {"constants": asdict(self.constants)}

    # costs of nodes

    def cost(self, node: Node) -> NodeCost:
        """Return the cost of a node: ms on the compute stream, and ms of a transfer beside it."""
        kind = node_work.work_of(node)
        if kind is Work.START:
            found = self._start(node)
        elif kind is Work.FUSED:
            found = self._fused(node)
        else:
            found = NodeCost(self._compute_ms(node, kind))
        return _told(found, self.times[node.name]) if node.name in self.times else found

    def transfer(self, kind: str, sent_bytes: float, group_name: str) -> Transfer:
        """Return the time of a collective with an operand of ``sent_bytes``; an unknown group counts as a node."""
        at = self._reach(group_name) or links.Reach(links.INTRA, self.ranks_per_node, self.ranks_per_node - 1)
        if at.group_size == 1:
            return Transfer(at.link, group_name, 0.0, 0.0)
        base = links.base_kind(kind)
        constants, table = self.constants, base or "all_to_all"
        if at.link == links.INTRA and self._measured:
            chunk_bytes = sent_bytes if base == "all_gather" else sent_bytes / at.group_size
            latency = constants.backend_latency[table]
            wire = constants.collective(table, chunk_bytes, at.group_size) - latency
        else:
            bandwidth = {links.INTRA: constants.backend_bandwidth[table], links.INTER: self.inter_bandwidth}
            latency, wire = links.seconds(kind, sent_bytes, at, bandwidth)
        return Transfer(at.link, group_name, 1e3 * latency, 1e3 * wire)

    def copy_ms(self, num_bytes: float) -> float:
        """Return the time of a kernel that reads and writes that many bytes."""
        return 1e3 * self.constants.copy(num_bytes)

    def can_fuse(self, group_name: str) -> bool:
        """Whether it is known that the group has peers."""
        at = self._reach(group_name)
        return at is not None and at.group_size > 1

    def fused(self, op: str, args: Sequence[Any]) -> NodeCost:
        """Return the cost of ``torch.ops.fusedcomm.<op>(*args)``; tensors can be fake."""
        plain = pytree.tree_map(node_work.stand_in, list(args))
        group_name = OPS[op].by_name(plain)["group_name"]
        exchange = OPS[op].exchange_of(OPS[op].bind(plain)).for_all
        dtype = planner.dtype_name(OPS[op].sent_dtype(OPS[op].bind(plain)), self.tf32)
        chunk_bytes = exchange.chunk_numel * ITEMSIZE[dtype]
        kind = KINDS[op]
        sent_bytes = chunk_bytes * (1 if kind == "all_gather" else exchange.group_size)
        plainly = self.transfer(kind, sent_bytes, group_name)
        compute_ms = 1e3 * TimedCall(op, exchange, dtype, self.constants).matmul()
        if not self.can_fuse(group_name):
            return NodeCost(compute_ms, plainly, compute_ms + plainly.ms)
        times = self._times(op, exchange, dtype, group_name)
        algorithm = min(times, key=lambda name: times[name])
        if decode_reason(*planner.usual_call(op, exchange, self.device_type), chunk_bytes, self.constants):
            algorithm = "unfused"
        total_ms = max(compute_ms, 1e3 * times[algorithm])
        if algorithm in ("unfused", "pipelined"):
            return NodeCost(compute_ms, _at_most(plainly, total_ms), total_ms)
        stores = self.constants.store_bandwidth if algorithm == "fused" else self.constants.link_bandwidth
        wire = links.sent_bytes(kind, chunk_bytes, exchange.group_size) / stores
        transfer = Transfer(links.INTRA, group_name, 1e3 * self.constants.link_latency, 1e3 * wire)
        return NodeCost(compute_ms, _at_most(transfer, total_ms), total_ms)

    def _times(self, op: str, exchange: Exchange, dtype: str, group_name: str) -> Mapping[str, float]:
        """Seconds by algorithm available to the group."""
        at = self._reach(group_name)
        if at is None or at.link == links.INTRA:
            return estimate(op, exchange, dtype, self.constants)
        constants = across_hosts(self.constants, at, self.inter_bandwidth)
        unfused = estimate(op, exchange, dtype, constants)["unfused"]
        return {"unfused": unfused, "pipelined": in_pieces.fastest(op, exchange, dtype, constants)[1]}

    def _start(self, node: Node) -> NodeCost:
        sent = next((arg for arg in node.args if any(isinstance(leaf, Node) for leaf in pytree.tree_leaves(arg))), None)
        sent_bytes = sum(node_work.bytes_of(leaf) for leaf in pytree.tree_leaves(sent) if isinstance(leaf, Node))
        transfer = self.transfer(kind_of(node) or "", sent_bytes, group_name_of(node) or "")
        return NodeCost(transfer=transfer, fused_ms=None if _is_awaited(node) else transfer.ms)

    def _fused(self, node: Node) -> NodeCost:
        schema = node.target._schema  # type: ignore[union-attr]
        named = dict(zip((arg.name for arg in schema.arguments), node.args, strict=False)) | node.kwargs
        args = [named.get(arg.name, arg.default_value) for arg in schema.arguments if not arg.is_out]
        try:
            return self.fused(schema.name.split("::")[1], args)
        except (ValueError, KeyError):  # sizes are not known, or the op would not take the dtype
            return NodeCost(self._compute_ms(node, Work.MOVE))

    def _compute_ms(self, node: Node, kind: Work) -> float:
        if kind in (Work.NOTHING, Work.VIEW):
            return 0.0
        if kind is Work.MATMUL:
            return 1e3 * self._matmul(node)
        num_bytes, ends_kernel = node_work.traffic(node, kind)
        if kind is Work.FLOPS:
            values = pytree.tree_leaves([each.meta.get("val") for each in (*node.all_input_nodes, node)])
            dtypes = [val.dtype for val in values if isinstance(val, Tensor)]
            return 1e3 * self._roofline(node_work.flops(node), num_bytes, dtypes[0]) if dtypes else 0.0
        overhead = self.constants.copy_overhead if ends_kernel else 0.0
        return 1e3 * (num_bytes / (2 * self.constants.copy_bandwidth) + overhead)

    def _matmul(self, node: Node) -> float:
        sizes = node_work.matmul_sizes(node)
        if sizes is None:
            return 0.0
        dtype, batches, m, k, n = sizes
        try:
            return self.constants.matmul(planner.dtype_name(dtype, self.tf32), batches, m, k, n)
        except KeyError:
            num_bytes = batches * (m * k + k * n + m * n) * dtype.itemsize
            return self._roofline(2.0 * batches * m * k * n, num_bytes, dtype)

    def _roofline(self, flops: float, num_bytes: float, dtype: torch.dtype) -> float:
        constants = self.constants
        compute, memory = flops / self._rate(dtype), num_bytes / constants.memory_bandwidth
        both = compute + memory if self.device_type == "cpu" else max(compute, memory)
        return both + constants.matmul_overhead

    def _rate(self, dtype: torch.dtype) -> float:
        """FLOP per second. 8-bit dtypes have twice the rate of 16-bit ones; others have that of float32."""
        rates = self.constants.matmul_flops
        if dtype.itemsize == 1:
            return 2 * rates["bfloat16"]
        try:
            return rates[planner.dtype_name(dtype, self.tf32)]
        except KeyError:
            return rates["float32"]

    @property
    def _measured(self) -> bool:
        return self.device_type == "cpu" or self.constants.source == TUNED

    def _reach(self, group_name: str) -> links.Reach | None:
        at = reach(group_name, self.ranks_per_node)
        if at is None or self.device_type == "cuda":
            return at
        return links.Reach(links.INTRA, at.group_size, at.group_size - 1)  # gloo's numbers hold inside a host

    # agreement between ranks

    def agreed(self, group: Any = None) -> Estimator:
        """Return an Estimator equal on all ranks: the first one's, where they differ.

        It is a collective.

        Args:
            group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.

        Raises:
            ValueError: ranks differ in device_type or ranks_per_node; raised on all ranks alike.
            PeerTimeoutError: a rank did not come within ``FUSEDCOMM_TIMEOUT_S``; the error names it.
        """
        pg = _peers(group)
        if pg is None:
            return self
        what = "fusedcomm agreement on estimates"
        facts = agree(store(pg, "estimates"), pg.rank(), pg.size(), self._facts, what=what)
        if len({json.dumps(fact, sort_keys=True) for fact in facts}) == 1:
            return self
        for name in ("device_type", "ranks_per_node"):
            values = [fact[name] for fact in facts]
            if len(set(values)) > 1:
                raise ValueError(f"{name} must be the same on all ranks, got {values} by rank")
        same = copy.copy(self)
        vars(same).update(facts[0], constants=Constants(**facts[0]["constants"]))
        return same


def reach(group_name: str, ranks_per_node: int) -> links.Reach | None:
    """The group's reach, or None for a group that this process does not know."""
    try:
        ranks = dist.get_process_group_ranks(group.find(group_name))
    except (ValueError, KeyError):  # KeyError: it was destroyed
        return None
    return links.reach_of(tuple(sorted(ranks)), ranks_per_node, dist.get_world_size())


def _inductor_bandwidths() -> tuple[float | None, float | None]:
    """GB/s inside a node and between nodes; None where it is not set: torch 2.11 has numbers of its own then."""
    from torch._inductor import config  # takes a second

    intra = None if config._is_default("intra_node_bw") else config.intra_node_bw  # type: ignore[attr-defined]
    inter = None if config._is_default("inter_node_bw") else config.inter_node_bw  # type: ignore[attr-defined]
    return intra, inter


def _within(constants: Constants, intra_node_bw: float | None) -> Constants:
    """``constants`` with that bandwidth, in GB/s, for collectives inside a node, and as a bound for stores to peers."""
    if constants.device_type == "cpu" or constants.source == TUNED or not intra_node_bw:
        return constants
    bandwidth = 1e9 * intra_node_bw
    return replace(
        constants,
        backend_bandwidth=dict.fromkeys(constants.backend_bandwidth, bandwidth),
        link_bandwidth=min(constants.link_bandwidth, bandwidth),
        store_bandwidth=min(constants.store_bandwidth, bandwidth),
    )


def _told(found: NodeCost, ms: float) -> NodeCost:
    """The cost, with the user's time of the node."""
    if found.transfer is None:
        return NodeCost(ms)
    transfer = _at_most(found.transfer, ms)
    if found.compute_ms > 0:  # an op of fusedcomm
        return NodeCost(min(found.compute_ms, ms), transfer, ms)
    transfer = replace(transfer, wire_ms=ms - transfer.latency_ms)
    return NodeCost(transfer=transfer, fused_ms=None if found.fused_ms is None else ms)


def _at_most(transfer: Transfer, ms: float) -> Transfer:
    latency_ms = min(transfer.latency_ms, ms)
    return replace(transfer, latency_ms=latency_ms, wire_ms=min(transfer.wire_ms, ms - latency_ms))


def _peers(of: Any) -> dist.ProcessGroup | None:
    """The group to agree in; None without peers."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    pg = group.find(group.resolve(of)[1])
    return None if pg.size() == 1 or dist.get_backend(pg) == "fake" else pg


def _is_awaited(start: Node) -> bool:
    """Whether only waits read the result of a functional collective; otherwise the start itself takes all the time."""
    readers = list(start.users)
    for user in readers:  # the list grows meanwhile
        if user.target is operator.getitem:
            readers += user.users
        elif getattr(user.target, "_opname", None) not in WAITS:
            return False
    return start.target._schema.name.startswith("_c10d_functional::")  # type: ignore[union-attr]


def device_type_of(graph: Graph) -> str:
    """Where the graph computes: "cpu" if all of its tensors are there, else "cuda"."""
    vals = (val for node in graph.nodes for val in pytree.tree_leaves(node.meta.get("val")))
    return "cpu" if all(val.device.type == "cpu" for val in vals if isinstance(val, Tensor)) else "cuda"


def agreed_ones(own: Estimator | None = None) -> tuple[Estimator, ...]:
    """An agreed Estimator per type of device: ``own``, or one with the tuned numbers of the largest tuned group."""
    found = []
    for device_type in DEFAULTS:  # each rank votes equally often, with or without tuned numbers
        if own is not None and own.device_type == device_type:
            found.append(own.agreed())
        else:
            found.append(Estimator(device_type, constants=_tuned(device_type)).agreed())
    return tuple(found)


def _tuned(device_type: str) -> Constants | None:
    if device_type == "cuda" and not torch.cuda.is_available():
        return None
    sizes = {len(ranks) for _, _, ranks in memberships()}
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    read = (tuned.read(tuned.key(device, size)) for size in sorted(sizes, reverse=True))
    return next((constants for constants in read if constants is not None), None)
