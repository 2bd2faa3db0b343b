"""A call's schedule on its streams, as a section of docs/protocol.md between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from docs.generate.rooms import replaced
from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.plan import chunked
from fusedcomm.plan.builder import Device, Layout, Memory, build
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.schedule import Await, Copy, EndRound, Launch, Multiply, Place, Record, Schedule, Signal, Stream

PAGE = "docs/protocol.md"
BEGIN, END = "<!-- schedule: written by `make docs` -->", "<!-- end of schedule -->"


def pages(root: Path) -> dict[str, str]:
    """The page by its path, with rank 0 of 2 in `matmul_all_to_all` by `chunked`."""
    exchange = shapes.matmul_all_to_all((4096, 4096), (4096, 8192), None, 0, 1, 2)
    memory = Memory(0, 2, 1 << 28, 1 << 28, 1 << 27, HeaderLayout(2).for_kernels)
    x, w = (Layout(size, (size[1], 1), torch.bfloat16) for size in ((4096, 4096), (4096, 8192)))
    device = Device(is_gpu=True, architecture=90, triton=(3, 9), num_sms=132, writes_by_stream=True)
    lines = drawn(build(chunked.push_matmul, exchange, memory, device, [x, w, None, None]))
    return {PAGE: replaced(root, PAGE, BEGIN, END, "\n".join(["```text", *lines, "```"]))}


def drawn(schedule: Schedule) -> list[str]:
    """A line for each step, in the column of its stream."""
    width = max(len(_text(step.work)) for step in schedule.steps) + 2
    columns: Sequence[str] = [stream.name for stream in Stream]
    lines = ["".join(f"{name:{width}}" for name in columns).rstrip()]
    return lines + [(" " * width * step.stream + _text(step.work)).rstrip() for step in schedule.steps]


def _text(work: object) -> str:
    match work:
        case Multiply(out):
            return f"multiply to {_place(out)}"
        case Copy(to, source):
            return f"copy {_place(source)} to {_place(to)}"
        case Signal(dst_rank):
            return f"signal rank {dst_rank}"
        case Launch(kernel):
            return kernel.split(".")[1]
        case Record(event):
            return f"record {event}"
        case Await(event):
            return f"await {event}"
        case EndRound():
            return "end of the round"
    return type(work).__name__


def _place(place: Place) -> str:
    name = place.base.name.lower()
    return f"{name} of rank {place.number}" if name == "slot" else name
