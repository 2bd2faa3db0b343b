"""The parts in the order of their value, and which rows of docs/status.md they fill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.gpu_check.driver import Part, PartResult

BUDGET_S = 500  # a command on a borrowed GPU often has ten minutes


def _part(name: str, module: str, limit_s: float, case_s: float) -> Part:
    return Part(name, f"benchmarks.gpu_check.{module}", limit_s, case_s)


PARTS = [
    _part("machine", "machine", 40, 30),
    _part("compile", "compile_kernels", 120, 110),
    _part("smoke", "smoke", 60, 25),
    _part("kernel speed", "kernel_speed", 80, 30),
    _part("start program", "start_program", 50, 40),
    _part("measurements", "measurements", 50, 30),
    _part("values", "values", 100, 30),
    _part("graphs", "graphs", 50, 30),
    _part("time-outs", "time_outs", 60, 30),
    _part("processes", "processes", 180, 60),
    _part("op speed", "op_speed", 60, 30),
    _part("commands", "commands", 90, 60),
]


@dataclass(frozen=True)
class Evidence:
    """What a row of docs/status.md may say on GPUs once all cases that match ``cases`` ("part/case") have passed."""

    says: str
    cases: tuple[str, ...]


ROWS = {  # by the first cell of the row in the table "By part"
    "the five ops, `unfused`": Evidence(
        "right values of 2 and 4 processes on one GPU, over gloo",
        ("processes/* ranks unfused",),
    ),
    "the five ops, `chunked`": Evidence(
        "right values on one GPU: virtual ranks, and 2 and 4 processes",
        ("values/*chunked*", "processes/* ranks chunked"),
    ),
    "the five ops, `fused`": Evidence(
        "right values on one GPU: every kernel, virtual ranks, and 2 and 4 processes",
        ("smoke/*", "values/*fused*", "processes/* ranks fused"),
    ),
    "a GPU's first call: the probe of Triton, torch's rendezvous with a bound, votes on TF32 and on ranks that share a "
    "GPU": Evidence(
        "first calls of 2 and 4 processes on one GPU succeed; no failure was provoked",
        ("processes/* ranks planned",),
    ),
    "results in place, on GPUs (`FUSEDCOMM_RESULTS_BYTES`, off by default)": Evidence(
        "right values of virtual ranks on one GPU; nothing says how many chunks came in place but the JSON",
        ("values/*in place*",),
    ),
    "backward of the five ops": Evidence(
        "gradients of 2 and 4 processes on one GPU are near those of one process",
        ("processes/* ranks backward",),
    ),
    "time-outs, mismatches, dead ranks, `reset`": Evidence(
        "on one GPU an absent and a killed rank are named in time, and `reset` works; mismatches never run",
        ("time-outs/*", "processes/* ranks absent", "processes/2 ranks killed"),
    ),
    "CUDA graphs": Evidence(
        "replays of `fused` with new inputs on one GPU, virtual ranks",
        ("graphs/*",),
    ),
    "`fusedcomm bench all-to-all`, `DeviceToHost`": Evidence(
        "the tests of `DeviceToHost` that need a GPU pass; the bench never run",
        ("commands/DeviceToHost",),
    ),
    "`fusedcomm doctor`, `selftest`": Evidence(
        "the doctor ran on one GPU; the selftest needs two, never run",
        ("commands/doctor",),
    ),
}


def proved(evidence: Evidence, results: Sequence[PartResult]) -> bool:
    """Whether each pattern has a case, and all cases of all patterns have passed; a skipped one has not."""
    outcomes = list(_outcomes(results))
    matched = [[ok for name, ok in outcomes if fnmatchcase(name, pattern)] for pattern in evidence.cases]
    return all(each and all(each) for each in matched)


def _outcomes(results: Sequence[PartResult]) -> Iterator[tuple[str, bool]]:
    for result in results:
        for name in {**dict.fromkeys(result.names), **dict.fromkeys(result.cases)}:
            case = result.cases.get(name)
            yield f"{result.part}/{name}", case is not None and case["ok"] and "skipped" not in case
