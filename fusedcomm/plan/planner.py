"""The plan of a call: its algorithm. Ranks of one collective choose one wire, whatever stands beside it on each.

The wire follows from what all ranks know: the kind of the collective, its payload and the group. It is symmetric
memory, for `chunked` and `fused`, which understand each other; the pieces of `pipelined`; or the group's own
collective. Rules exclude algorithms, each with its reason:

    one rank                                            unfused     nothing to exchange
    float64                                             unfused     for gradcheck: the kernels add in float32
    no workspace (host, native, peers, memory, Triton)  neither chunked nor fused  voted: of all ranks, or of none
    one row does not fit a slot                         likewise    rounds are cut between rows
    K or N above 2^30                                   not fused   its kernels count them in 32 bits
    parts of different sizes                            not fused   its kernels take chunks of one size
    a part of one or none, in K or just before it       unfused     its rank cannot tell which dims make up K
    CPU                                                 not fused   it runs in Triton's interpreter, for tests
    GPU, CUDA graph, or `before_capture`                not chunked a graph would fix the slots that it copies to
    GPU, default numbers, decode sizes                  unfused     nobody has measured them between GPUs yet; but for
                                                                    terms that are sent and added in a CUDA graph: a
                                                                    reduce_scatter, or whole ones with a norm behind
    GPU, a proof that failed (`ops.proof`)              unfused     in place of that algorithm, unless it is forced
    not gloo on a CPU, nor NCCL on a GPU                not pipelined  nobody has tried it
    CUDA graph, or `before_capture`                     not pipelined  nobody has tried it
    whole terms, with a norm behind them                not pipelined  it sends sums
    float8 on sm_80                                     not fused   it has no float8; chunked dequantises

Of the wires left, the one runs that `cost` finds fastest for a call of that payload with a usual matmul
(`cost.model.usual_call`); `pipelined` is one where no algorithm with a workspace can run. Of `chunked` and `fused`, the
one runs that is faster with this rank's matmul. Numbers were measured on this machine by `fusedcomm tune` or are
default ones; the reason says which. A decode size has less than 64 KiB per peer, or, of a gather or a sum, less
than 128 rows of 4096.

`force_algorithm` and FUSEDCOMM_ALGORITHM overrule the estimate where the algorithm can run. Like a capture, they must
be the same on all ranks: chunked on one rank can meet fused on another, but neither can meet unfused or pipelined.
"""

import logging
import math
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedcomm import env
from fusedcomm.plan.cost import in_pieces, model
from fusedcomm.plan.cost.links import sent_bytes
from fusedcomm.plan.cost.model import KINDS, Constants
from fusedcomm.plan.forced import Forced, force_algorithm
from fusedcomm.plan.geometry.exchange import Exchange, aligned_numel
from fusedcomm.plan.scaling import BYTES
from fusedcomm.plan.schedule import Schedule

log = logging.getLogger("fusedcomm")

FORCED = "forced"
PIPELINED_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
MOST_INDICES = 1 << 30  # the sum of two, and the end of a tile, still fit 32 bits
CALL, GRAPH = "call", "graph"  # what an op stands for: see `wire_facts`
_PLAN_BYTES = 4 << 10  # of a plan without a schedule, and of the key that finds it
STEP_BYTES = 2 << 10  # of a schedule; as much again of one that is loaded natively, with the views that it keeps


@dataclass(repr=False)
class Plan:
    """How a call will run, as `explain` returns it. It is equal on all ranks. Its text, in a REPL too, is one line.

    Attributes:
        op: the name of the op.
        algorithm: "unfused", "chunked", "fused" or "pipelined".
        reason: a rule that excludes the others, an override, or the estimated times and the source of their numbers.
        slot_bytes: bytes of a workspace slot that one round of the call needs; 0 where it needs no workspace.
        num_rounds: rounds of the call, each small enough for a slot, or hidden behind the matmul of another: the
            pieces of a pipelined call; 0 where it runs unfused.
        sent_bytes: bytes that each rank sends to the others in a pipelined call; 0 in others.
        has_workspace: whether the algorithm needs symmetric memory: chunked or fused.
        backend_sums: whether the backend adds, in its own order and precision.
        fingerprint: 24 bits that calls of equal wires share; 0 where nothing compares them.
        exchange: the shapes and spans of the payload.
        schedule: the steps of a call that has run, None of one that has not, or runs unfused. It is this rank's own.
        made_for: the facts of memory and device that the schedule was made for.
        num_bytes: bytes that the plan takes, an estimate.
    """

    op: str
    algorithm: str
    reason: str
    slot_bytes: int = 0  # for one round
    num_rounds: int = 0
    sent_bytes: int = 0
    backend_sums: bool = False
    fingerprint: int = 0
    exchange: Exchange | None = field(default=None, compare=False)
    schedule: Schedule | None = field(default=None, compare=False)
    made_for: Hashable = field(default=None, compare=False)

    @property
    def has_workspace(self) -> bool:
        return self.algorithm in env.WITH_WORKSPACE

    @property
    def num_bytes(self) -> int:
        return _PLAN_BYTES + (0 if self.schedule is None else len(self.schedule.steps) * STEP_BYTES)

    def __repr__(self) -> str:
        rounds = f", {self.num_rounds} rounds" if self.num_rounds > 1 else ""
        if self.algorithm == "pipelined":
            rounds = f", {self.num_rounds} pieces, {self.sent_bytes / (1 << 20):.3g} MiB sent"
        return f"{self.op}: {self.algorithm}{rounds} ({self.reason})"


