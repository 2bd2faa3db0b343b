"""CUDA graphs of 2 processes that share a GPU: the ops, and the end of a decoding step. A CPU runs the same calls.

A graph holds an odd number of calls: a replay that took slots by fixed addresses would read the wrong call.
"""

from typing import Any

import torch
from torch.nn import functional as F

import fusedcomm
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import GpuCall, assert_equal, first_calls, refill
from fusedcomm.bench.gpu_check.pools import Pools
from fusedcomm.bench.gpu_check.virtual_ranks import NUM_CALLS, REPLAYS, VirtualCall
from fusedcomm.bench.measure import captured

GROUP_SIZE, DTYPE = 2, torch.bfloat16
EPS = 1e-6


def cases(device: torch.device) -> child.Cases:
    pools = Pools(device)
    ops = {call.op: pools.case(GROUP_SIZE, graph_of, call) for call in first_calls(device.type == "cuda")}
    return ops | {f"tail of {rows} rows": pools.case(GROUP_SIZE, tail, rows) for rows in (1, 4, 64)}


def graph_of(rank: int, device_type: str, call: GpuCall) -> dict[str, Any]:
    with fusedcomm.force_algorithm(call.algorithm, strict=True):
        return check_replays(rank, device_type, call)


def check_replays(rank: int, device_type: str, call: VirtualCall) -> dict[str, Any]:
    """Public calls, captured once and replayed with new inputs."""
    device = torch.device(device_type)
    inputs = [call.inputs(device, seed)[rank] for seed in range(NUM_CALLS)]
    replay = _captured(lambda: [call.public(each) for each in inputs], device_type)
    for number in range(REPLAYS):
        fresh = [call.inputs(device, 10 * number + i) for i in range(NUM_CALLS)]
        refill(inputs, [every[rank] for every in fresh])
        results = replay()
        fusedcomm.synchronize()
        for i, (outs, every) in enumerate(zip(results, fresh, strict=True)):
            assert_equal(outs, call.expected(every)[rank], f"{call} rank {rank} replay {number} call {i}")
    return {"calls_in_graph": NUM_CALLS, "replays": REPLAYS}


def tail(rank: int, device_type: str, rows: int) -> dict[str, Any]:
    """Half layers, each ended by `fusedcomm.inference.RowParallelTail`, as an engine captures them."""
    k, hidden = (256, 4096) if device_type == "cuda" else (8, 16)
    device, made = torch.device(device_type), torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=made).to(device, DTYPE)

    ws, x, residual = integers(NUM_CALLS, GROUP_SIZE, k, hidden), integers(GROUP_SIZE, rows, k), integers(rows, hidden)
    own = torch.empty_like(x[rank])
    with fusedcomm.force_algorithm("fused", strict=True):
        with fusedcomm.before_capture():
            tails = [fusedcomm.inference.RowParallelTail(w[rank], None, None, max_rows=rows) for w in ws]
            for each in tails:
                each.warm_up([rows])

        def layers() -> list[tuple[torch.Tensor, torch.Tensor]]:
            found = [(own, residual)]
            for each in tails:
                found.append(each(own, found[-1][1]))
            return found[1:]

        replay = _captured(layers, device_type)
        for number in range(REPLAYS):
            x = integers(GROUP_SIZE, rows, k)
            own.copy_(x[rank])
            results, total = replay(), residual.float()
            fusedcomm.synchronize()
            for w, (normed, out) in zip(ws, results, strict=True):
                total = (total + torch.einsum("rmk,rkn->mn", x.float(), w.float())).to(DTYPE)
                assert_equal([out], [total], f"sums, rank {rank} replay {number}")
                error = (normed.float() - F.rms_norm(total.float(), (hidden,), None, EPS)).abs().max().item()
                assert error < 0.03, f"normed rows, rank {rank} replay {number}: wrong by {error}"
                total = total.float()
    return {"plan": str(fusedcomm.explain("matmul_all_reduce_norm", own, ws[0][rank], residual, None))}


def _captured(calls: Any, device_type: str) -> Any:
    """``calls``, or on a GPU a replay of them. Returns their results each time."""
    return captured(calls) if device_type == "cuda" else calls
