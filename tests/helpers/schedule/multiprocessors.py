"""How many programs of which kernels fit a GPU's multiprocessors at the same time."""

from dataclasses import dataclass

import numpy as np

from tests.helpers.schedule.operations import Kind, Operation

NUM_SMS = 132  # H100 SXM and H200; the limits of one SM follow
REGISTERS, THREADS, SHARED_BYTES, PROGRAMS = 65_536, 2_048, 228 << 10, 32
_REGISTER_UNIT = 8  # registers are given to a thread in eights
_RESERVED_BYTES = 1 << 10  # each program takes them from shared memory


@dataclass(frozen=True)
class Footprint:
    warps: int
    registers: int  # each thread has these
    shared: int  # bytes

    @property
    def needs(self) -> tuple[int, int, int, int]:
        threads = 32 * self.warps
        registers = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT * threads
        return registers, threads, self.shared + _RESERVED_BYTES, 1


# Compiled for sm_90 by Triton 3.9; tests/kernels/test_compile_only.py compiles them again. Where a
# kernel has several tiles, they are those of the largest.
KERNELS = {
    "push_matmul_kernel": Footprint(8, 226, 229_408),
    "gather_matmul_kernel": Footprint(8, 212, 229_408),
    "grouped_matmul_kernel": Footprint(8, 222, 229_408),
    "experts_matmul_kernel": Footprint(8, 180, 229_408),
    "send_rows_kernel": Footprint(8, 62, 8),
    "take_rows_kernel": Footprint(16, 91, 32),
    "return_rows_kernel": Footprint(8, 48, 8),
    "add_rows_kernel": Footprint(8, 126, 32),
    "pack_kernel": Footprint(16, 60, 8),
    "unpack_kernel": Footprint(16, 54, 32),
    "reduce_kernel": Footprint(16, 48, 32),
    "reduce_norm_kernel": Footprint(16, 124, 64),
    "unpack_norm_kernel": Footprint(16, 96, 65_600),
    "norm_kernel": Footprint(16, 59, 64),
    "finish_kernel": Footprint(1, 43, 0),
    "wait_source_kernel": Footprint(1, 24, 0),
    "begin_push_kernel": Footprint(1, 16, 0),
    "signal_kernel": Footprint(1, 18, 0),
}
# Guesses. cuBLAS's kernels for Hopper hold an SM each until they end. Whether they leave registers for a program of one
# warp is not known: 3 warpgroups with 168 registers a thread would leave 1,024.
CUBLAS_FILLS = Footprint(16, 128, SHARED_BYTES - _RESERVED_BYTES)
CUBLAS_LEAVES_ROOM = Footprint(12, 168, 220 << 10)
ELEMENTWISE = Footprint(4, 32, 0)
NCCL = Footprint(17, 96, 80 << 10)


def footprint(operation: Operation, cublas: Footprint = CUBLAS_FILLS) -> Footprint:
    if operation.kind is Kind.MATMUL:
        return cublas
    if operation.kind is Kind.COLLECTIVE:
        return NCCL
    return KERNELS.get(operation.name, ELEMENTWISE)


class Multiprocessors:
    def __init__(self, num_sms: int = NUM_SMS) -> None:
        self._free = np.tile((REGISTERS, THREADS, SHARED_BYTES, PROGRAMS), (num_sms, 1))  # [SMs, what is free]

    def place(self, footprint: Footprint, num_programs: int) -> list[int]:
        """Place as many programs as fit, one on each SM before a second one on any; the SM of each."""
        placed: list[int] = []
        while len(placed) < num_programs:
            taken = np.flatnonzero(self._fitting(footprint))[: num_programs - len(placed)]
            if len(taken) == 0:
                break
            self._free[taken] -= footprint.needs
            placed += taken.tolist()
        return placed

    def release(self, footprint: Footprint, placed: list[int]) -> None:
        np.add.at(self._free, placed, footprint.needs)

    def has_room(self, footprint: Footprint) -> bool:
        return bool(self._fitting(footprint).any())

    def _fitting(self, footprint: Footprint) -> np.ndarray:
        return np.logical_and.reduce(self._free >= footprint.needs, axis=1)
