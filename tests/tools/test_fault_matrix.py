"""Faults in ranks (tests.faults): a slice of the matrix, controls that must fail, and the command."""

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.cells import CELLS, Cell, select
from tests.faults.controls import CONTROLS, NO_DEADLINE, off_in_its_cell
from tests.faults.judge import OTHER_ERROR, PEER_ERROR, RIGHT, SLACK_S, WRONG, CallOutcome, RankReport, Verdict, judge
from tests.faults.known_calls import COMBINE, DISPATCH, NORMS, PRODUCTS, SCALED
from tests.faults.matrix import run_cells
from tests.helpers.problems import OPS

pytestmark = pytest.mark.timeout(900)  # the fixture runs all cells of the slice

SLICE = select(
    (  # every fault, op and kind of call, together with the controls; nightly runs all cells
        "fused/matmul_all_to_all/kill/wait",  # in Triton's interpreter
        "fused/matmul_all_reduce_norm/stop/launch-pack",
        "chunked/matmul_reduce_scatter_norm/raise/read",
        "chunked/scaled_all_gather_matmul/raise/read",
        "chunked/moe_dispatch/kill/rows",
        "fused/moe_combine/stop/launch-return_rows",
        "fused/grouped_matmul_combine/stop/launch-grouped_matmul",
        "unfused/matmul_reduce_scatter/kill/call",
        "pipelined/all_gather_matmul/raise/call",
        "chunked/all_gather_matmul/drop/signal",
        "chunked/all_to_all_matmul/another-op/later-call",
        "chunked/all_to_all_matmul/repeat/signal",
        "chunked/matmul_all_reduce/memory/grow-allocate",
        "chunked/matmul_all_reduce/one-fewer/first-call",
        "chunked/matmul_all_to_all/one-more/later-call",
        "chunked/matmul_reduce_scatter/interrupt/vote",
        "chunked/matmul_reduce_scatter/another-shape/first-call",
        "chunked/matmul_all_reduce-prepared/pause/signal",
        "chunked/all_to_all_matmul-prepared/kill/push",
    )
)
WORKERS = 4  # for CI's two cores: cells mostly wait, and starting more ranks costs more than it saves


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """The verdicts of the slice, and of the controls with their protections off, in the same ranks."""
    cells = [*SLICE, *(control.cell for control in CONTROLS.values())]
    return {each.cell: each for each in run_cells(cells, workers=WORKERS, around=off_in_its_cell)}


@pytest.mark.thorough
@pytest.mark.parametrize("cell", SLICE, ids=str)
def test_a_fault_gives_errors_in_time_and_no_wrong_number(verdicts: dict[str, Verdict], cell: Cell) -> None:
    assert verdicts[str(cell)].survived, "\n".join(verdicts[str(cell)].found)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CONTROLS)
def test_a_protection_that_is_off_is_missed(verdicts: dict[str, Verdict], name: str) -> None:
    verdict = verdicts[name]
    assert not verdict.survived
    assert CONTROLS[name].found in "\n".join(verdict.found)


def test_the_slice_has_every_fault_op_and_kind_of_call() -> None:
    covered = [*SLICE, *(control.cell for control in CONTROLS.values())]
    for part in ("fault", "op"):
        assert {getattr(cell, part) for cell in CELLS} == {getattr(cell, part) for cell in covered}
    kinds, tried = ({(cell.algorithm, cell.prepared) for cell in cells} for cells in (CELLS, covered))
    assert kinds == tried


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(15))
def test_the_whole_matrix(part: int) -> None:
    failed = [verdict for verdict in run_cells(CELLS[part::15]) if not verdict.survived]
    assert not failed, "\n".join(f"{verdict.cell}: {text}" for verdict in failed for text in verdict.found)


def test_a_cell_is_found_by_its_name_alone() -> None:
    assert len(CELLS) >= 300 and {cell.op for cell in CELLS} == {*OPS, *NORMS, SCALED, DISPATCH, COMBINE, PRODUCTS}
    assert [cells for cell in CELLS[::10] if (cells := select([str(cell)])) != [cell]] == []


