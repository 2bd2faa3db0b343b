"""The parts of both halves in the order of their value, and which rows of docs/status.md they fill."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from fusedcomm.bench.gpu_check.driver import Part, PartResult

HALF_S = 380  # two halves, and their starts, fit into a quarter of an hour of a borrowed GPU
PATIENCE = {"cuda": 1, "cpu": 5}  # a rehearsal is slow, and measures nothing


def _part(name: str, module: str, limit_s: float, case_s: float, *arguments: str) -> Part:
    return Part(name, f"fusedcomm.bench.gpu_check.{module}", limit_s, case_s, arguments)


_MACHINE = _part("machine", "machine", 40, 30)
HALVES = {
    "right": [
        _MACHINE,
        _part("compile right", "compile_kernels", 90, 80, "right"),
        _part("processes", "processes", 130, 60, "2"),
        _part("queues", "processes", 80, 40, "queues"),
        _part("programs", "programs", 90, 60),
        _part("values", "virtual_ranks", 90, 30, "values"),
        _part("graphs", "virtual_ranks", 30, 20, "graphs"),
        _part("time-outs", "virtual_ranks", 40, 20, "time-outs"),
        _part("commands", "commands", 70, 60),
        _part("4 processes", "processes", 120, 60, "4"),
    ],
    "fast": [
        _MACHINE,
        _part("compile fast", "compile_kernels", 90, 80, "fast"),
        _part("kernel speed", "kernel_speed", 90, 30),
        _part("op speed", "op_speed", 60, 30, "ops"),
        _part("host time", "host_time", 100, 60),
        _part("start program", "op_speed", 60, 40, "start program"),
    ],
}
PARTS = list(dict.fromkeys(part for parts in HALVES.values() for part in parts))


def asked(names: Collection[str], device: str) -> list[Part]:
    """The parts of these names; the name of a half stands for all of its."""
    of_halves = {part.name for half in names if half in HALVES for part in HALVES[half]}
    times = PATIENCE[device]
    return [
        replace(part, limit_s=times * part.limit_s, case_s=times * part.case_s)
        for part in PARTS
        if part.name in {*names, *of_halves}
    ]


def budget_s(parts: Collection[Part], device: str) -> float:
    """The time of each half that has one of these parts, the machine's aside."""
    names = {part.name for part in parts}
    halves = sum(any(part.name in names for part in half[1:]) for half in HALVES.values())
    return PATIENCE[device] * HALF_S * max(1, halves)


@dataclass(frozen=True)
class Evidence:
    """The claim of a row of docs/status.md on GPUs once all cases that match ``cases`` ("part/case") have passed."""

    says: str
    cases: tuple[str, ...]


ROWS = {  # by the first cell of the row in the table "By part"
    "the five ops, `unfused`": Evidence(
        "right values of 2 and 4 processes on one GPU, over gloo",
        ("processes/2 ranks unfused*", "4 processes/4 ranks unfused*"),
    ),
    "the five ops, `chunked`": Evidence(
        "right values on one GPU: virtual ranks, and 2 and 4 processes",
        ("values/*chunked*", "processes/2 ranks chunked*", "4 processes/4 ranks chunked*"),
    ),
    "the five ops, `fused`": Evidence(
        "right values on one GPU: virtual ranks, and 2 and 4 processes",
        ("values/*fused*", "processes/2 ranks fused*", "4 processes/4 ranks fused*"),
    ),
    "a GPU's first call: the probe of Triton, torch's rendezvous with a bound, votes on TF32 and on ranks that share a "
    "GPU": Evidence(
        "first calls of 2 and 4 processes on one GPU succeed; no failure was provoked",
        ("processes/2 ranks planned*", "4 processes/4 ranks planned*"),
    ),
    "backward of the five ops": Evidence(
        "gradients of 2 and 4 processes on one GPU are near those of one process",
        ("processes/2 ranks backward*", "4 processes/4 ranks backward*"),
    ),
    "time-outs, mismatches, dead ranks, `reset`": Evidence(
        "on one GPU an absent and a killed rank are named in time, and `reset` works; mismatches never run",
        ("time-outs/*", "processes/2 ranks absent", "processes/2 ranks killed", "4 processes/4 ranks absent"),
    ),
    "parts of different sizes, forward and backward": Evidence(
        "right values and gradients of `chunked` in 2 processes on one GPU; `fused` never run",
        ("programs/uneven chunked",),
    ),
    "`fusedcomm.parallel`": Evidence(
        "an MLP, a Llama layer and training steps of 2 processes on one GPU are those of one process, by `chunked`",
        ("programs/parallel styles*", "programs/training"),
    ),
    "`torch.compile`, `fusedcomm explain`": Evidence(
        "the start program on 2 processes of one GPU: every exchange fused, forward and backward, right values",
        ("programs/compiled*",),
    ),
    "CUDA graphs": Evidence("replays of `fused` with new inputs on one GPU, virtual ranks", ("graphs/*",)),
    "what calls enqueue on GPUs: streams, events, memory, room for waiting kernels": Evidence(
        "2 processes on one GPU do not hang with 1, 8 and 32 hardware queues each", ("queues/*",)
    ),
    "`DeviceToHost`": Evidence("the tests of `DeviceToHost` that need a GPU pass", ("commands/DeviceToHost",)),
    "`fusedcomm doctor`, `selftest`": Evidence(
        "the doctor ran on one GPU; the selftest needs two, never run", ("commands/doctor",)
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
