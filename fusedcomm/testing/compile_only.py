"""Compile the Triton kernels as the host launches them, for architectures that are not here.

    python -m fusedcomm.testing.compile_only FOLDER

Runs the launch functions on tensors without memory (device "meta") under a driver that names a
target and launches nothing; so arguments, specialization and tile sizes are those of a real launch.
Writes each kernel's PTX to FOLDER and prints what it needs as JSON, one object per kernel. Must run
without TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedcomm.algorithms import launch, tiles
from fusedcomm.exchange import Exchange
from fusedcomm.testing import ptx_order
from fusedcomm.workspace import HeaderLayout

GROUP_SIZE = 4
NUM_PROGRAMS = 132
ARCHITECTURES = (80, 90, 100)

COUNTED = {
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "mma_sync": r"\bmma\.sync",
    "tma_loads": r"\bcp\.async\.bulk\.tensor\.\dd\.shared",
    "tma_stores": r"\bcp\.async\.bulk\.tensor\.\dd\.global",
    "cp_async": r"\bcp\.async\.c[ag]\.shared",
    "vector_loads": r"\bld\.global\.v4",
    "vector_stores": r"\bst\.global\.v4",
    "sleeps": r"\bnanosleep",
    "local": r"\b(ld|st)\.local",
}


@dataclass(frozen=True)
class Report:
    """What one kernel was made into. ``stack`` > 0 would be spilled registers."""

    name: str
    arch: int
    triton: str
    kernel: str
    num_warps: int
    registers: int
    stack: int
    shared: int
    counts: dict[str, int]
    order: list[str]


class Driver:
    """Stands in for a GPU's driver: names a target, has no device to launch on."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # one cache of kernels per architecture

    def get_current_stream(self, device: int) -> int:
        return 0


class MetaWorkspace:
    """A workspace without memory."""

    def __init__(self) -> None:
        self.rank, self.group_size, self.num_slots = 1, GROUP_SIZE, 2
        self.segments = torch.empty(GROUP_SIZE, dtype=torch.int64, device="meta")
        self.slot_bytes = 1 << 28
        self.layout = HeaderLayout(GROUP_SIZE)

    def num_programs(self, kind: str) -> int:
        return NUM_PROGRAMS


@contextmanager
def compiling(arch: int) -> Iterator[list[Any]]:
    """Launches inside the block compile for ``arch``; gives the compiled kernels."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run, architecture = JITFunction.run, tiles.architecture

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Driver(arch))
    JITFunction.run, tiles.architecture = compile_only, lambda device: arch
    try:
        yield compiled
    finally:
        JITFunction.run, tiles.architecture = run, architecture


@dataclass(frozen=True)
class Problem:
    """A call of matmul_all_to_all whose round is compiled."""

    lead: tuple[int, ...]
    k: int
    n: int
    gather_dim: int
    scatter_dim: int
    out_shape: tuple[int, ...] | None = None
    batched: bool = False
    transposed: bool = False
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        def meta(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=self.dtype, device="meta")

        w = meta(*(self.lead[:-1] if self.batched else ()), self.k, self.n)
        if self.transposed:
            w = meta(*w.shape[:-2], self.n, self.k).mT
        return meta(*self.lead, self.k), w, meta(self.n) if self.bias else None

    def push(self) -> None:
        x, w, bias = self.tensors()
        launch.push(x, w, bias, self._spans(), MetaWorkspace(), 1)

    def unpack(self) -> None:
        out = torch.empty(self._exchange().out_shape, dtype=self.dtype, device="meta")
        launch.unpack(out, self._spans().unpack, MetaWorkspace(), 1)

    def _exchange(self) -> Exchange:
        x, w, _ = self.tensors()
        return Exchange(x.shape, w.shape, self.out_shape, self.gather_dim, self.scatter_dim, GROUP_SIZE)

    def _spans(self) -> Any:
        return self._exchange().rounds(1 << 62)[0]


START = Problem((16, 16192), 4096, 8192, 1, 2, (16, 512), batched=True)  # the program of DESIGN section 1
LINEAR = Problem((16384,), 4096, 8192, 0, 1, transposed=True, bias=True)
PACKED_QKV = Problem((4, 4096), 4096, 12288, 1, 3, (3, 32, 128), bias=True)


def problems(arch: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every row of the tile tables where it needs most (a bias), and every way to load."""
    yield "push", START.push
    yield "push transposed bias", LINEAR.push
    yield "push fp16 packed bias", dataclasses.replace(PACKED_QKV, dtype=torch.float16).push
    yield "push pointers", Problem((16384,), 4100, 8192, 0, 1, bias=True).push
    yield "push batched ragged", Problem((16, 4096), 4104, 8192, 1, 2, batched=True).push
    yield "push rows scattered", Problem((1024, 16), 4096, 8192, 2, 1).push
    for m in (4096, 2048, 1024, 256):  # smaller and smaller tiles
        yield f"push {m} rows", Problem((m,), 4096, 1024, 0, 1, bias=True).push
    single = Problem((4096,), 1024, 4096, 0, 1, bias=True, dtype=torch.float32)
    yield "push fp32", single.push
    yield "push tf32", lambda: with_tf32(single.push)
    yield "unpack", START.unpack
    yield "unpack fp32", dataclasses.replace(LINEAR, dtype=torch.float32).unpack
    yield "signal", lambda: launch.signal(MetaWorkspace(), None, 1)
    yield "wait", lambda: launch.wait(MetaWorkspace(), 1)


def with_tf32(start: Callable[[], None]) -> None:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        start()
    finally:
        matmul.fp32_precision = before


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    numbers = [re.search(rf"{key}:(\d+)", usage) for key in ("REG", "STACK", "LOCAL")]
    assert all(numbers), usage
    registers, stack, local = (int(match.group(1)) for match in numbers if match)
    return registers, stack + local


def report(name: str, arch: int, kernel: Any, folder: Path) -> Report:
    import triton

    ptx = kernel.asm["ptx"]
    (folder / f"{name.replace(' ', '_')}.{arch}.ptx").write_text(ptx)
    registers, stack = resources(kernel.asm["cubin"])
    return Report(
        name=name,
        arch=arch,
        triton=triton.__version__,
        kernel=kernel.metadata.name,
        num_warps=kernel.metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=kernel.metadata.shared,
        counts={key: len(re.findall(pattern, ptx)) for key, pattern in COUNTED.items()},
        order=ptx_order.violations(ptx, reads_after_wait=name.startswith("unpack")),
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for arch in ARCHITECTURES:
        done = set()
        for name, start in problems(arch):
            with compiling(arch) as compiled:
                start()
            (kernel,) = compiled
            if kernel.hash not in done:
                done.add(kernel.hash)
                print(json.dumps(dataclasses.asdict(report(name, arch, kernel, folder))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
