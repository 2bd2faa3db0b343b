"""A rank that never comes: it is named in time, the output is NaN, and the context lives."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import OPS, GpuCall, first_of

DTYPE = torch.bfloat16
BOUND_S = 1.0


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(2, DTYPE, first_of(op, cuda)) for op in OPS]


def cases(device: torch.device) -> child.Cases:
    return {call.case.op: partial(check_absent, call, device) for call in calls(device.type == "cuda")}


def check_absent(call: GpuCall, device: torch.device) -> dict[str, Any]:
    """Rank 0 of 2 runs alone."""
    cuda, case = device.type == "cuda", call.case
    group = call.group("fused", device)
    alone = group.workspaces[0]
    alone.timeout_s = BOUND_S
    alone.arm()
    start = time.monotonic()
    outs: list[Tensor] = []
    try:
        with group.on_stream(0):
            outs = case.run(alone, "fused", call.inputs(0, device, 0))
        group.check(case.op)
    except fusedcomm.PeerTimeoutError as error:
        seconds = time.monotonic() - start
        assert error.peers == [1], error.peers
        assert 0.9 * BOUND_S < seconds < 10 * BOUND_S, seconds
        text = str(error)
    else:
        raise AssertionError("nothing was reported")
    if cuda:  # on CPU the op raises before there is a result
        assert outs and all(out.isnan().all() for out in outs), "the output must be poisoned"
    call._replace(group_size=2 if cuda else 1).check("fused", device)  # the context lives
    return {"seconds": round(seconds, 2), "error": text}


if __name__ == "__main__":
    child.main(cases)
