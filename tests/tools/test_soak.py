"""Random programs of fused calls: 300 calls in CI, minutes in `make nightly`; and that they notice what is wrong."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fusedcomm.launch.ranks import RankError, RankPool
from tests.helpers import soak_faults
from tests.helpers.soak_faults import run_without
from tests.soak import soak_ranks
from tests.soak.__main__ import main
from tests.soak.outcome import SoakOutcome
from tests.soak.random_call import OPS

pytestmark = pytest.mark.thorough

SEED = 2026
CONTROL_STEPS = 40  # calls of a program without a protection
SEEDS = {2: 1, 4: 322}  # by the number of ranks


def test_random_calls(shared_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seeds are of programs that have everything that is drawn; `make nightly` runs others."""
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
    assert set(counts["group"]) == {"world", "new_group", "outer", "inner"}
    assert set(counts["ranks"]) == {"1", "2", "3", "4"}
    assert set(counts["action"]) == {"call", "reset", "close", "remake", "collect"}
    assert min(counts["workspace"][what] for what in ("growths", "calls of several rounds")) >= 2
    assert counts["workspace"]["rounds"] > counts["algorithm"]["chunked"]


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
