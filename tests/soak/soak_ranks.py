"""Ranks that run programs, and the command that runs one again."""

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack

import torch.distributed as dist

from fusedcomm.launch import world
from fusedcomm.launch.ranks import RankError
from tests.soak.outcome import Failure, SoakOutcome
from tests.soak.worker import run_program

PROGRAM_S = {"cpu": 600, "cuda": 900}  # bound of one program: it is over by itself long before
# These are read at the first use of Triton and cuBLAS: a CPU has only Triton's interpreter, and cuBLAS must repeat
# itself.
SETTINGS = {"cpu": {"TRITON_INTERPRET": "1"}, "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}


class SoakRanks:
    """The ranks of torchrun, or ranks that are started here, and anew after a program that broke."""

    def __init__(self, device_type: str, size: int) -> None:
        self.device_type, self.size = device_type, size
        self._stack = ExitStack()
        self._call: world.CallRanks | None = None

    def run(self, seed: int, index: int, steps: Sequence[int] | None = None, deadline: float = math.inf) -> SoakOutcome:
        if self._call is None:
            os.environ.update(SETTINGS[self.device_type])
            ranks = world.ranks(self.device_type, self.size, PROGRAM_S[self.device_type])
            self._call = self._stack.enter_context(ranks)
        arguments = (seed, index, self.device_type, steps, deadline)
        if world.under_torchrun():
            return run_program(dist.get_rank(), *arguments)
        try:
            outcome: SoakOutcome = self._call(run_program, *arguments)
        except RankError as error:  # died, or hangs
            outcome = SoakOutcome(failures=[Failure(error.rank, -1, str(error))], broken=True)
        if outcome.broken:
            self.close()
        return outcome

    def close(self) -> None:
        self._call = None
        self._stack.close()


def command(device_type: str, size: int, seed: int, index: int) -> str:
    torchrun = world.under_torchrun()
    start = f"torchrun --nproc-per-node {size} -m" if torchrun else "python -m"
    ranks = "" if torchrun else f" --ranks {size}"
    return f"{start} tests.soak --device {device_type}{ranks} --seed {seed} --program {index}"
