"""FUSEDCOMM_CHECK=1: before a call all ranks compare it, for every algorithm. Where it differs, nothing is sent and all
ranks raise the same error.

The check of calls by name is stricter than the ops: a bias and a by-product must be asked for by all ranks or by none,
and chunked may not meet fused. Strides may differ. Where ops stand for the collectives of a program, those are
compared. It costs some milliseconds, as the ranks meet at the store of the process group.
While a CUDA graph is captured the check runs once; its replays are not checked.
"""

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import PrefixStore
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fusedcomm import env
from fusedcomm.memory import flight_recorder, group
from fusedcomm.memory.errors import PeerMismatchError
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.members import known_member, member, members
from fusedcomm.memory.vote import agree
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.library import UpToTheOp
from fusedcomm.plan.cost.model import KINDS
from fusedcomm.plan.planner import CALL, Plan, graph_facts

_MOST_LETTERS = 512  # of an error


def same_call(record: flight_recorder.Record, plan: Plan, ours: Member, args: Arguments) -> None:
    """Compare the call with the other ranks', in a bounded collective.

    Raises PeerMismatchError where the calls differ, and PeerTimeoutError where a rank does not come. Nothing has been
    sent then, and the group can go on.
    """
    if plan.has_workspace:
        ours.enter(record.op, plan.fingerprint)  # raises if this rank knows of an error: it does not come to the vote
    record.state = flight_recorder.CHECKING
    calls = _all_calls(ours, record.op, facts_of(record, plan, args))
    for rank, call in enumerate(calls):
        if "error" in call:
            text = f"rank {rank} found its input wrong: {call['error']}"
            raise PeerMismatchError(text, peers=[rank], op=record.op, epoch=0, differs="error")
    compare(calls, ours.rank, record.op, f"call {record.number} on group {record.group_name!r}")


def tell_peers(op: str, group_name: str, x: Any, error: Exception) -> None:
    """With FUSEDCOMM_CHECK, report the error of this rank's arguments to the peers' `same_call`. ``x``: the payload."""
    is_tensor = isinstance(x, Tensor)
    if (is_tensor and is_traced(x)) or isinstance(_get_current_dispatch_mode(), UpToTheOp):
        return
    pg = group.find(group_name)
    known = members(pg)
    if pg.size() == 1 or not (is_tensor or len(known) == 1):  # without a tensor the device is that of earlier calls
        return
    device = x.device if is_tensor else known[0].device
    ours = known_member(group_name, device) or (member(group_name, device) if env.check() else None)
    if ours is not None and ours.topology.check:
        with ours.lock:
            _all_calls(ours, op, {"op": op, "error": str(error)[:_MOST_LETTERS]})


@contextmanager
def told_to_peers(op: str, group_name: str, x: Any) -> Iterator[None]:
    """`tell_peers` of an error inside, where arguments are checked."""
    try:
        yield
    except (TypeError, ValueError) as error:
        tell_peers(op, group_name, x, error)
        raise


def _all_calls(ours: Member, op: str, call: dict[str, Any]) -> list[dict[str, Any]]:
    store = PrefixStore("check", ours.store)
    found = agree(store, ours.rank, ours.group_size, {"call": call}, what=op, departures=ours.departures)
    return [each["call"] for each in found]


def facts_of(record: flight_recorder.Record, plan: Plan, args: Arguments) -> dict[str, Any]:
    """The call as JSON. The most telling fields come first."""
    if args.wire != CALL and plan.exchange is not None:
        return {
            "op": KINDS[record.op],
            "wire": args.wire,
            "chunk": list(graph_facts(plan.exchange, plan.num_rounds)),
            "dtype": record.dtype_name,
            "rounds": plan.num_rounds,
            "slot bytes": plan.slot_bytes,
            "number of the call": record.number,
            "version": _version(),
        }
    return {
        "op": record.op,
        **record.arguments,
        "dtype": record.dtype_name,
        **operand_facts(args, record.exchange is None or record.exchange.cut is None),
        "by-product": args.return_gathered,
        "algorithm": plan.algorithm,
        "rounds": plan.num_rounds,
        "slot bytes": plan.slot_bytes,
        "number of the call": record.number,
        "version": _version(),
    }


