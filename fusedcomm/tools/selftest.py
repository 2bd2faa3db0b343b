"""``fusedcomm selftest``: whether an installed fusedcomm keeps its promises here: values, bounded waits, errors with
ranks, fallbacks.

All ranks of WORLD run a check alike, on groups of its own, and vote on its outcome: it has passed on all ranks, or
failed on all. Nothing here kills a rank, so the ranks can be anybody's.
"""

import argparse
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.text import Text
from torch import Tensor
from torch.distributed import ProcessGroup

import fusedcomm
from fusedcomm.env import ALGORITHMS, WITH_WORKSPACE
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.memory.errors import PeerError
from fusedcomm.memory.group import process_group, store
from fusedcomm.memory.members import member
from fusedcomm.memory.vote import agree
from fusedcomm.ops import proof
from fusedcomm.ops.exact_problem import ExactProblem, difference
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize, WholeGroup

TIMEOUT_S = 300  # for one check, which ends by itself long before, with a finding
STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}
WAIT_S = 60  # bound of waits that are to succeed: on a GPU a peer may be compiling its kernels
ABSENT_S = 5  # bound of waits that are to fail
SLACK_S = 10  # beyond that bound, for a busy machine
CALLS = 3  # back to back with fresh data: both slots are used again
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CASES = ((MatmulSize(37, 29, 31), torch.float32), (MatmulSize(3 * 13, 17, 23, batch=3), torch.bfloat16))


class Skipped(Exception):
    """There is nothing to check here. Raised on all ranks alike."""


class Wrong(Exception):
    """A failed check. It is raised on all ranks: a rank that left alone would leave the others waiting."""


@dataclass(frozen=True)
class CheckResult:
    """Equal on all ranks, but for the time."""

    name: str
    proves: str
    status: str  # passed, failed, skipped
    found: str
    seconds: float = 0.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="check results, time-outs, errors and fallbacks here; on CPUs in under a minute",
        description="Checks what fusedcomm promises, in ranks that it starts or in those of torchrun: results and "
        "gradients of every op, time-outs, errors and fallbacks. No rank is killed. Prints a table with a line per "
        "check. Exit code: 0 if nothing failed, 1 if something did, 2 for wrong arguments.",
        epilog="example: fusedcomm selftest --device cpu",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    console.add_rank_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device_type, world_size, problem = world.asked_for(args)
    if problem := problem or console.not_writable(args, "json"):
        return console.fail("selftest", problem, code=2)
    start = time.monotonic()
    try:
        results = _run_checks(device_type, world_size)
    except (RankError, PeerError) as error:  # before the first check: ranks did not start
        return console.fail("selftest", str(error))
    if not world.is_rank_0():
        return 0  # rank 0's exit code is torchrun's
    failed = [result.name for result in results if result.status == "failed"]
    skipped, seconds = sum(result.status == "skipped" for result in results), time.monotonic() - start
    out, verdict = console.stdout(), f"FAILED: {', '.join(failed)}" if failed else "nothing failed"
    console.show(_table(results), out)
    out.print(f"{verdict}, {skipped} skipped; {world_size} ranks ({device_type}), {seconds:.0f} s")
    if args.json:
        found = {"world_size": world_size, "device": device_type, "passed": not failed, "seconds": seconds}
        console.write_json(args.json, {**run_facts(), **found, "checks": list(map(asdict, results))})
    return 1 if failed else 0


def _run_checks(device_type: str, world_size: int) -> list[CheckResult]:
    """Rank 0's results; [] in other ranks of torchrun. A check that ends its ranks is the last one to run."""
    results: list[CheckResult] = []
    name = ""
    try:
        with (
            world.ranks(device_type, world_size, TIMEOUT_S) as call,
            console.progress(world.is_rank_0(), len(CHECKS), "starting", "check") as on_check,
        ):
            for name in CHECKS:
                result = call(run_check, name, device_type)
                results += [] if result is None else [result]
                on_check(len(results))
    except (RankError, PeerError) as error:
        if not name:  # ranks did not start
            raise
        results.append(CheckResult(name, CHECKS[name][0], "failed", str(error)))
    left = list(CHECKS.items())[len(results) :] if world.is_rank_0() else []
    return results + [CheckResult(name, proves, "skipped", "its ranks had ended") for name, (proves, _) in left]


def _table(checks: Sequence[CheckResult]) -> Table:
    columns = (
        Column("check", "its name", lambda each: each.name, left=True),
        Column("result", "skipped: cannot run here", lambda row: Text(row.status, style=STYLES[row.status]), left=True),
        Column("proves", "what holds if it passes", lambda each: each.proves, left=True, folds=20),
        Column("found", "or why it failed, or did not run", lambda each: each.found, left=True, folds=20),
    )
    return Table(columns, checks)


