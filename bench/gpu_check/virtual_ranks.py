"""Virtual groups: one process, a stream for each rank, the SMs divided. Three parts, by the argument:

values     of all ops, algorithms and dtypes
graphs     CUDA graphs: an odd number of `fused` calls is captured once and replayed with new inputs
time-outs  a rank that never comes: it is named in time, the output is NaN, and the context lives
"""

import time
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import (
    ALGORITHMS,
    CASES,
    SMALL,
    GpuCall,
    assert_equal,
    first_calls,
    refill,
)
from fusedcomm.bench.virtual import VirtualGroup
from fusedcomm.memory.workspace import Workspace

# Each call has seconds of Triton's compiler behind it. The first combination runs all, the others each op's ragged one.
COMBINATIONS = [(2, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16), (2, torch.float32)]
NUM_CALLS = 3  # odd: a replay that took slots by fixed addresses would read the wrong call
REPLAYS = 5
BOUND_S = 1.0


class VirtualCall(Protocol):
    """A call of all ranks, virtual ones or, by `public`, as users make it: `GpuCall` and `Moe`. Lists are by rank."""

    @property
    def op(self) -> str: ...
    def inputs(self, device: torch.device, seed: int) -> list[Any]: ...
    def expected(self, every: list[Any]) -> list[list[Tensor]]: ...
    def group(self, device: torch.device) -> VirtualGroup: ...
    def run(self, workspace: Workspace, inputs: Any) -> list[Tensor]: ...
    def public(self, inputs: Any) -> list[Tensor]: ...
    def check(self, device: torch.device) -> dict[str, Any]: ...
    def _replace(self, *, group_size: int) -> Any: ...


def calls(cuda: bool) -> list[GpuCall]:
    return values(cuda) + first_calls(cuda)


def values(cuda: bool) -> list[GpuCall]:
    """A virtual rank waits for others only on a GPU: in the interpreter one runs after the other."""
    if not cuda:
        return [GpuCall(1, dtype, case) for _, dtype in COMBINATIONS[1:] for case in SMALL]
    every = [GpuCall(*COMBINATIONS[0], case) for case in CASES]
    return every + [GpuCall(*each, case) for each in COMBINATIONS[1:] for case in CASES if case.name == "ragged"]


def cases(device: torch.device, part: str) -> child.Cases:
    cuda = device.type == "cuda"
    if part == "values":
        return {
            f"{call} {algorithm}": partial(call._replace(algorithm=algorithm).check, device)
            for call in values(cuda)
            for algorithm in (ALGORITHMS if cuda else ("fused",))
        }
    check = {"graphs": check_graph, "time-outs": check_absent}[part]
    return {call.op: partial(check, call, device) for call in first_calls(cuda)}


def check_graph(call: VirtualCall, device: torch.device) -> dict[str, Any]:
    """A graph for each rank: branches of one graph need not run at the same time, and ranks wait for each other."""
    if device.type != "cuda":
        raise child.Skipped("a CPU has no graphs")
    group, inputs = call.group(device), [call.inputs(device, 0) for _ in range(NUM_CALLS)]
    graphs, outs = [], []
    for rank, workspace in enumerate(group.workspaces):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=group.streams[rank]):
            outs.append([call.run(workspace, of_ranks[rank]) for of_ranks in inputs])
    for replay in range(REPLAYS):
        fresh = [call.inputs(device, 10 * replay + number) for number in range(NUM_CALLS)]
        refill(inputs, fresh)
        group.run(lambda _, graph: graph.replay(), graphs)
        group.check(call.op)
        for number, every in enumerate(fresh):
            for rank, expected in enumerate(call.expected(every)):
                assert_equal(outs[rank][number], expected, f"{call} replay {replay}, call {number}, rank {rank}")
    return {"calls_in_graph": NUM_CALLS, "replays": REPLAYS}


def check_absent(call: VirtualCall, device: torch.device) -> dict[str, Any]:
    """Rank 0 of 2 runs alone."""
    cuda, group = device.type == "cuda", call.group(device)
    alone = group.workspaces[0]
    alone.timeout_s = BOUND_S
    alone.arm()
    start = time.monotonic()
    outs: list[Tensor] = []
    try:
        with group.on_stream(0):
            outs = call.run(alone, call.inputs(device, 0)[0])
        group.check(call.op)
    except fusedcomm.PeerTimeoutError as error:
        seconds = time.monotonic() - start
        assert error.peers == [1], error.peers
        assert 0.9 * BOUND_S < seconds < 10 * BOUND_S, seconds
        text = str(error)
    else:
        raise AssertionError("nothing was reported")
    if cuda:  # on CPU the op raises before there is a result
        assert outs and all(out.isnan().all() for out in outs), "the output must be poisoned"
    call._replace(group_size=2 if cuda else 1).check(device)  # the context lives
    return {"seconds": round(seconds, 2), "error": text}
