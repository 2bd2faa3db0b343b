"""Ranks in processes of their own that share one GPU, as users call the ops. Each problem is a case of its own.

Three parts, by the argument: 2 ranks, 4 ranks, and ``queues``. Streams that share a hardware queue run in the order in
which the host launched their work. CUDA_DEVICE_MAX_CONNECTIONS says how many a process has: 8 by default, 1 under
Megatron, 32 in the other parts. Virtual ranks would share the queues.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm import env
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import CASES, OPS, SMALL, GpuCall, GpuCase, assert_equal, first_of
from fusedcomm.bench.gpu_check.pools import Pools, need_segments
from fusedcomm.kernels.native_part import native
from fusedcomm.launch.ranks import KILLED

DTYPE = torch.bfloat16
TIMES, IN_PYTHON = 5, 3  # two calls of a kind run in Python, and one more if the first made the workspace
NUM_QUEUES = (1, 8, 32)
SLOTS = {"FUSEDCOMM_WORKSPACE_BYTES": str(2 << 20)}  # a call has several rounds
ABSENT_OPS = {2: "matmul_all_to_all", 4: "all_gather_matmul"}
# Collectives of gloo come last: on CUDA tensors they are torch's own work.
ALGORITHMS = ("fused", "chunked", "planned", "unfused")


def problems(size: int, cuda: bool) -> list[GpuCase]:
    if not cuda:  # 4 ranks do not divide the others
        return SMALL if size == 2 else SMALL[:1]
    return CASES if size == 2 else [case for case in CASES if case.name == "ragged" or case == first_of(case.op, cuda)]


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(size, DTYPE, case) for size in ABSENT_OPS for case in problems(size, cuda)]


def cases(device: torch.device, part: str) -> child.Cases:
    return of_queues(device) if part == "queues" else of_ranks(device, int(part))


def of_queues(device: torch.device) -> child.Cases:
    pools, cuda = Pools(device.type), device.type == "cuda"
    return {
        f"{number} hardware queues {algorithm}: {case.op}": partial(
            _queued, pools, device.type, number, algorithm, case
        )
        for number in (NUM_QUEUES if cuda else NUM_QUEUES[:1])
        for algorithm in ("fused", "chunked")
        for case in (first_of(op, cuda) for op in OPS)
    }


def _queued(pools: Pools, device_type: str, number: int, algorithm: str, case: GpuCase) -> Any:
    need_segments(device_type)
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)} | (SLOTS if device_type == "cuda" else {})
    return pools.run(2, forward_and_backward, device_type, algorithm, case, env=env)


def forward_and_backward(rank: int, device_type: str, algorithm: str, case: GpuCase) -> dict[str, Any]:
    found = values(rank, device_type, algorithm, case)
    return found | {"gradients": backward(rank, device_type, algorithm, case)}


def of_ranks(device: torch.device, size: int) -> child.Cases:
    pools, kind, cuda = Pools(device.type), device.type, device.type == "cuda"
    values_of = {
        name: {f"{size} ranks {name}: {case}": partial(_values, pools, size, kind, name, case) for case in each}
        for name, each in ((name, problems(size, cuda)) for name in ALGORITHMS)
    }
    in_time: child.Cases = {}
    if cuda or size == 2:
        in_time[f"{size} ranks absent"] = partial(_in_segments, pools, size, absent, kind)
    if size == 2:
        in_time["2 ranks killed"] = partial(killed, pools, kind)
        in_time["2 ranks that differ"] = partial(_in_segments, pools, size, differing, kind)
        in_time |= {f"2 ranks checked: {op}": partial(_checked, pools, kind, first_of(op, cuda)) for op in OPS}
    return {
        **values_of["fused"],
        **values_of["chunked"],
        **values_of["planned"],
        **{
            f"{size} ranks backward: {case}": partial(pools.run, size, backward, kind, None, case)
            for case in problems(size, cuda)
            if case == first_of(case.op, cuda)
        },
        **in_time,
        **values_of["unfused"],
    }


def _in_segments(pools: Pools, size: int, fn: Any, device_type: str, *args: Any) -> Any:
    need_segments(device_type)
    return pools.run(size, fn, device_type, *args)


def _values(pools: Pools, size: int, device_type: str, name: str, case: GpuCase) -> Any:
    run = partial(_in_segments, pools) if name in ("chunked", "fused") else pools.run
    return run(size, values, device_type, None if name == "planned" else name, case)


def _checked(pools: Pools, device_type: str, case: GpuCase) -> Any:
    """With guard bytes and every argument compared; no call runs natively."""
    need_segments(device_type)
    return pools.run(2, values, device_type, "fused", case, env={"FUSEDCOMM_CHECK": "1"})


def values(rank: int, device_type: str, algorithm: str | None, case: GpuCase) -> dict[str, Any]:
    """A case as users call it, with fresh inputs; and how the planner runs it where nothing is forced."""
    size, device = dist.get_world_size(), torch.device(device_type)
    if native is not None:
        native.forget_recorded_calls()
    with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
        for seed in range(TIMES):
            inputs = case.inputs(size, rank, DTYPE, device, seed)
            outs = case.call(inputs)
            fusedcomm.synchronize()
            where = f"{case} {algorithm} rank {rank} call {seed}"
            assert_equal(outs, case.expected(size, DTYPE, device, seed, algorithm == "unfused")[rank], where)
        if algorithm is not None:
            in_python = TIMES - (0 if native is None else len(native.recorded_calls()))
            assert in_python <= IN_PYTHON or not runs_natively(algorithm, device), f"{in_python} calls ran in Python"
            return {"calls": TIMES, "in_python": in_python}
        args, options = case.arguments(inputs)
        return {"calls": TIMES, "plan": proved(fusedcomm.explain(case.op, *args, **options))}


def runs_natively(algorithm: str, device: torch.device) -> bool:
    return (
        native is not None
        and not env.check()
        and (algorithm == "chunked" or (algorithm == "fused" and device.type == "cuda"))
    )


def proved(plan: fusedcomm.Plan) -> str:
    """Its text; without a proof the call was right because it ran unfused."""
    text = str(plan)
    assert "failed its proof" not in text and "could not be proved" not in text, text
    return text


def backward(rank: int, device_type: str, algorithm: str | None, case: GpuCase) -> dict[str, float]:
    """Gradients of x and w against autograd of all ranks' program. Returns the relative errors."""
    size, device = dist.get_world_size(), torch.device(device_type)
    every = [case.inputs(size, each, DTYPE, device, 0) for each in range(size)]
    for t in (t for inputs in every for t in (inputs.x, *inputs.ws)):
        t.requires_grad_()
    expected = case.program(every)
    if case.op == "matmul_all_reduce":  # all ranks have one result: its gradient counts once
        expected = expected[:1]
    weights = [_weights(each, out[0]) for each, out in enumerate(expected)]
    losses = [(out[0].float() * weight).sum() for out, weight in zip(expected, weights, strict=True)]
    own = every[rank]
    want = torch.autograd.grad(torch.stack(losses).sum(), [own.x, own.ws[0]])
    weight = weights[rank if len(weights) > 1 else 0]
    with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
        for _ in range(TIMES):
            got = torch.autograd.grad((case.call(own)[0].float() * weight).sum(), [own.x, own.ws[0]])
        fusedcomm.synchronize()
    errors = {}
    for name, one, other in zip("xw", got, want, strict=True):
        errors[name] = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert errors[name] < 2e-2, f"{case} gradient of {name}, rank {rank}: relative error {errors[name]}"
    return errors


