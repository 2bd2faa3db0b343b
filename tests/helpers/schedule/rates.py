"""Rates of the simulator: the cost model's constants and published figures of an H200.

The source of each figure stands beside it. [P] is published, [M] modelled from published figures, [G] a guess.
"""

from dataclasses import dataclass, replace

from fusedcomm.plan.cost.model import DEFAULTS, Constants
from tests.helpers.schedule.multiprocessors import CUBLAS_FILLS, CUBLAS_LEAVES_ROOM, NUM_SMS, Footprint


@dataclass(frozen=True)
class Rates:
    """Seconds, bytes per second, FLOP per second."""

    constants: Constants
    memory: float  # bytes copied: each is read and written
    in_flight: float  # bytes copied by one program of unpack, pack or reduce
    link: float  # what a GPU sends, and what it receives, by copy engines
    stored: float  # bytes that one SM stores to peers
    cublas: Footprint
    same_stream: float = 1e-6  # [G] from the end of a kernel to the start of the next
    event: float = 2.5e-6  # [G] likewise on another stream
    small_kernel: float = 2e-6  # [G] a kernel of one program
    flag: float = 1.5e-6  # [G] from a signal to the end of the wait for it
    host: float = 25e-6  # [M] an operation on the host: 20 in a call of `chunked` on 4 ranks, which takes 0.5 ms

    def matmul(self, sizes: tuple[int, int, int, int], fraction: float) -> float:
        """A matmul [b, m, k] @ [b, k, n] of cuBLAS on a fraction of the SMs."""
        return self.constants.matmul("bfloat16", *sizes) / fraction

    def fused(self, flops: float, num_programs: int) -> float:
        """A part of a kernel of this package whose programs have an SM each."""
        return flops / self.constants.fused_flops["bfloat16"] * NUM_SMS / num_programs

    def copied(self, num_bytes: float, num_programs: int) -> float:
        return num_bytes / min(self.memory, self.in_flight * num_programs)


H200 = Rates(
    # kernels as measured, waves of tiles included, for a part of one has no waves of its own; [P] of 4.8 TB/s
    constants=replace(DEFAULTS["cuda"], fused_flops={"bfloat16": 785e12}, memory_bandwidth=4.3e12),
    memory=4.3e12 / 2,
    in_flight=32768 / 0.9e-6,  # [M] 32 KiB in flight for 0.9 us: 59 programs copy 2.15 TB/s
    link=370e9,  # [P] of 450 GB/s
    stored=5e9,  # [P] 16 SMs store 80 GB/s, 76 all that the link takes
    cublas=CUBLAS_FILLS,
)
H200_WITH_ROOM = replace(H200, cublas=CUBLAS_LEAVES_ROOM)  # small kernels run beside a matmul of cuBLAS
