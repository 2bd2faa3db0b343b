"""What the schedule's checks reckon that a program holds is what the compiled kernels hold."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.helpers.compilers import Target
from tests.helpers.schedule.multiprocessors import KERNELS, Footprint
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)

LARGEST = ("push", "post", "gather K", "pack", "unpack", "reduce", "finish", "wait source", "begin push", "signal")


def test_footprints_are_those_of_the_compiled_kernels(compiled: Compiled, target: Target) -> None:
    if target.arch != 90 or target.triton == "3.6":
        pytest.skip("the footprints are those of sm_90 by Triton 3.9")
    kernels = [compiled[name] for name in LARGEST]
    found = {each["kernel"]: Footprint(each["num_warps"], each["registers"], each["shared"]) for each in kernels}
    assert found == KERNELS
