"""What the schedule's checks reckon that a program holds is what the compiled kernels hold."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.helpers.compilers import Target
from tests.helpers.schedule.multiprocessors import KERNELS, Footprint
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)

LARGEST = ("push", "gather K", "pack", "unpack", "reduce", "finish", "wait source", "begin push", "signal")
LARGEST += ("reduce and norm 8192", "norm 8192")


@pytest.mark.nightly
@pytest.mark.parametrize("target", [Target("installed", 90)], indirect=True, ids=str)
def test_footprints_are_those_of_the_compiled_kernels(compiled: Compiled, target: Target) -> None:
    kernels = [compiled[name] for name in LARGEST]
    found = {each["kernel"]: Footprint(each["num_warps"], each["registers"], each["shared"]) for each in kernels}
    assert found == KERNELS