def _weights(rank: int, out: Tensor) -> Tensor:
    generator = torch.Generator(out.device).manual_seed(1000 + rank)
    return torch.randint(-2, 3, out.shape, generator=generator, device=out.device).float()


def absent(rank: int, device_type: str) -> dict[str, Any]:
    """The last rank does not come: the others name it, and after a reset all go on. `unfused` would wait in gloo."""
    size = dist.get_world_size()
    case = first_of(ABSENT_OPS[size], device_type == "cuda")
    exact_call(rank, device_type, case)  # the group's first call is a collective, which has errors of its own
    dist.barrier()
    seconds = 0.0 if rank == size - 1 else lone_call(rank, device_type, case)
    dist.barrier()
    fusedcomm.reset()
    exact_call(rank, device_type, case)
    return {"op": case.op, "seconds": seconds}


def differing(rank: int, device_type: str) -> dict[str, Any]:
    """Rank 1 has more columns: both ranks say so, and after a reset both go on."""
    case = first_of(ABSENT_OPS[2], device_type == "cuda")
    exact_call(rank, device_type, case)
    other = replace(case, n=(case.n[0] + 16 * rank,))
    try:
        with fusedcomm.force_algorithm("fused", strict=True):
            other.call(other.inputs(2, rank, DTYPE, torch.device(device_type), 0))
            fusedcomm.synchronize()
    except fusedcomm.PeerMismatchError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was reported")
    dist.barrier()
    fusedcomm.reset()
    exact_call(rank, device_type, case)
    return {"error": text}


def exact_call(rank: int, device_type: str, case: GpuCase) -> None:
    size, device = dist.get_world_size(), torch.device(device_type)
    with fusedcomm.force_algorithm("chunked", strict=True):
        outs = case.call(case.inputs(size, rank, DTYPE, device, 0))
        fusedcomm.synchronize()
    assert_equal(outs, case.expected(size, DTYPE, device, 0)[rank], f"{case} rank {rank}")


def lone_call(rank: int, device_type: str, case: GpuCase) -> float:
    """The last rank of the group is not there. Returns the seconds until that was reported."""
    last = dist.get_world_size() - 1
    inputs = case.inputs(last + 1, rank, DTYPE, torch.device(device_type), 0)
    start = time.monotonic()
    try:
        with fusedcomm.force_algorithm("chunked", strict=True):
            outs = case.call(inputs)
            fusedcomm.synchronize()
    except fusedcomm.PeerTimeoutError as error:
        assert error.peers == [last], error.peers
        return round(time.monotonic() - start, 2)
    raise AssertionError(f"nothing was reported; output {outs[0].flatten()[:4].tolist()}")


def killed(pools: Pools, device_type: str) -> dict[str, Any]:
    """Rank 1 is killed between two calls: rank 0 names it in time."""
    need_segments(device_type)
    pool, case = pools.get(2), first_of(ABSENT_OPS[2], device_type == "cuda")
    pool.run(exact_call, device_type, case)
    pool.kill(1)
    try:
        seconds, other = pool.run(lone_call, device_type, case)
    finally:
        pools.close()
    assert other is KILLED
    return {"seconds": seconds}


if __name__ == "__main__":
    child.main(partial(cases, part=sys.argv.pop(1)))
