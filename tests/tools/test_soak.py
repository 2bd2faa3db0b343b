"""Random programs of fused calls: 300 calls in CI, 100,000 in `make nightly`; and that they notice what is wrong."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fusedcomm.launch.ranks import RankError, RankPool
from tests.helpers import soak_faults
from tests.helpers.soak_faults import run_without
from tests.soak import soak_ranks, uneven_call
from tests.soak.__main__ import main
from tests.soak.known_values import KnownValues
from tests.soak.outcome import SoakOutcome
from tests.soak.random_call import OPS, draw
from tests.soak.random_program import draw_program
from tests.soak.uneven_call import UnevenValues

pytestmark = pytest.mark.thorough

SEED = 2026
CONTROL_STEPS = 40  # calls of a program without a protection
SEEDS = {2: 1, 4: 322}  # by the number of ranks


def test_random_calls(shared_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seeds are of programs that have everything that is drawn; `make nightly` runs 100,000 calls."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for num_ranks, seed in SEEDS.items():
        file = tmp_path / "soak.json"
        options = ["--calls", "150", "--ranks", str(num_ranks), "--seed", str(seed), "--device", "cpu"]
        assert main([*options, "--json", str(file)]) == 0, capsys.readouterr().out
        assert f"seed {seed}: 150 calls in {num_ranks} ranks" in capsys.readouterr().out
        report = json.loads(file.read_text())
        assert (report["seed"], report["programs"], report["failures"]) == (seed, 1, [])
        assert report["calls"] == sum(report["counts"]["op"].values()) >= 150
        assert {"command", "date", "versions"} <= set(report)
        for what, found in report["counts"].items():
            counts[what].update(found)
    assert set(counts["op"]) == set(OPS)
    assert set(counts["dtype"]) == {"float32", "float16", "bfloat16"}
    assert set(counts["algorithm"]) == {"unfused", "chunked", "fused"}
    assert set(counts["use"]) == {"forward", "backward", "out"}
    assert min(counts["parts"][what] for what in ("of one size", "drawn")) >= 50
    assert set(counts["group"]) == {"world", "new_group", "outer", "inner"}
    assert set(counts["ranks"]) == {"1", "2", "3", "4"}
    assert set(counts["action"]) == {"call", "reset", "close", "remake", "collect"}
    assert min(counts["workspace"][what] for what in ("growths", "calls of several rounds", "chunks in place")) >= 2
    assert counts["workspace"]["rounds"] > counts["algorithm"]["chunked"]


def test_no_call_outlasts_the_time_out_of_those_that_wait_for_its_ranks() -> None:
    """Step 4 of this program once had 190,800 rows in slots of 2 KiB: minutes, while rank 2 waited for step 5."""
    program = draw_program(26, 327, 4, "cpu")
    capped = [call for step in program.steps for call in step.calls if call.group.workspace_bytes]
    assert max(call.case.num_bytes / call.group.workspace_bytes for call in capped) <= 1000
    assert any(call.case.num_bytes > 10 * call.group.workspace_bytes for call in capped)


# Negative controls: the same programs without a protection.


@pytest.fixture(scope="module")
def unprotected() -> Iterator[Callable[..., SoakOutcome]]:
    """Run the first steps of a program with ``run_without``, in two ranks that nobody else has."""
    pools: list[RankPool] = []

    def run(fault: Callable[[], Any], index: int, wait_s: int) -> SoakOutcome:
        if not pools or pools[-1].dead:
            pools.append(RankPool(2))
        try:
            outcome: SoakOutcome = pools[-1].run(run_without, fault, SEED, index, range(CONTROL_STEPS), wait_s)[0]
        except RankError:  # hangs are no wrong values
            return SoakOutcome(broken=True)
        if outcome.broken:
            pools[-1].close()
        return outcome

    yield run
    for pool in pools:
        pool.close()


SLOW_FAULTS = (
    soak_faults.one_slot,
    soak_faults.no_waits,
    soak_faults.plans_without_waits,
    soak_faults.plans_without_long_waits,
)


@pytest.mark.parametrize(
    "fault",
    [
        soak_faults.signal_before_data,
        soak_faults.late_reads,
        *(pytest.param(fault, marks=pytest.mark.nightly) for fault in SLOW_FAULTS),
    ],
    ids=lambda fault: fault.__name__,
)
def test_a_missing_protection_gives_wrong_values(unprotected: Callable[..., SoakOutcome], fault: Any) -> None:
    """The wrong values come within a bounded number of calls."""
    outcomes = (unprotected(fault, index, wait_s=5) for index in range(10))
    assert any("elements, first at" in failure.what for outcome in outcomes for failure in outcome.failures)


def test_late_reads_that_signals_wait_for_are_right(unprotected: Callable[..., SoakOutcome]) -> None:
    """If they were wrong, the control above could fail by how reads are made late, and not by their being late."""
    outcome = unprotected(soak_faults.late_reads_joined, 0, wait_s=90)
    assert outcome.num_calls >= CONTROL_STEPS // 2
    assert outcome.failures == []


# The command.


def run_spoiled(
    rank: int, seed: int, index: int, device_type: str, steps: Sequence[int] | None, deadline: float
) -> SoakOutcome:
    return run_without(rank, soak_faults.wrong_element, seed, index, steps)


@pytest.mark.nightly
def test_a_failure_is_told_and_can_be_had_again(
    shared_ranks: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak_ranks, "run_program", run_spoiled)
    start = ["--ranks", "2", "--device", "cpu", "--seed", "5"]
    assert main([*start, "--calls", "1000"]) == 1
    told = capsys.readouterr().out
    assert "result 0: 1 of" in told
    (again,) = [line for line in told.splitlines() if line.startswith("again:")]
    step, program = told.partition("rank 1: step ")[2].split(":")[0], again.split()[-1]
    assert main([*start, "--program", program, "--steps", step]) == 1  # it has the inputs that it had among the others
    assert f"step {step}: matmul_reduce_scatter(float16" in capsys.readouterr().out


# What is drawn.


def test_every_case_is_exact_and_has_the_shapes_that_it_says() -> None:
    random, dtypes = Random(SEED), set()
    for seed in range(400):
        group_size = random.randint(1, 4)
        case = draw(random, group_size)
        outs = KnownValues(case, seed).expected(rank=seed % group_size)  # asserts that nothing was rounded
        shapes = case.shapes[2]
        assert [list(out.shape) for out in outs[: len(shapes)]] == shapes
        assert len(outs) > len(shapes) or case.use != "backward"
        assert {out.dtype for out in outs} == {case.dtype}
        dtypes.add(case.dtype)
    assert len(dtypes) == 3


def test_drawn_parts_are_exact_and_differ() -> None:
    random, uses = Random(SEED), set()
    for seed in range(50):
        case = uneven_call.draw(random, random.randint(1, 4))
        for rank in range(case.group_size):
            outs = UnevenValues(case, seed).expected(rank)  # asserts that nothing was rounded
            assert {out.dtype for out in outs} == {case.dtype}
        uses.add((case.op, case.use, case.dtype))
    assert {dtype for _, use, dtype in uses if use == "forward"} == {torch.float32, torch.float16, torch.bfloat16}
    assert len({op for op, _, _ in uses}) == 4


def test_programs_are_repeatable_and_their_inputs_are_not() -> None:
    programs = [draw_program(SEED, index, 4, "cpu") for index in range(3)]
    assert programs == [draw_program(SEED, index, 4, "cpu") for index in range(3)]
    seeds = [call.seed for program in programs for step in program.steps for call in step.calls]
    assert len(set(seeds)) == len(seeds) > 500
