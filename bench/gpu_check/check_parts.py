"""The parts of both halves, in the order of their value."""

from collections.abc import Collection
from dataclasses import replace

from fusedcomm.bench.gpu_check.driver import Part

HALF_S = 380  # two halves, and their starts, fit into a quarter of an hour of a borrowed GPU
PATIENCE = {"cuda": 1, "cpu": 5}  # a rehearsal is slow, and measures nothing


def _part(name: str, module: str, limit_s: float, case_s: float, *arguments: str) -> Part:
    return Part(name, "fusedcomm.bench.gpu_check.child", limit_s, case_s, (module, *arguments))


_MACHINE = _part("machine", "machine", 40, 30)
HALVES = {
    "right": [
        _MACHINE,
        _part("compile right", "compile_kernels", 90, 80, "right"),
        _part("processes", "processes", 130, 60, "2"),
        _part("queues", "processes", 80, 40, "queues"),
        _part("captured", "captured", 60, 40),
        _part("programs", "programs", 90, 60),
        _part("values", "virtual_ranks", 90, 30, "values"),
        *(_part(f"problems R={size}", "problems", 100, 30, str(size)) for size in (2, 4)),
        _part("graphs", "virtual_ranks", 30, 20, "graphs"),
        _part("time-outs", "virtual_ranks", 40, 20, "time-outs"),
        _part("moe", "moe_calls", 90, 50, "values"),
        _part("commands", "commands", 70, 60),
        _part("4 processes", "processes", 120, 60, "4"),
    ],
    "fast": [
        _MACHINE,
        _part("compile fast", "compile_kernels", 90, 80, "fast"),
        _part("kernel speed", "kernel_speed", 90, 30),
        _part("host time", "host_time", 100, 60),
        _part("scaled", "scaled", 60, 30),
        _part("moe speed", "moe_calls", 40, 30, "speed"),
        _part("op speed", "op_speed", 60, 30, "ops"),
        _part("tail speed", "tail_speed", 30, 20),
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
