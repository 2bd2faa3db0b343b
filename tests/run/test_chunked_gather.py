"""`chunked` where K is gathered: what is computed before the first wait."""

from typing import Any

import pytest
import torch

import fusedcomm
from fusedcomm.plan.schedule import Multiply, Wait
from fusedcomm.run.python_executor import Execution


def order(rank: int, dtype: torch.dtype, kept: bool) -> list[str]:
    """The order of what a call with K gathered does."""
    did: list[str] = []
    step = Execution.step

    def does(self: Execution, work: Any, *rest: Any) -> None:
        if isinstance(work, Wait | Multiply):
            did.append("wait" if isinstance(work, Wait) else "matmul")
        step(self, work, *rest)

    x, w = torch.ones(256, 256, dtype=dtype), torch.ones(512, 8, dtype=dtype, requires_grad=kept)
    with pytest.MonkeyPatch.context() as patch, fusedcomm.force_algorithm("chunked", strict=True):
        patch.setattr(Execution, "step", does)
        y = fusedcomm.all_to_all_matmul(x, w, 1, 0)
    assert torch.equal(y.detach(), torch.full((128, 8), 512.0, dtype=dtype))
    return did


@pytest.mark.parametrize("kept", [True, False])
def test_the_own_part_is_multiplied_before_the_first_wait(ranks: Any, kept: bool) -> None:
    assert ranks(2).run(order, torch.float32, kept) == [["matmul", "wait", "matmul"]] * 2
    assert ranks(2).run(order, torch.bfloat16, kept) == [["wait", "matmul"]] * 2
