"""Which layouts tensor descriptors load. What a device refuses of a launch: tests/kernels/test_launch_path.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fusedcomm.algorithms import kernel_launch
from fusedcomm.algorithms.tiles import TileConfig

CONFIG = TileConfig(64, 64, 64, 8, 4, 4)


def test_one_row_of_a_wider_tensor_has_a_descriptor() -> None:
    x = torch.empty(1, 1003, dtype=torch.bfloat16)[:, :512]
    assert x.is_contiguous() and kernel_launch.can_describe_x(x)
    assert kernel_launch.describe_x(x, CONFIG).strides == [512, 1]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_overlap_have_no_descriptor(transposed: bool) -> None:
    def described(w: torch.Tensor) -> bool:
        return kernel_launch.can_describe_w((w.mT if transposed else w).unsqueeze(0))

    rows = torch.empty(128 * 256, dtype=torch.bfloat16)
    assert described(rows.view(128, 256))
    assert not described(rows[:256].expand(128, 256))
    assert not described(rows.as_strided((64, 256), (248, 1)))
