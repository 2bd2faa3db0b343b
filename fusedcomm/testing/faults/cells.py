"""The matrix: which fault at which step of which op's call, by which algorithm, and what must come of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.testing.faults.protocol_steps import CHUNKED, FIRST, GROWTH, IN_PLACE
from fusedcomm.testing.faults.tape_steps import IN_RESULTS, SLOTS, WAIT

OPS = tuple(PROGRAMS)
PUSHES = ("matmul_all_to_all", "matmul_reduce_scatter", "matmul_all_reduce")
TIMEOUT_S = {  # where a fault ends in an error; the interpreter is slow
    "unfused": 4.0,
    "chunked": 4.0,
    "fused": 8.0,
    "pipelined": 4.0,
}
HARMLESS_S = 12.0  # ends before ranks give up on meeting, where a control lets a harmless fault do harm
MEET_S = 30.0  # bound of waits that must succeed, however busy the machine

HARMLESS = ("delay", "pause", "gc", "repeat", "fork", "threads")  # all results must be right
CALLS = ("another-op", "another-shape", "another-dtype", "one-more", "one-fewer")  # what the victim calls instead
MISMATCHES = CALLS[:3]
STOPS = ("pause", "stop", "kill")  # the parent process lets the victim go on, or kills it
RAISES = ("raise", "interrupt", "memory")  # the victim leaves its call
UNEVEN, PREPARED = "-uneven", "-prepared"  # behind the op, in a cell's name
FIRST_CALL, LATER_CALL, CALL = "first-call", "later-call", "call"


@dataclass(frozen=True)
class Cell:
    """One rank of a group, the victim, meets ``fault`` at ``step`` of a call."""

    algorithm: str
    op: str
    fault: str
    step: str
    uneven: bool = False  # ranks have parts of different sizes
    prepared: bool = False  # the call is on a tape, in all ranks

    def __str__(self) -> str:
        op = f"{self.op}{UNEVEN * self.uneven}{PREPARED * self.prepared}"
        return f"{self.algorithm}/{op}/{self.fault}/{self.step}"

    @property
    def kind(self) -> tuple[str, bool, bool]:
        return self.algorithm, self.uneven, self.prepared

    @property
    def parts(self) -> set[str]:
        return {f"op {self.op}", f"fault {self.fault}"} | (set() if self.uneven else {f"step {self.step}"})

    @property
    def group_size(self) -> int:
        return 2 if self.algorithm == "fused" else 3

    @property
    def victim(self) -> int:
        """The victim's rank in the group."""
        return self.group_size - 1

    @property
    def timeout_s(self) -> float:
        return HARMLESS_S if self.harmless else TIMEOUT_S[self.algorithm]

    @property
    def harmless(self) -> bool:
        return self.fault in HARMLESS or self.no_workspace

    @property
    def no_workspace(self) -> bool:
        """Whether a rank cannot make its memory, so that all ranks run unfused until a reset."""
        return self.fault == "memory" and self.step != "result"

    @property
    def by_group(self) -> bool:
        """Whether ranks exchange by the group's own collectives, and errors are the backend's."""
        return self.algorithm in ("unfused", "pipelined")

    @property
    def first_call(self) -> bool:
        """Whether the group has not come together before."""
        return self.step in FIRST or self.step == FIRST_CALL

    @property
    def grows(self) -> bool:
        return self.step in GROWTH

    @property
    def in_place(self) -> bool:
        """Whether peers write results in place. Elsewhere all chunks go through slots."""
        if self.prepared:
            return self.algorithm == "chunked" and self.step not in SLOTS
        return self.step in IN_PLACE

    @property
    def num_calls(self) -> int:
        """How many calls each rank makes, from the faulty one on."""
        if self.harmless:
            return 4  # both slots are used again
        return 1 if self.by_group else 2  # gloo's groups are of no use after an error

    @property
    def recovers(self) -> bool:
        """Whether all ranks live, in a group that can be used again."""
        return self.fault != "kill" and (self.harmless or not self.by_group)

    @property
    def stops_peers(self) -> bool:
        """Whether the peers cannot complete the call either, because not all of the victim's signals are sent."""
        if self.fault in ("drop", "one-more"):
            return False
        if self.op == "matmul_all_reduce":  # the second round is still to come
            return self.step != "launch-unpack"
        return self.step not in ("wait", "read", "end", "launch-reduce", "launch-unpack", "launch-gather_matmul")


