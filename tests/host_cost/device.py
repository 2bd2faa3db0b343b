"""This process as one rank of a group with pretended GPUs; make host-cost has prepared it."""

import ctypes
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_char_p, c_int, c_uint64, c_void_p
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory import members
from fusedcomm.memory.group_member import Member
from fusedcomm.memory.topology import Topology
from fusedcomm.memory.workspace import Workspace
from tests.helpers.device_rules import Range, Write
from tests.helpers.fake_driver import NUM_SMS, FakeDriver, Refused
from tests.host_cost.traces import NEITHER, READS, WRITES, Access

RANK = 1
_NOTE = ctypes.CFUNCTYPE(None, c_char_p, c_int, c_uint64, c_int, c_uint64, c_uint64)


def join(group_size: int, slot_bytes: int, device: torch.device) -> Workspace:
    """Have a part in WORLD on ``device``, without a vote: the peers' segments are memory of this process."""
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=RANK, world_size=group_size, store=FakeStore())
    workspace = VirtualGroup(group_size, slot_bytes, device).workspaces[RANK]
    workspace.shares_gpu, workspace.num_sms = False, NUM_SMS
    world = dist.group.WORLD
    assert world is not None
    topology = Topology(None, None, Workspace.num_bytes(group_size, slot_bytes), None)
    ours = Member(RANK, group_size, world.group_name, device, FakeStore(), topology, workspace=workspace)
    members._group(world).members[device] = ours
    ours.prepare_calls()
    ours.prepare_anew()
    return workspace


def made(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device)


def place(t: Tensor) -> Range:
    return t.data_ptr(), t.data_ptr() + math.prod(t.shape) * t.itemsize


def blocks(allocated: bool = True) -> list[Range]:
    """Memory that torch's allocator has given away, or that it has kept or got back."""
    found = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    found = [each for each in found if (each["state"] == "active_allocated") == allocated]
    return [(each["address"], each["address"] + each["size"]) for each in found]


class Driver(FakeDriver):
    """The preloaded libcuda.so.1: takes all work, or, inside `hears`, tells of it."""

    def __init__(self) -> None:
        library = Path(sys.prefix).parent.joinpath("lib/libcuda.so.1")
        super().__init__(library.parent, 90, blocks, lambda: range(1 << 40), library)
        self.check(False)
        self.trace: list[Access] = []
        self.given: list[tuple[Any, ...]] = []  # launches with all parameters, and written words
        self._note = _NOTE(lambda what, *rest: self.trace.append(Access(what.decode(), *rest)))

    @contextmanager
    def hears(self, inputs: Sequence[Tensor]) -> Iterator[list[Access]]:
        """Work given to streams, by a device that is as late as it can be. Launches read ``inputs``, and write other
        memory that was not there before; in the workspace they keep to the protocol, which is proved elsewhere.
        """
        self.trace, self.given, self._inputs, self._lasting = [], [], [*map(place, inputs)], blocks()
        note = c_void_p.in_dll(self._library, "pretended_note")
        late = c_int.in_dll(self._library, "pretended_late")
        note.value, late.value = ctypes.cast(self._note, c_void_p).value, 1
        self.check(True)
        try:
            yield self.trace
        finally:
            self.check(False)
            note.value, late.value = None, 0

    @contextmanager
    def counts(self, name: str) -> Iterator[None]:
        self._library.count_begin()
        yield
        self._library.count_end(name.encode())

    def _launch(self, *args: Any) -> None:
        super()._launch(*args)
        launch = self.launches.pop()
        given = partial(Access, device=torch.cuda.current_device(), stream=launch.stream)
        self.trace.append(given("launch"))
        maps = [self.tensor_maps[int.from_bytes(a[:8], "little")] if len(a) == 128 else a for a in launch.arguments]
        self.given.append((launch.kernel.name, launch.grid, launch.block, launch.shared, launch.attributes, *maps))
        results, freed = [each for each in blocks() if each not in self._lasting], blocks(allocated=False)
        for argument in launch.arguments:
            address = int.from_bytes(argument[:8], "little")
            if len(argument) == 128:
                address = self.tensor_maps[address].address
            for access, tensors in ((READS, self._inputs), (WRITES, results), (NEITHER, freed)):
                for end in (end for start, end in tensors if start <= address < end):
                    if access == NEITHER:
                        raise Refused(f"{launch.kernel.name}: an operand must not be freed, got {address:#x}")
                    self.trace.append(given("operand", access=access, address=address, bytes=end - address))

    def _write(self, *args: Any) -> None:
        super()._write(*args)
        write = self.enqueued.pop()
        assert isinstance(write, Write)
        self.given.append((write.address, write.value))
        self.trace.append(Access("signal", torch.cuda.current_device(), write.stream, NEITHER, write.address, 8))