def plan(
    op: str,
    exchange: Exchange,
    dtype: torch.dtype,
    member: Any,
    wire: str = CALL,
    multiplied: str | None = None,
    forced: Forced | None = None,
) -> Plan:
    """``member``: the facts of a group on a device, of a `Member`; equal on all ranks; None for a group of one rank.
    ``multiplied``: as in `model.estimate`. ``forced``: None is the current state of `force_algorithm`.
    """
    found = _decided(op, exchange, dtype, member, multiplied, forced or force_algorithm.current)
    found.exchange = exchange
    if found.has_workspace:
        found.fingerprint = fingerprint_of(KINDS[op], dtype, *wire_facts(wire, exchange, found.num_rounds))
    return found


def fingerprint_of(*facts: Any) -> int:
    """24 bits, never 0, equal on ranks whose calls have one wire."""
    return zlib.crc32(repr(facts).encode()) & 0xFFFFFF or 1


def wire_facts(wire: str, exchange: Exchange, num_rounds: int) -> tuple[Any, ...]:
    """The facts that ranks must share. None of them is the matmul's.

    `CALL`: payloads, as their calls have them. `GRAPH`: chunks alone, where ops stand for one collective of a program,
    and each has the dims of what stands beside it. Other texts have the digest of what all ranks changed together.
    """
    return (wire, *(exchange.payload if wire == CALL else graph_facts(exchange, num_rounds)), num_rounds)


def graph_facts(exchange: Exchange, num_rounds: int) -> tuple[Any, ...]:
    return exchange.chunk_facts(with_dims=num_rounds > 1)


