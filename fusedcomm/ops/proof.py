"""Proved before use: a GPU's algorithm runs the calls of a group once it has been right there, on all ranks.

At the first call of a kind of collective, small exact problems of all its ops, the plain one too, run through all its
algorithms, with a bias, in several rounds: which op a rank has there is its own affair. Every rank compares its
results, bit by bit, with the whole group's program computed on the host, and the ranks vote. An algorithm that was
wrong, late or raised on any rank is off for the group, until a reset lets it try again. Calls of uneven parts have a
proof of their own.

Then each problem runs once more, by the native part, as later calls do (`fusedcomm.ops.prepared`). If that alone fails
on any rank, the group's calls stay in Python.

The proof has a workspace of its own, small and with guard bytes. A failure there breaks nothing of the group's, and
nothing of the group's grows. It runs on the current stream, and the host waits for it. `pipelined` needs no workspace:
it runs by the group's own collectives, within the group's own time-out.

A forced algorithm runs without a proof, and although its proof has failed: whoever forces it looks at it.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from fusedcomm import env
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import WARM_UP, is_capturing
from fusedcomm.memory.errors import RESET_FIRST, PeerError, PeerTimeoutError, text_of
from fusedcomm.memory.group_member import Member, WorkspaceUnavailable
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.segment import FINGERPRINT
from fusedcomm.memory.vote import agree
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops.call_arguments import Arguments
from fusedcomm.ops.exact_problem import ExactProblem, NormProblem, ScaledProblem, difference
from fusedcomm.ops.table import OPS
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize, WholeGroup
from fusedcomm.plan import planner
from fusedcomm.plan.cost import tuned
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan, kind_of_proof
from fusedcomm.plan.scaling import BYTES, VALUES
from fusedcomm.run import calls

# Sizes that no tile divides, loaded by elements, of few rows (`Exchange.by_cublas`) and of many; and K and N
# that descriptors can load, with rows that no tile divides.
SIZES = (MatmulSize(37, 29, 31), MatmulSize(101, 29, 31), MatmulSize(150, 128, 136))
NUM_ROUNDS = 3  # at least, in the larger problem: both slots are used, and one again
BOUND_S = 120.0  # of waits in a proof, whatever FUSEDCOMM_TIMEOUT_S: a peer may be compiling its kernels
Problem = ExactProblem | NormProblem
Runs = list[tuple[Problem, list[calls.Ran]]]  # this rank's
Pairs = Sequence[tuple[Tensor, Tensor]]  # of what a proof got and must get
_MOST_LETTERS = 300
_RAISED, _WRONG, _LATE, _BROKEN = range(4)  # causes first: what one raises makes peers wrong, late or broken


def is_unproved(plan: Plan, dtype: torch.dtype, ours: Member, uneven: bool) -> bool:
    """Whether the planned algorithm still needs a proof, or has failed it in another thread; equal on all ranks.

    ``uneven``: the parts of the call differ in size.
    """
    if plan.algorithm == "unfused" or plan.reason == planner.FORCED or not ours.topology.prove:
        return False
    return ours.outcomes.get(ours.topology.name_of_proof(kind_of_proof(plan.op), plan.algorithm, dtype, uneven)) != ""


@outside_modes()
def prove(op: str, algorithm: str, dtype: torch.dtype, ours: Member, uneven: bool) -> None:
    """Prove the planned algorithm for the op's kind of collective, and where it has a workspace all that do, on all
    ranks of the group. Keeps the outcomes: the failure's text, empty if it is right.

    Raises PeerError if the ranks do not come together; the group then needs a reset.
    """
    refuse_capture(op, algorithm, ours)
    by_kernels = ours.device.type == "cuda" and ours.topology.no_fused is None and not uneven
    for each in ("pipelined",) if algorithm == "pipelined" else ("chunked", "fused")[: 1 + by_kernels]:
        if each != "pipelined" and ours.no_workspace is not None:  # by the first one's proof, or another thread's
            return
        kind = kind_of_proof(op)
        name = ours.topology.name_of_proof(kind, each, dtype, uneven)
        if name not in ours.outcomes:
            ours.outcomes[name] = _outcome(kind, each, dtype, ours, uneven)


def refuse_capture(op: str, algorithm: str, ours: Member) -> None:
    if is_capturing(ours.device):
        raise RuntimeError(
            f"{op}: {algorithm} is not proved on this GPU yet, and cannot be while a CUDA graph is captured; {WARM_UP}"
        )


def _outcome(kind: str, algorithm: str, dtype: torch.dtype, ours: Member, uneven: bool) -> str:
    base = kind.removesuffix("_norm").removesuffix("_scaled")
    form = kind.removeprefix(base)
    programs = [each for each in PROGRAMS.values() if each.kind == base]
    if form == "_scaled":  # pushes send results, gathers float8
        programs = [each for each in programs if each.gathers == (dtype in BYTES)]
    forms = [form]
    if form == "_scaled":
        forms.append("_tensor_wise")
    elif kind == "reduce_scatter":  # a rank has either
        forms.append("_norm")
    problems = [
        problem_of(each, size, ours.group_size, behind, uneven)
        for each in programs
        for size in SIZES
        for behind in forms
    ]
    for problem in problems:
        if isinstance(problem, NormProblem):
            problem.sends_whole = algorithm != "pipelined"
    parts = " in parts of different sizes" if uneven else ""
    what = f"{algorithm} of {str(dtype).removeprefix('torch.')}{parts}"
    num_bytes = 0 if algorithm == "pipelined" else max(slot_bytes(problem, dtype) for problem in problems)

    ran: list[calls.Ran] = []
    first: list[tuple[Tensor, Tensor]] = []

    def results(own: Member) -> Pairs:
        by_group = algorithm == "pipelined"
        found = _by_group(ours, problems, dtype) if by_group else _by_workspace(own, algorithm, problems, dtype)
        ran.extend(each for _, runs in found for each in runs)
        returned = [(problem, [t for each in runs for t in each.returned]) for problem, runs in found]
        first.extend(pairs(returned, ours.rank, dtype))
        return first

    def again(own: Member) -> Pairs:
        with bounded(own, base):
            for got, _ in first:
                got.zero_()  # it may be an `out`
            found = [t for each in ran for t in calls.run_again(each)]
        return [(got, must) for got, (_, must) in zip(found, first, strict=True)]

    # The interpreter's kernels are not native, and FUSEDCOMM_CHECK keeps all calls in Python.
    natively = not ours.topology.check and algorithm in ("chunked", "fused")[: 1 + (ours.device.type == "cuda")]
    return outcome(kind, what, ours, num_bytes, results, again if natively else None)


def problem_of(
    program: WholeGroup, size: MatmulSize, num_ranks: int, form: str = "", uneven: bool = False, seed: int = 0
) -> Problem:
    """``form``: "_norm", "_scaled", "_tensor_wise" or ""."""
    if program.cut is None:  # an all_reduce cuts rows that the group divides, without padding
        size = replace(size, rows=size.rows * num_ranks)
    if form == "_norm":
        return NormProblem(program, size, num_ranks, seed, uneven)
    if form in ("_scaled", "_tensor_wise"):
        return ScaledProblem(program, size, num_ranks, seed, uneven, tensor_wise=form == "_tensor_wise")
    return ExactProblem(program, size, num_ranks, seed, bias=True, uneven=uneven)


def slot_bytes(problem: Problem, dtype: torch.dtype) -> int:
    """Slot size for NUM_ROUNDS rounds of the problem."""
    exchange = problem.exchange(0).for_all
    num_rows = math.prod(exchange.block[: exchange.num_lead])
    return -(-num_rows // NUM_ROUNDS) * exchange.row_numel * problem.num_ranks * dtype.itemsize


def _try(results: Callable[[Member], Pairs], own: Member) -> tuple[int, str]:
    """Run problems. Returns (cause, failure on this rank or ""). No exception of an algorithm may end the proof."""
    try:
        if wrong := wrong_values(results(own)):
            return _WRONG, wrong
    except PeerTimeoutError as error:
        return _LATE, f"was late: {_first_line(error)}"
    except PeerError as error:
        return _BROKEN if error.peers else _WRONG, f"failed: {_first_line(error)}"  # guard bytes name no peer
    except Exception as error:
        return _RAISED, f"raised {_first_line(error)}"
    return _WRONG, ""


def outcome(
    kind: str,
    what: str,
    ours: Member,
    num_bytes: int,
    results: Callable[[Member], Pairs],
    again: Callable[[Member], Pairs] | None = None,
) -> str:
    """The failure of any rank's ``results(own)``, or "". ``own``: a Member with a workspace for the proof alone, if
    ``num_bytes``. ``again``: the same by the native part, on all ranks or none.

    Where ranks cannot map each other's memory, the group has no workspace from then on. Raises PeerError if they do not
    come together; the group then needs a reset.
    """
    own = ours.for_proof(num_bytes)
    try:
        if num_bytes:
            own.workspace_for(own.max_slot_bytes, kind, _fingerprint(kind))
        cause, wrong = _try(results, own)
        _, native = _try(again, own) if again else (cause, "")  # which fails at once where the workspace is broken
        failure, native = _voted(own, kind, what, cause, wrong, native)
        if native and not failure:
            ours.stay_in_python(native)
        return failure
    except WorkspaceUnavailable as unavailable:
        if own.cannot_map and ours.workspace is None:  # nor could the group's own
            ours.unavailable = str(unavailable)
            ours.prepare_anew()
        return f"{what.partition(' ')[0]} could not be proved: {unavailable}"
    except PeerError as failed:
        ours.error = own.error or failed.until_reset()
        ours.prepare_anew()  # prepared calls do not look at the error
        raise ours.error.again() from failed
    except BaseException as left:  # by Ctrl-C
        ours.left(kind, left)
        raise
    finally:
        own.close()


def wrong_values(pairs: Pairs) -> str:
    """The first difference between a result and its oracle; empty if there is none."""
    for got, must in pairs:
        if found := difference(_wide(got.cpu()), _wide(must)):
            return f"gave wrong values: {found}"
    return ""


def pairs(results: Sequence[tuple[Problem, list[Tensor]]], rank: int, dtype: torch.dtype) -> Pairs:
    """Each tensor of the results with what it must be."""
    return [
        (got, must.to(_result_dtype(problem, dtype)))
        for problem, result in results
        for got, must in zip(result, _expected(problem, rank, dtype), strict=True)
    ]


@contextmanager
def bounded(own: Member, kind: str) -> Iterator[Workspace]:
    """The proof's workspace, with its own bound of waits. All that runs inside has ended behind it, or an error is
    raised.
    """
    workspace = own.workspace
    assert workspace is not None
    workspace.timeout_s = BOUND_S
    workspace.arm()
    with workspace.guarded(kind):
        yield workspace
        _synchronize(workspace.device)
    workspace.check(kind)


def _by_workspace(own: Member, algorithm: str, problems: Sequence[Problem], dtype: torch.dtype) -> Runs:
    def plan(op: str, exchange: Exchange) -> Plan:
        return Plan(op, algorithm, "proof", fingerprint=_fingerprint(op), exchange=exchange)

    with bounded(own, problems[0].program.kind) as workspace:
        runs = [(problem, _run(problem, workspace, dtype, plan)) for problem in problems]
        workspace.least_copied = 0  # the chunks of gathers by copy engines too, which larger ones take
        gathers = [problem for problem in problems if problem.program.gathers]
        return runs + [(problem, _run(problem, workspace, dtype, plan)) for problem in gathers]


def _by_group(ours: Member, problems: Sequence[Problem], dtype: torch.dtype) -> Runs:
    def plan(op: str, exchange: Exchange) -> Plan:
        sums = ours.topology.backend_sums
        return Plan(op, "pipelined", "proof", num_rounds=NUM_ROUNDS, backend_sums=sums, exchange=exchange)

    runs, failures = [(problem, list[calls.Ran]()) for problem in problems], list[Exception]()
    for problem, ran in runs:
        for call in calls_of(problem, ours.rank, dtype, ours.device, ours.group_name):
            try:
                ran.append(call.run(ours.memory, plan))
            except Exception as error:  # the peers run the rest before they vote
                failures.append(error)
    _synchronize(ours.device)
    if failures:
        raise failures[0]
    return runs


def _run(
    problem: Problem, memory: CallMemory, dtype: torch.dtype, plan: Callable[[str, Exchange], Plan]
) -> list[calls.Ran]:
    given = calls_of(problem, memory.rank, dtype, memory.device, memory.group_name)
    return [call.run(memory, plan) for call in given]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Call(NamedTuple):
    """A call of one rank."""

    op: str
    exchange: Exchange
    operands: Sequence[Any]
    facts: Mapping[str, Any]

    def run(self, memory: CallMemory, plan: Callable[[str, Exchange], Plan]) -> calls.Ran:
        return calls.run(plan(self.op, self.exchange), memory, OPS[self.op].program, self.operands, self.facts)


def calls_of(problem: Problem, rank: int, dtype: torch.dtype, device: torch.device, group_name: str) -> list[Call]:
    """A rank's calls: the op, of a gather with the exchanged x, and the collective alone; those with a norm, each way;
    scaled ones, with scales behind the rows, and of x alone, which graphs send as bytes too.
    """
    if isinstance(problem, NormProblem):
        given = problem.calls(rank)
        return [
            Call(op, exchange, [None if t is None else t.to(device, dtype) for t in tensors], {"eps": 0.0})
            for op, tensors, exchange in given
        ]
    if isinstance(problem, ScaledProblem):
        args = problem.call(rank, device, _result_dtype(problem, dtype), group_name)
        forms = [args]
        if problem.program.gathers:
            scale_x = problem.scale_of_gathered(rank).to(device)
            forms.append(args._replace(sends_scales=False, scale_x=scale_x))
        spec = OPS[f"scaled_{problem.program.op}"]
        return [Call(spec.name, spec.exchange_of(form), *spec.operands(form)) for form in forms]
    program, group = problem.program, (problem.num_ranks, group_name)
    tensors, made = (problem.xs, problem.ws, problem.biases, problem.payloads), _result_dtype(problem, dtype)
    x, w, bias, payload = (ts[rank].to(device, made) for ts in tensors)
    args = Arguments(x, [w], [bias], *group, return_gathered=True)
    exchange = problem.exchange(rank)
    if not program.gathers:
        args = args._replace(out=x.new_full(exchange.out_shape, math.nan))
    alone = Arguments(payload, [], [], *group, problem.splits(rank))
    alone = alone._replace(gather_dim=program.gather_dim or 0, scatter_dim=program.scatter_dim or 0)
    spec, plain = OPS[program.op], OPS[program.kind]
    found = [Call(plain.name, plain.exchange_of(alone), *plain.operands(alone))]
    return found if dtype in BYTES else [Call(spec.name, exchange, *spec.operands(args)), *found]


def _result_dtype(problem: Problem, dtype: torch.dtype) -> torch.dtype:
    """``dtype``: of what is sent."""
    if dtype not in BYTES:
        return dtype
    if isinstance(problem, ScaledProblem):
        return torch.bfloat16
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in VALUES else t  # which torch does not compare


def _expected(problem: Problem, rank: int, dtype: torch.dtype) -> list[Tensor]:
    if isinstance(problem, NormProblem):
        return problem.results(rank) * len([*problem.calls(rank)])
    if isinstance(problem, ScaledProblem):
        return [problem.results()[rank]] * (1 + problem.program.gathers)
    alone = problem.program.exchanged(problem.payloads)[rank]
    if dtype in BYTES:
        return [alone]
    return [problem.results()[rank], *[alone] * (1 + problem.program.gathers)]


def _voted(own: Member, kind: str, what: str, cause: int, wrong: str, native: str) -> tuple[str, str]:
    """The first cause of all ranks, with its rank, and likewise that of the native part; empty if all were right."""
    key = tuned.key(own.device, own.group_size)
    versions = [f"{name} {key[name]}" for name in ("driver", "torch", "triton", "fusedcomm") if key[name]]
    where = f"{key['device']} ({', '.join(versions)})"

    def said(by: str, failed: str) -> str:
        return f"{what}{by} failed its proof on {where}: rank {own.rank} {failed}" if failed else ""

    facts = {"cause": cause, "wrong": said("", wrong), "native": said(" by the native part", native)}
    name, bound = f"{kind}, proof of {what}", max(env.timeout_s(), 2 * BOUND_S)  # who has failed waits for late ones
    store, who = PrefixStore("proof", own.store), (own.rank, own.group_size)
    votes = agree(store, *who, facts, what=name, departures=own.departures, timeout_s=bound)
    failed = [(vote["cause"], rank, vote["wrong"]) for rank, vote in enumerate(votes) if vote["wrong"]]
    return str(min(failed, default=(_WRONG, 0, ""))[2]), next((v["native"] for v in votes if v["native"]), "")


def _first_line(error: BaseException) -> str:
    """Without the advice for a call: a proof is none."""
    return text_of(error).splitlines()[0].partition(f". {RESET_FIRST}")[0][:_MOST_LETTERS]


def _fingerprint(name: str) -> int:
    return zlib.crc32(f"proof {name}".encode()) & FINGERPRINT or 1
