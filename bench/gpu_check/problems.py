"""Problems of a proof before use, larger, on virtual ranks: every op, its collective alone, norms, float8 scales.

The argument: the number of ranks. They wait for each other on a GPU alone: on a CPU there is one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import ALGORITHMS, FINGERPRINT
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops import proof
from fusedcomm.ops.whole_group import PROGRAMS, MatmulSize, WholeGroup
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.planner import Plan

SIZES = MatmulSize(250, 128, 1048), MatmulSize(37, 29, 31)  # K: sums are exact
SMALL = MatmulSize(6, 16, 10)  # for Triton's interpreter
GROUP_SIZES = (2, 4)
TIMES = 3


class Case(NamedTuple):
    """Calls of a program in one of the forms of a proof, with fresh inputs each time."""

    group_size: int
    program: WholeGroup
    form: str
    size: MatmulSize
    algorithm: str

    def __str__(self) -> str:
        size = f"{self.size.rows} x {self.size.k} x {self.size.n}"
        return f"{self.program.op}{self.form} {size} R={self.group_size} {self.algorithm}"

    @property
    def dtype(self) -> torch.dtype:
        """The payload's."""
        is_scaled = self.form in ("_scaled", "_tensor_wise")
        return torch.uint8 if is_scaled and self.program.gathers else torch.bfloat16

    def problem(self, seed: int) -> proof.Problem:
        return proof.problem_of(self.program, self.size, self.group_size, self.form, seed=seed)

    def calls(self, problem: proof.Problem, rank: int, device: torch.device) -> list[proof.Call]:
        return proof.calls_of(problem, rank, self.dtype, device, f"virtual {self.group_size}")

    def run(self, workspace: Workspace, calls: list[proof.Call]) -> list[Tensor]:
        return [t for call in calls for t in call.run(workspace, self._plan).returned]

    def group(self, device: torch.device) -> VirtualGroup:
        """A group that has run the calls once, on each rank."""
        problem = self.problem(0)
        two_rounds = 2 * proof.slot_bytes(problem, torch.bfloat16)  # loading stops in a third one, which would wait
        made = VirtualGroup(self.group_size, max(128, two_rounds), device)
        for call in self.calls(problem, 0, device):
            made.load(partial(self.run, calls=[call]), FINGERPRINT)
        return made

    def check(self, device: torch.device) -> dict[str, Any]:
        group = self.group(device)
        for seed in range(TIMES):
            problem = self.problem(seed)
            calls = [self.calls(problem, rank, device) for rank in range(self.group_size)]
            found = group.run(self.run, calls)
            group.check(str(self))
            for rank, results in enumerate(found):
                wrong = proof.wrong_values(proof.pairs([(problem, results)], rank, self.dtype))
                assert not wrong, f"{self} rank {rank} seed {seed} {wrong}"
        return {"calls": TIMES * len(calls[0]) * self.group_size}

    def _plan(self, op: str, exchange: Exchange) -> Plan:
        return Plan(op, self.algorithm, "gpu_check", fingerprint=FINGERPRINT, exchange=exchange)


def every(group_size: int, cuda: bool) -> Iterator[Case]:
    for program in PROGRAMS.values():
        for form in ("", "_scaled", "_tensor_wise", "_norm")[: 3 + ("reduce" in program.kind)]:
            for algorithm in reversed(ALGORITHMS):
                for size in SIZES[: 1 + ((group_size, algorithm) == (2, "fused"))] if cuda else (SMALL,):
                    yield Case(group_size, program, form, size, algorithm)


def jobs() -> Iterator[tuple[str, Any]]:
    """The launches of `fused`, on tensors without memory."""
    for case in (each for group_size in GROUP_SIZES for each in every(group_size, cuda=True)):
        if case.algorithm == "fused":
            yield str(case), partial(case.group, torch.device("meta"))


def cases(device: torch.device, group_size: str) -> child.Cases:
    cuda = device.type == "cuda"
    return {str(case): partial(case.check, device) for case in every(int(group_size) if cuda else 1, cuda)}
