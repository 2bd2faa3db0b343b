"""Which layouts tensor descriptors load. What a device refuses of a launch: tests/kernels/test_launch_path.py."""

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.plan import descriptors, launches
from fusedcomm.plan.builder import Builder, Device, layout_of
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.tiles import TileConfig
from fusedcomm.run import packing
from tests.helpers.virtual_ranks import virtual_ranks

CONFIG = TileConfig(64, 64, 64, 8, 4, 4)


def planned(*tensors: torch.Tensor, device: Device | None = None) -> Any:
    """A Builder with stand-ins for these inputs."""
    return Builder(virtual_ranks(2, 128)[0].memory_facts(), device or Device(), [layout_of(t) for t in tensors])


def test_one_row_of_a_wider_tensor_has_a_descriptor() -> None:
    x = torch.empty(1, 1003, dtype=torch.bfloat16)[:, :512]
    s = planned(x)
    assert x.is_contiguous() and descriptors.can_describe_x(s, s.inputs[0])
    assert descriptors.describe_x(s, s.inputs[0], CONFIG).strides == (512, 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_overlap_have_no_descriptor(transposed: bool) -> None:
    def described(w: torch.Tensor) -> bool:
        s = planned((w.mT if transposed else w).unsqueeze(0))
        return descriptors.can_describe_w(s, s.inputs[0], 1, True)

    rows = torch.empty(128 * 256, dtype=torch.bfloat16)
    assert described(rows.view(128, 256))
    assert not described(rows[:256].expand(128, 256))
    assert not described(rows.as_strided((64, 256), (248, 1)))


@pytest.mark.parametrize(
    ("shape", "gather_dim", "described"),
    [
        ((100, 128), 0, True),
        ((100, 128), 1, True),
        ((100, 2, 128), 0, True),
        ((100, 96), 0, True),  # behind K lie zeros
        ((100, 96), 1, True),
        ((100, 100), 0, False),  # rows begin at multiples of 8 bytes
        ((2**29, 64), 0, True),
        ((2**30, 64), 0, False),  # rows of all sources are indexed by int32
        ((100, 0), 0, False),
    ],
)
def test_chunks_of_whole_blocks_have_a_descriptor(shape: tuple[int, ...], gather_dim: int, described: bool) -> None:
    exchange = shapes.all_gather_matmul(shape, [(shape[-1] * (2 if gather_dim == 1 else 1), 8)], gather_dim, 2)
    (spans,) = exchange.rounds(1 << 62)
    assert descriptors.can_describe_slots(spans, 2, 2, spans.columns.size) == described


@pytest.mark.parametrize(("run", "described"), [(16, [True, False]), (32, [True, True]), (40, [False, False])])
def test_a_box_of_a_run_of_k_is_a_step_of_the_tensor_cores(run: int, described: list[bool]) -> None:
    """16 elements of 2 bytes, 32 of float8."""
    exchange = shapes.all_to_all_matmul((4, 3, 1, run), (3 * 2 * run, 8), 2, 0, 2)
    (spans,) = exchange.rounds(1 << 62)
    found = [descriptors.can_describe_slots(spans, 2, itemsize, spans.columns.size) for itemsize in (2, 1)]
    assert spans.columns.inner == run and found == described


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_descriptors_are_below_a_terabyte(transposed: bool) -> None:
    def described(step: int) -> bool:
        w = torch.empty_strided((1, 2, 64), (0, step, 1), dtype=torch.bfloat16, device="meta")
        s = planned(w.mT if transposed else w)
        return descriptors.can_describe_w(s, s.inputs[0], 1, True)

    assert described(2**39 - 8)  # elements of 2 bytes
    assert not described(2**39)


@pytest.mark.parametrize(("version", "rows", "cleared"), [((3, 6), 64, 0), ((3, 7), 64, 1), ((3, 7), 1024, 0)])
def test_old_drivers_bit_is_cleared_as_triton_does(monkeypatch: Any, version: Any, rows: int, cleared: int) -> None:
    monkeypatch.setattr(packing, "triton_version", lambda: version)
    monkeypatch.setattr(packing, "driver_version", lambda: 13010)
    s, block = planned(torch.empty(rows, 128, dtype=torch.bfloat16)), packing._Block(None, 0, iter([]))  # type: ignore[arg-type]
    meta = {"elem_size": 2, "elem_type": 10, "swizzle": 3, "block_size": [64, 64]}
    block._describe(descriptors.describe_x(s, s.inputs[0], CONFIG), meta)
    assert block.maps[0][2] == (9, 3, 0, cleared)


def test_tiles_are_counted_in_32_bits() -> None:
    s = planned(device=Device(num_sms=132))
    assert launches.programs(s, "push", 2**31 - 2**12) == 132
    with pytest.raises(AssertionError, match="a kernel counts at most 2147479552 tiles, got 2147479553"):
        launches.programs(s, "push", 2**31 - 2**12 + 1)


@pytest.mark.thorough
def test_launches_are_planned_without_triton() -> None:
    """None in sys.modules makes an import fail."""
    imported = "import fusedcomm.plan.fused, fusedcomm.run.python_executor, fusedcomm.memory.signals"
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules['triton'] = None; {imported}"], check=True)