def run_check(rank: int, name: str, device_type: str) -> CheckResult:
    """Run one check, in all ranks of WORLD. Raises PeerTimeoutError if a rank does not come to the vote."""
    (proves, check), start, log = CHECKS[name], time.monotonic(), logging.getLogger("fusedcomm")
    vote: dict[str, Any] = {"status": "passed", "found": ""}
    level = log.level
    log.setLevel(logging.ERROR)  # fallbacks are part of the checks
    try:
        with settings(TIMEOUT_S=str(WAIT_S)):
            vote["found"] = check(world.rank_device(device_type))
    except Skipped as reason:
        vote = {"status": "skipped", "found": str(reason)}
    except Wrong as error:
        vote = {"status": "failed", "found": str(error)}
    except Exception as error:
        vote = {"status": "failed", "found": f"rank {rank}: {type(error).__name__}: {error}"}
    finally:
        log.setLevel(level)
    votes = _meet(process_group(None), vote | {"at": time.time()}, _vote_s(), name)
    # The first failure is the cause: its consequences on other ranks came later.
    failed = [each for each in votes if each["status"] == "failed"]
    worst = min(failed, key=lambda each: each["at"]) if failed else votes[0]
    return CheckResult(name, proves, worst["status"], worst["found"], time.monotonic() - start)


def settings(**env: str) -> AbstractContextManager[Any]:
    """Set ``FUSEDCOMM_<name>`` inside. A group keeps the settings of its first call."""
    return mock.patch.dict(os.environ, {f"FUSEDCOMM_{name}": value for name, value in env.items()})


@contextmanager
def own_group(**env: str) -> Iterator[ProcessGroup]:
    """A group of all ranks that votes under these settings, and is gone afterwards.

    Its time-out is longer than the vote on the check: NCCL's watchdog would end the process before the check reports.
    """
    with settings(**env):
        group = dist.new_group(timeout=timedelta(seconds=2 * _vote_s()))
        try:
            yield group
        finally:
            dist.destroy_process_group(group)


