"""CUDA graphs: an odd number of `fused` calls is captured once and replayed with new inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import OPS, GpuCall, GpuInputs, assert_equal, first_of
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16
GROUP_SIZE = 2
NUM_CALLS = 3  # odd: a replay that took slots by fixed addresses would read the wrong call
REPLAYS = 5


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(GROUP_SIZE, DTYPE, first_of(op, cuda)) for op in OPS]


def cases(device: torch.device) -> child.Cases:
    return {call.case.op: partial(check_graph, call, device) for call in calls(device.type == "cuda")}


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


if __name__ == "__main__":
    child.main(cases)
