"""Virtual groups: one process, a stream for each rank, the SMs divided. Three parts, by the argument:

values     of all ops, algorithms and dtypes
graphs     CUDA graphs: an odd number of `fused` calls is captured once and replayed with new inputs
time-outs  a rank that never comes: it is named in time, the output is NaN, and the context lives
"""

import sys
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import (
    ALGORITHMS,
    CASES,
    OPS,
    SMALL,
    GpuCall,
    GpuInputs,
    assert_equal,
    first_of,
)
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16
GROUP_SIZE = 2
# Each call has seconds of Triton's compiler behind it. The first combination runs all, the others each op's ragged one.
COMBINATIONS = [(2, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16), (2, torch.float32)]
NUM_CALLS = 3  # odd: a replay that took slots by fixed addresses would read the wrong call
REPLAYS = 5
BOUND_S = 1.0


def calls(cuda: bool) -> list[GpuCall]:
    return values(cuda) + first_calls(cuda)


def values(cuda: bool) -> list[GpuCall]:
    """A virtual rank waits for others only on a GPU: in the interpreter one runs after the other."""
    if not cuda:
        return [GpuCall(1, dtype, case) for _, dtype in COMBINATIONS[1:] for case in SMALL]
    every = [GpuCall(*COMBINATIONS[0], case) for case in CASES]
    return every + [GpuCall(*each, case) for each in COMBINATIONS[1:] for case in CASES if case.name == "ragged"]


def first_calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(GROUP_SIZE, DTYPE, first_of(op, cuda)) for op in OPS]


def cases(device: torch.device, part: str) -> child.Cases:
    cuda = device.type == "cuda"
    if part == "values":
        return {
            f"{call} {algorithm}": partial(call.check, algorithm, device)
            for call in values(cuda)
            for algorithm in (ALGORITHMS if cuda else ("fused",))
        }
    check = {"graphs": check_graph, "time-outs": check_absent}[part]
    return {call.case.op: partial(check, call, device) for call in first_calls(cuda)}


def check_graph(call: GpuCall, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise child.Skipped("a CPU has no graphs")
    case, group = call.case, call.group("fused", device)
    inputs = [[call.inputs(rank, device, 0) for rank in range(GROUP_SIZE)] for _ in range(NUM_CALLS)]
    graphs, outs = _captured(call, group, inputs)
    for replay in range(REPLAYS):
        for number, of_ranks in enumerate(inputs):
            for rank, old in enumerate(of_ranks):
                new = call.inputs(rank, device, 10 * replay + number)
                for to, source in zip([old.x, *old.ws, *old.biases], [new.x, *new.ws, *new.biases], strict=True):
                    if to is not None and source is not None:
                        to.copy_(source)
        group.run(lambda _, graph: graph.replay(), graphs)
        group.check(case.op)
        for number in range(NUM_CALLS):
            for rank, expected in enumerate(case.expected(GROUP_SIZE, DTYPE, device, 10 * replay + number)):
                assert_equal(outs[rank][number], expected, f"{call} replay {replay}, call {number}, rank {rank}")
    return {"calls_in_graph": NUM_CALLS, "replays": REPLAYS}


def _captured(
    call: GpuCall, group: VirtualGroup, inputs: list[list[GpuInputs]]
) -> tuple[list[torch.cuda.CUDAGraph], list[list[list[Tensor]]]]:
    """A graph for each rank: branches of one graph need not run at the same time, and ranks wait for each other."""
    graphs: list[torch.cuda.CUDAGraph] = []
    outs: list[list[list[Tensor]]] = []
    for rank, workspace in enumerate(group.workspaces):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=group.streams[rank]):
            outs.append([call.case.run(workspace, "fused", of_ranks[rank]) for of_ranks in inputs])
    return graphs, outs


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
    child.main(partial(cases, part=sys.argv.pop(1)))