TIMED_OUT = CallOutcome(
    PEER_ERROR,
    "matmul_all_to_all on group '1', rank 0, round 2: ranks [2] did not signal within 2 s",
    error="PeerTimeoutError",
    op="matmul_all_to_all",
    epoch=2,
    peers=(2,),
    called="matmul_all_to_all",
    epoch_before=1,
    seconds=2.0,
)
KILLED = Cell("chunked", "matmul_all_to_all", "kill", "push")
NOT_OURS = CallOutcome(OTHER_ERROR, "unhashable", error="TypeError", index=1)
CLOSED = CallOutcome(PEER_ERROR, peers=(2,))
REPORT = RankReport(0, [TIMED_OUT], reached=True, after=CLOSED)


def killed(report: RankReport = REPORT) -> Verdict:
    return judge(KILLED, {0: report, 1: replace(REPORT, rank=1)})


def test_what_is_promised_survives() -> None:
    assert killed().survived, killed().found
    assert killed().worst == 2.0 / KILLED.timeout_s


BROKEN_PROMISES: list[tuple[str, dict[str, Any]]] = [
    ("must raise PeerTimeoutError", {"error": "PeerMismatchError"}),
    ("must raise PeerTimeoutError", {"kind": OTHER_ERROR, "error": "RuntimeError"}),
    ("must raise nothing but a PeerError", {"kind": OTHER_ERROR, "error": "TypeError"}),
    ("must name rank 2 alone", {"peers": (1,)}),
    ("must name rank 2 alone", {"peers": (1, 2), "text": TIMED_OUT.text.replace("[2]", "[1, 2]")}),
    ("its op must be", {"op": "matmul_all_reduce"}),
    ("its epoch must be in", {"epoch": 1}),
    ("its text must say round", {"text": TIMED_OUT.text.replace("round 2", "round 3")}),
    ("its text must say ranks", {"peers": (7,)}),
    ("call 0 must end within", {"seconds": KILLED.timeout_s + SLACK_S + 1}),
    ("not in the next one", {"index": 1}),
    ("is wrong", {"kind": WRONG}),
    ("all calls were right", {"kind": RIGHT}),
]


@pytest.mark.parametrize("found, change", BROKEN_PROMISES, ids=lambda value: str(value)[:40])
def test_a_broken_promise_is_found(found: str, change: dict[str, Any]) -> None:
    verdict = killed(replace(REPORT, outcomes=[replace(TIMED_OUT, **change)]))
    assert not verdict.survived
    assert found in "\n".join(verdict.found)
    assert verdict.wrong_numbers == (change.get("kind") == WRONG)


@pytest.mark.parametrize(
    "found, report",
    [
        ("a segment", replace(REPORT, memory=["a segment has changed"])),
        ("was not reached", replace(REPORT, reached=False)),
        ("close must name", replace(REPORT, after=replace(CLOSED, peers=(1,)))),
        ("close must end within", replace(REPORT, after=replace(CLOSED, seconds=60.0))),
        ("close must end with an error", replace(REPORT, after=None)),
        ("close must end with an error", replace(REPORT, after=CallOutcome(RIGHT))),
        ("call 1 must raise nothing but", replace(REPORT, outcomes=[TIMED_OUT, NOT_OURS])),
        ("call 1 must end within", replace(REPORT, outcomes=[TIMED_OUT, replace(TIMED_OUT, index=1, seconds=500.0)])),
        ("call 1 must raise: call 0 has failed", replace(REPORT, outcomes=[TIMED_OUT, CallOutcome(RIGHT, index=1)])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_call_leaves_behind_is_judged(found: str, report: RankReport) -> None:
    assert found in "\n".join(killed(report).found)


def test_a_rank_that_does_not_report_is_missed() -> None:
    assert "must report" in judge(KILLED, {0: REPORT}).found[0]


@pytest.mark.nightly
def test_a_cell_without_a_deadline_hangs() -> None:
    (verdict,) = run_cells([NO_DEADLINE.cell], around=off_in_its_cell, cell_s=20)
    assert verdict.hung
    assert not verdict.survived
