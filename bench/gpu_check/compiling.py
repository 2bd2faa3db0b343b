"""Launches that compile their kernels for a GPU that need not be here, and launch nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from fusedcomm.memory import topology


class CompilerDriver:
    """Stands in for a GPU's driver: it names a target, and has no device to launch on."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # one cache of kernels per architecture

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(arch: int, table: int | None = None, num_sms: int | None = None) -> Iterator[list[Any]]:
    """Launches inside the block only compile, for ``arch``; gives the list of compiled kernels. Tile sizes are those of
    ``table`` (``arch``), for ``num_sms`` multiprocessors (the device's).
    """
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    run, count = JITFunction.run, topology.num_sms if num_sms is None else lambda device: num_sms

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(CompilerDriver(arch))
    with (
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.multiple(topology, architecture=lambda device: table or arch, num_sms=count),
    ):
        yield compiled
