"""Inductor knows the lowerings, and the FLOP counter the formulas, whoever imports these tables, and whenever."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.tiers import nightly_but

CHECK = """
from fusedcomm.ops.table import OPS
ops = torch.ops.fusedcomm
overloads = [getattr(ops, name).default for name in OPS if "matmul" in name]
assert len(overloads) == 12
from torch._inductor import lowering
assert all(overload in lowering.lowerings for overload in [*overloads, ops.moe_dispatch.default]), overloads
import torch.utils.flop_counter
assert all(getattr(ops, op._opname) in torch.utils.flop_counter.flop_registry for op in overloads)
assert not any(type(finder).__name__ == "_AfterTable" for finder in sys.meta_path)
"""
LOOKED_UP = """
import importlib.util, sys, torch, fusedcomm
assert importlib.util.find_spec("torch._inductor.lowering") is not None
"""
HALF_IMPORTED = """
import sys, torch, fusedcomm, fusedcomm.ops.lowering
"""
NEITHER = "assert not {'torch._inductor.lowering', 'torch.utils.flop_counter'} & {*sys.modules}"
PROGRAMS = {
    "fusedcomm first": f"import sys, torch, fusedcomm\n{NEITHER}\n{CHECK}",
    "looked up before": LOOKED_UP + CHECK,
    "its lowerings first": HALF_IMPORTED + CHECK,
    "both first": f"import sys, torch, torch.utils.flop_counter, torch._inductor.lowering, fusedcomm\n{CHECK}",
}


@pytest.mark.parametrize("name", nightly_but(["fusedcomm first"], PROGRAMS))
def test_lowerings_are_registered_when_inductor_is_there(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAMS[name]], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


BROKEN = """
import sys, torch, fusedcomm
sys.modules["fusedcomm.ops.lowering"] = None
import torch._inductor.lowering
assert torch.compile(torch.sin, backend="eager")(torch.zeros(3)).sum() == 0
"""


@pytest.mark.nightly
def test_lowerings_that_cannot_be_imported_leave_inductor_usable() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch._inductor.lowering does not know the ops of fusedcomm" in done.stderr