def operand_facts(args: Arguments, is_even: bool) -> dict[str, Any]:
    """Facts about the tensors beside x and w. The biases of uneven parts may differ in size."""
    biases = [None if bias is None else list(bias.shape) if is_even else True for bias in args.biases]
    return {
        "bias shape": biases[0] if len(biases) == 1 else biases,
        "norm_weight": None if args.norm_weight is None else str(args.norm_weight.dtype).removeprefix("torch."),
        "dims of scales": [max(scale.ndim, 1) for scale in args.scales],  # the recipe but for blocks
    }


@contextmanager
def same_arguments(
    op: str,
    group_name: str,
    rank: int,
    vote: Callable[[dict[str, Any]], list[dict[str, Any]]],
    arguments: dict[str, Any],
    names: Sequence[int] | None = None,
) -> Iterator[None]:
    """All ranks come here with equal arguments, or all raise. In its block a rank checks its own.

    ``vote`` returns every rank's call, by rank; ``names``: the ranks' numbers in errors, if not 0, 1, ...
    """
    wrong: Exception | None = None
    try:
        yield
    except Exception as error:
        wrong = error
    calls = vote({"op": op, **arguments, "error": "" if wrong is None else (str(wrong) or repr(wrong))[:_MOST_LETTERS]})
    errors = [call.pop("error") for call in calls]
    if wrong is not None and not isinstance(wrong, ValueError):
        raise wrong
    first = next((r for r, error in enumerate(errors) if error), None)
    if first is not None:
        alone = f" (rank {first if names is None else names[first]})" if set(errors) != {errors[first]} else ""
        raise ValueError(errors[first] + alone)
    compare(calls, rank, op, f"group {group_name!r}", names)


@contextmanager
def same_collective(op: str, group_name: str, t: Tensor, **arguments: Any) -> Iterator[None]:
    """With FUSEDCOMM_CHECK, `same_arguments` of the group's ranks, else nothing. ``t``: the payload.

    Code that is traced is not checked.
    """
    if is_traced(t) or group.find(group_name).size() == 1 or not (ours := member(group_name, t.device)).topology.check:
        yield
        return

    own = {key: str(value) for key, value in {"dtype": t.dtype, **arguments}.items()}
    with same_arguments(op, group_name, ours.rank, partial(_all_calls, ours, op), own):
        yield


def is_traced(t: Any) -> bool:
    if torch.compiler.is_compiling() or isinstance(t, FakeTensor) or t.device.type not in ("cpu", "cuda"):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # make_fx, of real tensors too


def compare(
    calls_by_rank: list[dict[str, Any]], rank: int, op: str, where: str, names: Sequence[int] | None = None
) -> None:
    """Raise for the first field that differs, with the same text on all ranks."""
    for field in max(calls_by_rank, key=len):  # where op is equal, only calls of uneven parts have more
        values = [call.get(field) for call in calls_by_rank]
        others = [r for r, value in enumerate(values) if value != values[rank]]
        if others:
            what = where if field == "op" else f"{op}, {where}"
            names = range(len(values)) if names is None else names
            text = f"calls must be equal on all ranks, got {field} {_by_rank(values, names)} ({what})"
            raise PeerMismatchError(text, peers=[names[r] for r in others], op=op, epoch=0, differs=field)


def _by_rank(values: list[Any], names: Sequence[int]) -> str:
    """``[4, 8] on ranks 0, 2 and [4, 9] on rank 1``."""
    texts = [str(value) for value in values]
    ranks = {
        text: [str(r) for r, other in zip(names, texts, strict=True) if other == text] for text in dict.fromkeys(texts)
    }
    parts = [f"{text} on rank{'s' * (len(found) > 1)} {', '.join(found)}" for text, found in ranks.items()]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


@cache
def _version() -> str:
    return f"{importlib.metadata.version('fusedcomm')} with torch {torch.__version__}"