class ExactCall(ExactProblem):
    """An exact problem, and this rank's calls of it."""

    def __init__(
        self, program: WholeGroup, size: MatmulSize, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        super().__init__(program, size, dist.get_world_size(), seed)
        self.dtype, self.device, self.rank = dtype, device, dist.get_rank()

    def __str__(self) -> str:
        x, w = (list(ts[self.rank].shape) for ts in (self.xs, self.ws))
        return f"x {x}, w {w}, {str(self.dtype).removeprefix('torch.')}"

    def inputs(self) -> list[Tensor]:
        """This rank's x and w."""
        return [ts[self.rank].to(self.device, self.dtype).requires_grad_() for ts in (self.xs, self.ws)]

    def call(self, group: ProcessGroup) -> list[Tensor]:
        """The result and the gradients of x and w, by fusedcomm."""
        x, w = self.inputs()
        y = getattr(fusedcomm, self.program.op)(x, w, *self.program.dims(x), group)
        grads = torch.autograd.grad(y, (x, w), self._grad(y.shape, self.rank).to(y))
        return [y.detach(), *grads]

    def expected(self) -> list[Tensor]:
        """The same tensors by all ranks' program, in this process and in float64: no communication to trust."""
        xs, ws = ([t.double().requires_grad_() for t in ts] for ts in (self.xs, self.ws))
        outs = self.program.program(xs, ws)
        y = outs[self.rank]
        if self.program.same_grad_on_all_ranks:  # one result, which every rank has
            outs = [y]
        grads = [self._grad(out.shape, rank).double() for rank, out in enumerate(outs)]
        return [y.detach(), *torch.autograd.grad(outs, (xs[self.rank], ws[self.rank]), grads)]

    def wrong(self, group: ProcessGroup) -> str | None:
        """The first wrong tensor of a call, or None."""
        for what, result, must in zip(("result", "grad x", "grad w"), self.call(group), self.expected(), strict=True):
            if found := difference(result.cpu(), must.to(self.dtype)):
                return f"{self}: {what}: {found}"
        return None

    def plan(self, group: ProcessGroup) -> fusedcomm.Plan:
        x, w = self.inputs()
        return fusedcomm.explain(self.program.op, x, w, *self.program.dims(x), group)

    def _grad(self, shape: tuple[int, ...], rank: int) -> Tensor:
        return self.integers(shape, 2, 0 if self.program.same_grad_on_all_ranks else rank)


def _check_values(op: str, device: torch.device) -> str:
    with own_group() as group:
        algorithms = _runnable(group, device)[0]
        for algorithm in algorithms:
            calls = [ExactCall(PROGRAMS[op], *case, device, seed) for case in CASES for seed in range(CALLS)]
            with fusedcomm.force_algorithm(algorithm, strict=True):
                _must_be_right(calls, group, algorithm)
    return f"{', '.join(algorithms)}: {3 * CALLS * len(CASES)} tensors each, all exact"


def _check_plans(device: torch.device) -> str:
    with own_group() as group:
        can, cannot = _runnable(group, device)
        plans = [str(small(op, device).plan(group)) for op in PROGRAMS]
        by_rank = [each["plans"] for each in _meet(group, {"plans": plans})]
    if any(each != by_rank[0] for each in by_rank):
        raise Wrong(f"ranks plan otherwise: {by_rank}")
    return "; ".join([f"can run: {', '.join(can)}", *(f"{name} cannot: {reason}" for name, reason in cannot.items())])


def _check_proofs(device: torch.device) -> str:
    """The time before an algorithm's first use on a GPU."""
    algorithms = _with_workspace(device)
    with own_group() as group:
        ours = member(group.group_name, device)
        for op, name, dtype, uneven in itertools.product(PROGRAMS, algorithms, DTYPES, (False, True)):
            if not uneven or PROGRAMS[op].can_be_uneven:
                proof.prove(op, name, dtype, ours, uneven)
    if wrong := list(filter(None, ours.outcomes.values())):  # the same on all ranks
        raise Wrong("; ".join(wrong))
    return f"{len(ours.outcomes)} proofs of {', '.join(algorithms)}: all right"


def _check_time_out(device: torch.device) -> str:
    """The last rank does not call: the others say so in time and name it; all are right again after a reset."""
    slowest, absent = 0.0, dist.get_world_size() - 1
    for algorithm in _with_workspace(device):
        first, then = (small("matmul_all_to_all", device, seed) for seed in range(2))
        with own_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
            _must_be_right([first], group, algorithm)  # kernels are compiled, under the long bound
        with own_group(TIMEOUT_S=str(ABSENT_S)) as group, fusedcomm.force_algorithm(algorithm, strict=True):
            _must_be_right([first], group, algorithm)
            wrong = None
            if dist.get_rank() != absent:
                start = time.monotonic()
                error = _error_of(then, group)
                slowest = max(slowest, time.monotonic() - start)
                wrong = _wrong_time_out(error, absent, slowest)
            _must_hold(group, wrong, algorithm)
            _must_be_right_after_reset(then, group, algorithm)
    return f"reported after {slowest:.1f} s with a bound of {ABSENT_S} s; right again after reset"


def _wrong_time_out(error: Exception | None, absent: int, seconds: float) -> str | None:
    if not isinstance(error, fusedcomm.PeerTimeoutError):
        return f"must be a PeerTimeoutError, got {error!r}"
    if error.peers != [absent]:
        return f"must name rank {absent}, got {error.peers}"
    if seconds > ABSENT_S + SLACK_S:
        return f"took {seconds:.1f} s with a bound of {ABSENT_S} s"
    return None


def _check_mismatch(device: torch.device) -> str:
    """The last rank calls another op: all are told."""
    odd_one = dist.get_rank() == dist.get_world_size() - 1
    algorithms = _with_workspace(device)
    for algorithm in algorithms:
        with own_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
            calls = [small(op, device) for op in ("matmul_all_to_all", "all_gather_matmul")]
            _must_be_right(calls, group, algorithm)
            error = _error_of(calls[odd_one], group)
            told = isinstance(error, fusedcomm.PeerMismatchError)
            _must_hold(group, None if told else f"must be a PeerMismatchError, got {error!r}", algorithm)
            _must_be_right_after_reset(calls[0], group, algorithm)
    return f"PeerMismatchError on every rank ({', '.join(algorithms)}); right again after reset"


def _check_cap(device: torch.device) -> str:
    _with_workspace(device)
    with own_group(WORKSPACE_BYTES="64") as group:
        return _falls_back(group, device, "FUSEDCOMM_WORKSPACE_BYTES=64")


def _check_vote(device: torch.device) -> str:
    _with_workspace(device)
    last = dist.get_world_size() - 1
    host = {"HOST_ID": "elsewhere"} if dist.get_rank() == last else {}
    with own_group(**host) as group:
        return _falls_back(group, device, f"rank {last} is on another host")


def _falls_back(group: ProcessGroup, device: torch.device, because: str) -> str:
    with fusedcomm.force_algorithm(None):
        calls = [small(op, device) for op in PROGRAMS]
        plans = [data.plan(group) for data in calls]
        other = [plan for plan in plans if plan.has_workspace or because not in plan.reason]
        _must_hold(group, f"must need no workspace ({because}), got {other[0]}" if other else None, "plan")
        _must_be_right(calls, group, "unfused or pipelined")
    return f"all five ops without a workspace and exact, because {plans[-1].reason}"


def small(op: str, device: torch.device, seed: int = 0) -> ExactCall:
    return ExactCall(PROGRAMS[op], *CASES[0], device, seed)


def why_not(algorithm: str, plan: Callable[[], fusedcomm.Plan]) -> str | None:
    """Why the planner refuses the algorithm for a call even where it is asked for, or None."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        try:
            found = plan()
        except RuntimeError as error:
            return str(error).partition(": ")[2] or str(error)
    return None if found.algorithm == algorithm else found.reason


def _runnable(group: ProcessGroup, device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The algorithms that the planner can run in this group, and why not the others."""
    call = small("matmul_all_to_all", device)
    reasons = {algorithm: why_not(algorithm, partial(call.plan, group)) for algorithm in ALGORITHMS}
    cannot = {algorithm: why for algorithm, why in reasons.items() if why is not None}
    return [algorithm for algorithm in ALGORITHMS if algorithm not in cannot], cannot


def _with_workspace(device: torch.device) -> list[str]:
    """The algorithms that wait by the flags of a workspace. Raises Skipped if there are none."""
    with own_group() as group:
        can, cannot = _runnable(group, device)
    if algorithms := [name for name in can if name in WITH_WORKSPACE]:
        return algorithms
    raise Skipped(cannot["chunked"])


def _must_hold(group: ProcessGroup, wrong: str | None, algorithm: str) -> None:
    """Raises Wrong on all ranks if ``wrong`` on one."""
    for rank, each in enumerate(_meet(group, {"wrong": wrong})):
        if each["wrong"]:
            raise Wrong(f"rank {rank}: {algorithm}: {each['wrong']}")


def _must_be_right(calls: Sequence[ExactCall], group: ProcessGroup, algorithm: str) -> None:
    """Make all calls back to back, even after a wrong one, because the peers make them all."""
    found = [(data.program.op, data.wrong(group)) for data in calls]
    _must_hold(group, next((f"{op}: {wrong}" for op, wrong in found if wrong), None), algorithm)


def _must_be_right_after_reset(data: ExactCall, group: ProcessGroup, algorithm: str) -> None:
    with settings(TIMEOUT_S=str(WAIT_S)):
        fusedcomm.reset(group)
        _must_be_right([data], group, algorithm)


def _error_of(data: ExactCall, group: ProcessGroup) -> Exception | None:
    """The PeerError of a call, or None. On a GPU waits report only when the host asks."""
    x, w = (t.detach() for t in data.inputs())
    try:
        getattr(fusedcomm, data.program.op)(x, w, *data.program.dims(x), group)
        fusedcomm.synchronize(group)
    except fusedcomm.PeerError as error:
        return error
    return None


def _meet(
    group: ProcessGroup, facts: dict[str, Any], bound_s: float | None = None, check: str = "a check"
) -> list[dict[str, Any]]:
    """All ranks' facts, over the group's store alone, apart from the bound of the group's own waits."""
    what = f"fusedcomm selftest, {check}"
    if facts.get("found"):  # an error of the vote must not hide it
        what += f": {facts['found']}"
    with settings(TIMEOUT_S=str(bound_s or WAIT_S)):
        return agree(store(group, "selftest"), group.rank(), group.size(), facts, what=what)


def _vote_s() -> float:
    """Longer than a peer can take to come to the vote: it may begin a wait, and then wait to meet."""
    return 2 * WAIT_S + SLACK_S


VALUES = "result and gradients are those of one process, bit by bit"
# By name: what it proves, and its run, which returns the evidence and raises on a failure
CHECKS: dict[str, tuple[str, Callable[[torch.device], str]]] = {
    "plan": ("all ranks plan every op alike", _check_plans),
    **{op: (VALUES, partial(_check_values, op)) for op in PROGRAMS},
    "proofs": ("every algorithm passes the proof that comes before its first use", _check_proofs),
    "time-out": ("a rank that does not call is named, in bounded time", _check_time_out),
    "mismatch": ("ranks in different calls are all told", _check_mismatch),
    "fallback, memory": ("a cap that is too small means that no workspace is used, and says so", _check_cap),
    "fallback, vote": ("where one rank cannot, nobody does", _check_vote),
}
