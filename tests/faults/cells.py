"""The matrix: which fault at which step of which op's call, by which algorithm."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.faults import prepared_calls
from tests.faults.known_calls import COMBINE, DISPATCH, NORMS, PRODUCTS, SCALED
from tests.faults.steps import CALL, CALLS, CHUNKED, FIRST, FIRST_CALL, GROWTH, LATER_CALL, ROWS, STOPPING
from tests.helpers.problems import OPS

TIMEOUT_S = {"unfused": 4.0, "chunked": 4.0, "fused": 8.0, "pipelined": 4.0}  # Triton's interpreter is slow
HARMLESS_S = 12.0  # ends before ranks give up on meeting, where a control lets a harmless fault do harm
MEET_S = 30.0  # bound of waits that must succeed, however busy the machine
HARMLESS = ("delay", "pause", "gc", "repeat")  # all results must be right


@dataclass(frozen=True)
class Cell:
    """One rank of a group, the victim, meets ``fault`` at ``step`` of a call."""

    algorithm: str
    op: str
    fault: str
    step: str
    prepared: bool = False  # in all ranks

    def __str__(self) -> str:
        return f"{self.algorithm}/{self.op}{'-prepared' * self.prepared}/{self.fault}/{self.step}"

    @property
    def group_size(self) -> int:
        return 2 if self.algorithm == "fused" else 3

    @property
    def victim(self) -> int:
        return self.group_size - 1

    @property
    def timeout_s(self) -> float:
        return HARMLESS_S if self.harmless else TIMEOUT_S[self.algorithm]

    @property
    def harmless(self) -> bool:
        """``memory`` elsewhere than at ``result`` makes all ranks run unfused until a reset."""
        return self.fault in HARMLESS or (self.fault == "memory" and self.step != "result")

    @property
    def by_group(self) -> bool:
        """Whether ranks exchange by the group's own collectives, so that errors are the backend's."""
        return self.algorithm in ("unfused", "pipelined")

    @property
    def first_call(self) -> bool:
        return self.step in FIRST or self.step == FIRST_CALL

    @property
    def grows(self) -> bool:
        return self.step in GROWTH

    @property
    def num_calls(self) -> int:
        if self.harmless:
            return 4  # both slots are used again
        return 1 if self.by_group else 2  # gloo's groups are of no use after an error

    @property
    def recovers(self) -> bool:
        return self.fault != "kill" and (self.harmless or not self.by_group)

    @property
    def stops_peers(self) -> bool:
        """Whether the peers cannot complete the call either, because not all of the victim's signals are sent."""
        if self.fault in ("drop", "one-more"):
            return False
        if self.op == "matmul_all_reduce":  # the second round is still to come
            return self.step != "launch-unpack"
        if self.op == DISPATCH:  # so is the second piece
            return True
        receives = (f"launch-{each}" for each in ("reduce", "reduce_norm", "unpack", "gather_matmul", "add_rows"))
        return self.step not in ("wait", "read", "rows", "end", *receives)


def _chunked(op: str) -> Iterator[tuple[str, str]]:
    for step in (*CHUNKED, *FIRST, *GROWTH):
        for fault in STOPPING:
            yield fault, step
    for step in ("allocate", "grow-allocate"):
        yield "memory", step
    yield from _of_signals_and_calls()


def _fused(op: str) -> Iterator[tuple[str, str]]:
    launches = {
        "matmul_all_to_all": ("launch-push", "launch-unpack"),
        "matmul_reduce_scatter": ("launch-pack", "launch-reduce"),
        "matmul_all_reduce": ("launch-push", "launch-reduce", "launch-pack", "launch-unpack"),
    }.get(op, ("launch-pack", "launch-gather_matmul"))
    for step in ("enter", *launches, "end"):
        for fault in STOPPING:
            if fault != "pause":  # before a launch the same as a delay
                yield fault, step
    for step in ("signal", "wait"):  # in the kernels: nothing raises there
        for fault in ("delay", "pause", "stop", "kill"):
            yield fault, step
    yield from _of_signals_and_calls()


def _of_signals_and_calls() -> Iterator[tuple[str, str]]:
    yield "memory", "result"
    yield "drop", "signal"
    yield "repeat", "signal"
    for fault in CALLS:
        yield fault, LATER_CALL
    for fault in ("another-op", "another-shape", "one-fewer"):
        yield fault, FIRST_CALL


def _by_group(op: str) -> Iterator[tuple[str, str]]:
    for fault in ("delay", "pause", "gc", "kill", "raise"):
        yield fault, CALL


_PAIRS = (
    ("chunked", _chunked, False),
    ("fused", _fused, False),
    ("unfused", _by_group, False),
    ("pipelined", _by_group, False),
    ("chunked", prepared_calls.faults_and_steps, True),
)
_OF_PIECES = ("send_rows", "take_rows", "experts_matmul")
_OF_ROWS = ("enter", "signal", "wait", *ROWS, "end")
_OTHERS: dict[str, dict[str, Iterable[str]]] = {  # steps of ops that share the protocol of the five
    **{op: {"chunked": CHUNKED, "fused": ("launch-pack", "launch-reduce_norm", "end")} for op in NORMS},
    SCALED: {"chunked": CHUNKED, "fused": ("launch-pack", "launch-gather_matmul", "end")},
    DISPATCH: {"chunked": _OF_ROWS, "fused": ("launch-pack", *(f"launch-{each}" for each in _OF_PIECES))},
    COMBINE: {"chunked": _OF_ROWS, "fused": ("launch-return_rows", "launch-add_rows")},
    PRODUCTS: {"fused": ("launch-grouped_matmul",)},
}
CELLS = (
    *(
        Cell(algorithm, op, fault, step, prepared)
        for algorithm, pairs, prepared in _PAIRS
        for op in OPS
        for fault, step in pairs(op)
    ),
    *(
        Cell(algorithm, op, fault, step)
        for op, steps in _OTHERS.items()
        for algorithm in steps
        for step in steps[algorithm]
        for fault in STOPPING
    ),
)


def select(patterns: Sequence[str] = ()) -> list[Cell]:
    """The cells of which the whole name, or successive whole parts of it, match one of the shell's ``patterns``."""
    return [cell for cell in CELLS if not patterns or any(fnmatchcase(f"/{cell}/", f"*/{p}/*") for p in patterns)]
