"""Whether what the ranks report is what the fault allows: right values, or the right error in time, and a way back."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tests.faults.cells import Cell
from tests.faults.injections import LATE
from tests.faults.known_calls import DISPATCH
from tests.faults.steps import FIRST, FIRST_CALL

RIGHT, WRONG, PEER_ERROR, INJECTED, OTHER_ERROR = "right", "wrong", "peer error", "injected", "other error"
SLACK_S = 10.0  # beyond the time-out; a busy machine has taken 6
VOTE = "fusedcomm topology vote"  # the op of errors before a group has come together
BACKEND_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError")


@dataclass(frozen=True)
class CallOutcome:
    kind: str
    text: str = ""
    error: str = ""  # type of the error
    op: str = ""
    epoch: int = 0
    peers: tuple[int, ...] = ()
    called: str = ""  # the op that was called
    epoch_before: int = 0
    seconds: float = 0.0
    index: int = 0  # index of the call


@dataclass(frozen=True)
class RankReport:
    """``after``: the call after a reset; where a rank has died, ``close``."""

    rank: int
    outcomes: list[CallOutcome]
    reached: bool
    memory: list[str] = field(default_factory=list)
    after: CallOutcome | None = None


@dataclass(frozen=True)
class Verdict:
    """``worst``: the longest time to an error, in time-outs."""

    cell: str
    survived: bool
    wrong_numbers: int = 0
    hung: bool = False
    worst: float | None = None
    found: tuple[str, ...] = ()  # what breaks the promise


def judge(cell: Cell, reports: Mapping[int, RankReport]) -> Verdict:
    """``reports`` has the report of every living rank of the group, by its rank there."""
    found = list(_objections(cell, reports))
    outcomes = [outcome for report in reports.values() for outcome in (*report.outcomes, report.after) if outcome]
    wrong = sum(outcome.kind == WRONG for outcome in outcomes)
    times = [o.seconds / cell.timeout_s for o in _first_errors(cell, reports).values() if o is not None]
    return Verdict(str(cell), not found, wrong, False, max(times) if times else None, tuple(found))


def _first_errors(cell: Cell, reports: Mapping[int, RankReport]) -> dict[int, CallOutcome | None]:
    """What each rank raised first, except the victim, which may sleep through its time-out."""
    return {
        rank: next((o for o in report.outcomes if o.kind not in (RIGHT, WRONG)), None)
        for rank, report in reports.items()
        if rank != cell.victim
    }


def _objections(cell: Cell, reports: Mapping[int, RankReport]) -> Iterator[str]:
    alive = set(range(cell.group_size)) - ({cell.victim} if cell.fault == "kill" else set())
    if set(reports) != alive:
        yield f"ranks {sorted(alive)} must report, got {sorted(reports)}"
    for rank, report in sorted(reports.items()):
        objections = _harmless if cell.harmless else _victim if rank == cell.victim else _survivor
        for text in (*objections(cell, report), *_around(cell, report)):
            yield f"rank {rank}: {text}"


def _harmless(cell: Cell, report: RankReport) -> Iterator[str]:
    if len(report.outcomes) != cell.num_calls:
        yield f"{cell.num_calls} calls must end, got {len(report.outcomes)}"
    for outcome in report.outcomes:
        if outcome.kind != RIGHT:
            yield f"call {outcome.index} must be right, got {_said(outcome)}"


def _around(cell: Cell, report: RankReport) -> Iterator[str]:
    """What must hold whatever the calls gave: memory, and the way back."""
    if not report.reached:
        yield f"step {cell.step} was not reached"
    yield from report.memory
    for outcome in report.outcomes:
        yield from _ended(cell, report.rank, f"call {outcome.index}", outcome)
    if not cell.by_group:
        for earlier, later in pairwise(report.outcomes):
            if earlier.kind not in (RIGHT, WRONG) and later.kind == RIGHT:
                yield f"call {later.index} must raise: call {earlier.index} has failed, and no reset came between"
    yield from _way_back(cell, report.rank, report.after)


def _way_back(cell: Cell, rank: int, after: CallOutcome | None) -> Iterator[str]:
    what = "close" if cell.fault == "kill" else "the call after the reset"
    if after is not None:
        yield from _ended(cell, rank, what, after)
    if cell.fault == "kill":
        nothing_to_free = cell.by_group or cell.first_call
        if after is None or after.kind not in ((PEER_ERROR, RIGHT) if nothing_to_free else (PEER_ERROR,)):
            yield f"{what} must end with an error, got {_said(after)}"
        elif after.kind == PEER_ERROR and after.peers != (cell.victim,):
            yield f"{what} must name rank {cell.victim}, got {list(after.peers)}"
    elif cell.recovers and (after is None or after.kind != RIGHT):
        yield f"{what} must be right, got {_said(after)}"


def _ended(cell: Cell, rank: int, what: str, outcome: CallOutcome) -> Iterator[str]:
    """A call must end in time, and neither with a wrong result nor with an error of another kind."""
    stopped_s = LATE * cell.timeout_s if cell.fault == "stop" and rank == cell.victim else 0.0
    if outcome.seconds > stopped_s + cell.timeout_s + SLACK_S:
        yield f"{what} must end within {stopped_s + cell.timeout_s:g} + {SLACK_S:g} s, took {outcome.seconds:.1f} s"
    if outcome.kind == WRONG:
        yield f"{what} is wrong: {outcome.text}"
    if outcome.kind == OTHER_ERROR and not cell.by_group:
        yield f"{what} must raise nothing but a PeerError, got {_said(outcome)}"


def _survivor(cell: Cell, report: RankReport) -> Iterator[str]:
    """A peer of the victim must raise an error that names the victim, at the latest in the second call."""
    error = next((o for o in report.outcomes if o.kind != RIGHT), None)
    if error is None:
        if cell.fault == "stop" and not cell.stops_peers:
            return  # it had all that it needed, or got it once the victim went on
        yield "must raise, all calls were right"
        return
    if cell.by_group:  # the error is the backend's
        if error.kind != OTHER_ERROR or error.error not in BACKEND_ERRORS:
            yield f"must raise the backend's error, got {_said(error)}"
    else:
        yield from _peer_error(
            cell, error, "PeerMismatchError" if cell.fault.startswith("another-") else "PeerTimeoutError"
        )
        # A peer may hear of a dropped signal from the peer that missed it, and of one call more also from others.
        alone = cell.fault != "one-more"
        if cell.fault != "drop" and (cell.victim not in error.peers or (alone and len(error.peers) > 1)):
            yield f"must name rank {cell.victim}{' alone' * alone}, got {list(error.peers)}"
    if error.index > 0 and cell.stops_peers:
        yield "must raise in the faulty call, not in the next one"


def _victim(cell: Cell, report: RankReport) -> Iterator[str]:
    """A living victim: what was injected comes out as it is, and a call that its peers gave up on gives no result."""
    first = next((o for o in report.outcomes if o.index == 0), None)
    errors = [o for o in report.outcomes if o.kind != RIGHT]
    if cell.fault in ("raise", "interrupt", "memory"):
        if first is None or first.kind != INJECTED:
            yield f"must raise what was injected, got {_said(first)}"
        errors = errors[1:]
    elif cell.fault == "stop" and cell.stops_peers and (first is None or first.kind == RIGHT):
        yield "must not complete a call that its peers gave up on"
    if not errors:
        if cell.num_calls > 1 and not (cell.fault == "stop" and not cell.stops_peers):
            yield "must raise, at the latest in the next call"
        return
    if not cell.by_group:
        yield from _peer_error(cell, errors[0], None)
        if cell.fault == "one-more" and len(errors[0].peers) != cell.group_size - 1:
            yield f"must name all peers, got {list(errors[0].peers)}"


def _peer_error(cell: Cell, error: CallOutcome, must: str | None) -> Iterator[str]:
    if error.kind != PEER_ERROR or (must is not None and error.error != must):
        yield f"must raise {must or 'a PeerError'}, got {_said(error)}"
        return
    together = cell.first_call or cell.grows
    rounds = {"matmul_all_reduce": 2, DISPATCH: 3}.get(error.called, 1)
    epochs = range(0 if together else error.epoch_before + 1, error.epoch_before + rounds + 1)
    if error.op not in ((error.called, VOTE) if cell.step in (*FIRST, FIRST_CALL) else (error.called,)):
        yield f"its op must be {error.called}, got {error.op}"
    if error.epoch not in epochs:
        yield f"its epoch must be in {list(epochs)}, got {error.epoch}"
    own_signal = cell.fault == "drop" and must is None  # kernels signal their own rank too: then no peer is missing
    if not error.peers and not own_signal:
        yield "must name peers, got none"
    if error.op not in error.text:
        yield f"its text must say {error.op}: {error.text}"
    if error.epoch and not re.search(rf"\bround {error.epoch}\b", error.text):
        yield f"its text must say round {error.epoch}: {error.text}"
    if not all(re.search(rf"\b{peer}\b", error.text) for peer in error.peers):
        yield f"its text must say ranks {list(error.peers)}: {error.text}"


def _said(outcome: CallOutcome | None) -> str:
    if outcome is None:
        return "no call"
    return f"{outcome.kind} {outcome.error}: {outcome.text}" if outcome.text or outcome.error else outcome.kind