def _decided(
    op: str, exchange: Exchange, dtype: torch.dtype, member: Any, multiplied: str | None, forced: Forced
) -> Plan:
    if member is None or exchange.group_size == 1:
        return Plan(op, "unfused", "one rank: nothing to exchange")
    name, strict = forced
    name = name or member.topology.algorithm
    own, exchange = exchange, exchange.for_all
    reason = _reject_uneven(name, own, member)
    if reason is None:
        reason = _reject_reason(op, name, exchange, dtype, member)
        if name == "pipelined" and reason is None:
            return _pipelined(op, own, dtype, member, FORCED)
        if name is None and reason is not None and _reject_reason(op, "pipelined", exchange, dtype, member) is None:
            return _without_workspace(op, own, dtype, member, reason)
    if reason is not None:
        if strict and name not in (None, "unfused"):
            raise RuntimeError(f"{op} cannot run as {name}: {reason}")
        log_fallback(op, reason)
        return Plan(op, "unfused", reason)
    if name is not None:
        algorithm, why = name, FORCED
    else:
        algorithm, why = _choose(op, own, dtype, member, multiplied)
    if algorithm == "unfused":
        return Plan(op, "unfused", why)
    peer_bytes = exchange.group_size * dtype.itemsize
    rounds = own.rounds_of(member.device.type, dtype.itemsize, member.max_slot_bytes // peer_bytes)
    return Plan(op, algorithm, why, rounds[0].chunk_numel * peer_bytes, len(rounds))


def _without_workspace(op: str, exchange: Exchange, dtype: torch.dtype, member: Any, reason: str) -> Plan:
    """Unfused or pipelined, whichever is estimated to be faster. ``reason``: why nothing else can run."""
    constants, kind, usual = constants_of(member), _kind(dtype, member), usual_call(op, exchange, member.device.type)
    why = model.decode_reason(*usual, exchange.chunk_numel * dtype.itemsize, constants)
    if why is None:
        unfused = model.estimate(*usual, kind, constants)["unfused"]
        num_pieces, pipelined = in_pieces.fastest(*usual, kind, constants, member.topology.backend_sums)
        if pipelined < unfused:
            times = f"estimated {_text(pipelined)}, unfused {_text(unfused)}, {constants.source} numbers"
            if wrong := _failed_proof(op, "pipelined", exchange, dtype, member):
                log_fallback(op, wrong)
                return Plan(op, "unfused", wrong)
            why = f"{reason}; {times}{_to_prove(wrong, member)}"
            return _pipelined(op, exchange, dtype, member, why, num_pieces)
        why = f"estimated {_text(unfused)}, pipelined {_text(pipelined)}, {constants.source} numbers"
    log_fallback(op, reason)
    return Plan(op, "unfused", f"{reason}; {why}")


def kind_of_proof(op: str) -> str:
    """The op's kind of collective, and the form of what is sent: a scattered norm's is the plain reduce_scatter's."""
    kind = KINDS[op]
    return kind + "_norm" * (op.endswith("_norm") and kind == "all_reduce") + "_scaled" * op.startswith("scaled_")


def _failed_proof(op: str, algorithm: str, exchange: Exchange, dtype: torch.dtype, member: Any) -> str | None:
    """The failure of the algorithm's proof, empty if it was right, and None before it."""
    if not member.topology.prove:
        return None
    name = member.topology.name_of_proof(kind_of_proof(op), algorithm, dtype, exchange.cut is not None)
    return member.outcomes.get(name)


def _to_prove(failed: str | None, member: Any) -> str:
    return "; proved at its first call" if failed is None and member.topology.prove else ""


def usual_call(op: str, exchange: Exchange, device_type: str) -> tuple[str, Exchange]:
    """`model.usual_call` of a collective."""
    numel, size = exchange.chunk_numel, exchange.group_size
    if KINDS[op] == "all_reduce" and exchange.gathers:  # a chunk is the whole payload
        numel = -(-numel // size)
    return model.usual_call(KINDS[op], numel, size, device_type)


def _pipelined(
    op: str, exchange: Exchange, dtype: torch.dtype, member: Any, why: str, num_pieces: int | None = None
) -> Plan:
    sums = member.topology.backend_sums
    if num_pieces is None:
        num_pieces, _ = in_pieces.fastest(
            *usual_call(op, exchange, member.device.type), _kind(dtype, member), constants_of(member), sums
        )
    pieces = exchange.for_all.pieces(num_pieces)
    sent = sum(aligned_numel(piece.chunk_numel, dtype.itemsize) for piece in pieces) * dtype.itemsize
    sent = int(sent_bytes(model.KINDS[op], sent, exchange.group_size))
    return Plan(op, "pipelined", why, 0, len(pieces), sent, sums)


def constants_of(member: Any) -> Constants:
    """The numbers to estimate by; across hosts, or GPUs without NVLink, with data sheets' of the link between them."""
    across, constants = member.topology.across, member.topology.constants or model.DEFAULTS[member.device.type]
    return constants if across is None else model.across_hosts(constants, across)


def _kind(dtype: torch.dtype, member: Any) -> str:
    return dtype_name(dtype, member.device.type == "cuda" and member.topology.tf32)


def _choose(op: str, exchange: Exchange, dtype: torch.dtype, member: Any, multiplied: str | None) -> tuple[str, str]:
    constants, kind, note = constants_of(member), _kind(dtype, member), ""
    usual = usual_call(op, exchange, member.device.type)
    # One H200, in graphs: whole terms, their sum and norm take 12 us behind the matmul, 10 without the exchange.
    adds_up = KINDS[op] == "reduce_scatter" or (op.endswith("_norm") and exchange.gathers)
    decodes = model.decode_reason(*usual, exchange.chunk_numel * dtype.itemsize, constants)
    if decodes and not (member.for_capture and adds_up):
        return "unfused", decodes
    usable = ["fused", "chunked"] if member.device.type == "cuda" else ["chunked"]
    if "fused" in usable:
        if exchange.cut is not None:
            usable, note = ["chunked"], "; parts of different sizes: not fused"
        elif why := _no_float8(op, dtype, member):
            if member.for_capture:
                return "unfused", why
            usable, note = ["chunked"], f"; {why}"
        elif member.for_capture:
            usable, note = ["fused"], "; CUDA graph: not chunked"
    failed = {name: _failed_proof(op, name, exchange, dtype, member) for name in usable}
    usable = [name for name in usable if not failed[name]]
    if not usable:
        wrong = next(filter(None, failed.values()))
        log_fallback(op, wrong)
        return "unfused", wrong
    if decodes and "fused" in usable and not _too_wide(exchange):
        return "fused", "CUDA graph: few rows, sent by a kernel, added by another" + _to_prove(failed["fused"], member)
    # As many as the chunk's bytes need, whatever dims its op cuts.
    num_rounds = -(-exchange.chunk_numel * exchange.group_size * dtype.itemsize // max(1, member.max_slot_bytes))
    estimates = model.estimate(*usual, kind, constants, num_rounds=num_rounds)
    best = min(usable, key=estimates.__getitem__)
    if estimates["unfused"] < estimates[best]:
        return "unfused", _estimated("unfused", best, estimates, constants)
    if "fused" in usable and (why := _too_wide(exchange)):
        if usable == ["fused"]:
            return "unfused", why
        usable = ["chunked"]
    estimates = model.estimate(op, exchange, kind, constants, multiplied, num_rounds)
    best = min(usable, key=estimates.__getitem__)
    return best, _estimated(best, "unfused", estimates, constants) + note + _to_prove(failed[best], member)


def _estimated(name: str, other: str, estimates: Mapping[str, float], constants: Constants) -> str:
    return f"estimated {_text(estimates[name])}, {other} {_text(estimates[other])}, {constants.source} numbers"


_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    **dict.fromkeys(BYTES, model.FLOAT8),
}


def dtype_name(dtype: torch.dtype, tf32: bool) -> str:
    """The dtype's name in `cost`. ``tf32``: whether float32 matmuls count as TF32."""
    return "tf32" if tf32 and dtype == torch.float32 else _NAMES[dtype]


def _text(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _reject_uneven(name: str | None, exchange: Exchange, member: Any) -> str | None:
    """Why parts of different sizes keep ``name``, or any algorithm with a workspace, from running; None if nothing."""
    if exchange.cut is None or name == "unfused":
        return None
    if not exchange.tells_k:
        return f"{exchange.cut}: a rank whose part is one or none cannot tell which dims make up K"
    if name == "fused":
        return f"parts of different sizes, {exchange.cut}: the kernels of fused take chunks of one size"
    if member.for_capture:
        return f"parts of different sizes, {exchange.cut}: not fused, and a CUDA graph would fix the slots of chunked"
    return None


def _reject_reason(op: str, name: str | None, exchange: Exchange, dtype: torch.dtype, member: Any) -> str | None:
    """Why ``name``, or any algorithm with a workspace if it is None, cannot run these inputs; None if it can."""
    topology = member.topology
    if name == "unfused":
        return None
    if op.endswith("_norm") and exchange.gathers and name == "pipelined":
        return "pipelined sends sums, not whole terms"
    if dtype == torch.float64:
        return "float64 has no overlapped algorithm"
    if name == "pipelined":
        return _reject_pipelined(member)
    if member.no_workspace is not None:
        return member.no_workspace
    row_bytes = exchange.row_numel * dtype.itemsize * exchange.group_size
    if row_bytes > member.max_slot_bytes:
        return (
            f"one row for every peer takes {row_bytes} bytes, a slot has {member.max_slot_bytes}: "
            f"FUSEDCOMM_WORKSPACE_BYTES={topology.workspace_bytes}"
        )
    if name == "fused":
        return topology.no_fused or _no_float8(op, dtype, member) or _too_wide(exchange)
    if name == "chunked" and member.for_capture:
        return "a CUDA graph would fix the slots that chunked copies to; fused can be captured"
    return None


def _no_float8(op: str, dtype: torch.dtype, member: Any) -> str | None:
    is_float8 = op.startswith("scaled_") or dtype in BYTES
    return member.topology.no_float8 if is_float8 else None


def _reject_pipelined(member: Any) -> str | None:
    backend = PIPELINED_BACKENDS[member.device.type]
    if member.topology.backend != backend:
        return f"pipelined runs on {backend} here, got {member.topology.backend or 'no backend'}"
    if member.for_capture:
        return "nobody has captured a pipelined call in a CUDA graph"
    return None


def _too_wide(exchange: Exchange) -> str | None:
    """Why the kernels of fused cannot count sizes that a slot does not bound, or None if they can."""
    sizes = {"K": exchange.k}
    if exchange.gathers:
        sizes["N"] = max(shape[-1] for shape in exchange.out_shapes)
    if exchange.row_numel == 0:
        sizes["the number of rows"] = math.prod(exchange.block[: exchange.num_lead])
    for name, size in sizes.items():
        if size > MOST_INDICES:
            return f"{name} must be at most {MOST_INDICES} for fused, got {size}"
    return None


_logged: set[tuple[str, str]] = set()


def log_fallback(op: str, reason: str, algorithm: str = "unfused") -> None:
    if (op, reason) not in _logged:
        _logged.add((op, reason))
        log.warning("%s runs unfused: %s" if algorithm == "unfused" else "%s runs pipelined: %s", op, reason)