def _launches(op: str) -> tuple[str, ...]:
    return {
        "matmul_all_to_all": ("launch-push", "launch-unpack"),
        "matmul_reduce_scatter": ("launch-push", "launch-reduce"),
        "matmul_all_reduce": ("launch-push", "launch-reduce", "launch-pack", "launch-unpack"),
    }.get(op, ("launch-pack", "launch-gather_matmul"))


def _chunked(op: str) -> Iterator[tuple[str, str]]:
    in_place = () if op == "matmul_reduce_scatter" else IN_PLACE  # sums are made of slots
    for step in (*CHUNKED, *in_place, *FIRST, *GROWTH):
        for fault in ("delay", "gc", "pause", "stop", "kill", "raise", "interrupt"):
            yield fault, step
    for step in ("result", "allocate", "grow-allocate"):
        yield "memory", step
    yield "threads", "same-group"
    yield "threads", "other-group"
    yield from _both(op)


def _fused(op: str) -> Iterator[tuple[str, str]]:
    for step in ("enter", *_launches(op), "end"):
        for fault in ("delay", "gc", "stop", "kill", "raise", "interrupt"):
            yield fault, step
    for step in ("signal", "wait"):  # in the kernels: nothing raises there
        for fault in ("delay", "pause", "stop", "kill"):
            yield fault, step
    yield "memory", "result"
    yield from _both(op)


def _both(op: str) -> Iterator[tuple[str, str]]:
    yield "drop", "signal"
    yield "repeat", "signal"
    yield "fork", "enter"
    for fault in CALLS:
        yield fault, LATER_CALL
    for fault in ("another-op", "another-shape", "one-fewer"):
        yield fault, FIRST_CALL


def _by_group(op: str) -> Iterator[tuple[str, str]]:
    for fault in ("delay", "pause", "gc", "kill", "raise"):
        yield fault, CALL


def _uneven(op: str) -> Iterator[tuple[str, str]]:
    for step in (*CHUNKED, *(() if op == "matmul_reduce_scatter" else IN_PLACE)):
        for fault in ("delay", "kill", "raise"):
            yield fault, step
    yield "drop", "signal"
    yield "another-shape", LATER_CALL


def _prepared(op: str) -> Iterator[tuple[str, str]]:
    # The second round of an all_reduce has the same code in place, and when it begins is not known from outside.
    in_place = () if op in ("matmul_reduce_scatter", "matmul_all_reduce") else IN_RESULTS
    for step in (CALL, *SLOTS, *in_place, WAIT):
        for fault in ("delay", "gc", "pause", "stop", "kill", "raise", "interrupt"):
            yield fault, step
    yield "fork", CALL
    yield "threads", "same-group"
    yield "threads", "other-group"
    for fault in CALLS:
        yield fault, LATER_CALL


CELLS = (
    *(
        Cell(algorithm, op, fault, step)
        for algorithm, pairs in (
            ("chunked", _chunked),
            ("fused", _fused),
            ("unfused", _by_group),
            ("pipelined", _by_group),
        )
        for op in OPS
        for fault, step in pairs(op)
    ),
    *(
        Cell("chunked", op, fault, step, uneven=True)
        for op in OPS
        if op != "matmul_all_reduce"
        for fault, step in _uneven(op)
    ),
    *(
        Cell(algorithm, op, fault, step, prepared=True)
        for algorithm, pairs in (("chunked", _prepared), ("unfused", _by_group))
        for op in OPS
        for fault, step in pairs(op)
    ),
)


def select(patterns: Sequence[str] = (), quick: bool = False) -> list[Cell]:
    """Cells that match one of ``patterns``, as the shell has them, for a whole name or for successive whole parts of
    it.

    ``quick``: a slice of these cells.
    """
    chosen = [cell for cell in CELLS if not patterns or any(fnmatchcase(f"/{cell}/", f"*/{p}/*") for p in patterns)]
    return _slice(chosen) if quick else chosen


def _slice(cells: Sequence[Cell]) -> list[Cell]:
    """A few cells that have every fault, step and op of each algorithm, and of its prepared calls, and every fault and
    op of uneven calls.
    """
    chosen: list[Cell] = []
    for kind in dict.fromkeys(cell.kind for cell in cells):
        here = [cell for cell in cells if cell.kind == kind]
        left = {part for cell in here for part in cell.parts}
        while left:
            best = max(here, key=lambda cell: len(left & cell.parts))
            chosen.append(best)
            left -= best.parts
            turn = len(here) // len(OPS)  # the next op first
            here = here[turn:] + here[:turn]
    return chosen
