"""Ranks in processes of their own that share one GPU, as users call the ops. Each problem is a case of its own.

Three parts, by the argument: 2 ranks, 4 ranks, and ``queues``. Streams that share a hardware queue run in the order in
which the host launched their work. CUDA_DEVICE_MAX_CONNECTIONS says how many a process has: 8 by default, 1 under
Megatron, 32 in the other parts. Virtual ranks would share the queues.
"""

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
from fusedcomm.bench.gpu_check.gpu_calls import CASES, SMALL, GpuCall, GpuCase, assert_equal, first_calls, first_of
from fusedcomm.bench.gpu_check.pools import Pools
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
    pools, cuda = Pools(device), device.type == "cuda"
    found: child.Cases = {}
    for number in NUM_QUEUES if cuda else NUM_QUEUES[:1]:
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)} | (SLOTS if cuda else {})
        for algorithm in ("fused", "chunked"):
            for call in (each._replace(algorithm=algorithm) for each in first_calls(cuda)):
                name = f"{number} hardware queues {algorithm}: {call.op}"
                found[name] = pools.case(2, forward_and_backward, call, env=queues)
    return found


def forward_and_backward(rank: int, device_type: str, call: GpuCall) -> dict[str, Any]:
    return values(rank, device_type, call) | {"gradients": backward(rank, device_type, call)}


def of_ranks(device: torch.device, size: int) -> child.Cases:
    pools, cuda = Pools(device), device.type == "cuda"
    every = [GpuCall(size, DTYPE, case, algorithm="planned") for case in problems(size, cuda)]

    def values_by(name: str) -> child.Cases:
        case = partial(pools.case, size, values, by_gloo=name in ("planned", "unfused"))
        return {f"{size} ranks {name}: {call.case}": case(call._replace(algorithm=name)) for call in every}

    first = [call for call in every if call.case == first_of(call.op, cuda)]
    in_time: child.Cases = {}
    if cuda or size == 2:
        in_time[f"{size} ranks absent"] = pools.case(size, absent)
    if size == 2:
        in_time["2 ranks killed"] = partial(killed, pools)
        in_time["2 ranks that differ"] = pools.case(size, differing)
        for call in first_calls(cuda):  # with guard bytes and every argument compared; no call runs natively
            in_time[f"2 ranks checked: {call.op}"] = pools.case(2, values, call, env={"FUSEDCOMM_CHECK": "1"})
    return {
        **values_by("fused"),
        **values_by("chunked"),
        **values_by("planned"),
        **{f"{size} ranks backward: {call.case}": pools.case(size, backward, call, by_gloo=True) for call in first},
        **in_time,
        **values_by("unfused"),
    }


def values(rank: int, device_type: str, call: GpuCall) -> dict[str, Any]:
    """A case as users call it, with fresh inputs; and how the planner runs it where nothing is forced."""
    device, case, algorithm = torch.device(device_type), call.case, call.algorithm
    if native is not None:
        native.forget_recorded_calls()
    with forced(algorithm):
        for seed in range(TIMES):
            every = call.inputs(device, seed)
            outs = call.public(every[rank])
            fusedcomm.synchronize()
            assert_equal(outs, call.expected(every)[rank], f"{case} {algorithm} rank {rank} call {seed}")
        if algorithm != "planned":
            in_python = TIMES - (0 if native is None else len(native.recorded_calls()))
            assert in_python <= IN_PYTHON or not runs_natively(algorithm, device), f"{in_python} calls ran in Python"
            return {"calls": TIMES, "in_python": in_python}
        return {"calls": TIMES, "plan": proved(fusedcomm.explain(case.op, **call.options(every[rank])))}


def forced(algorithm: str) -> Any:
    return fusedcomm.force_algorithm(None if algorithm == "planned" else algorithm, strict=algorithm != "planned")


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


def backward(rank: int, device_type: str, call: GpuCall) -> dict[str, float]:
    """Gradients of x and w against autograd of all ranks' program. Returns the relative errors."""
    every = call.inputs(torch.device(device_type), 0)
    for t in (t for inputs in every for t in (inputs.x, *inputs.ws)):
        t.requires_grad_()
    expected = call.case.program(every)
    if call.op == "matmul_all_reduce":  # all ranks have one result: its gradient counts once
        expected = expected[:1]
    weights = [_weights(each, out[0]) for each, out in enumerate(expected)]
    losses = [(out[0].float() * weight).sum() for out, weight in zip(expected, weights, strict=True)]
    own = every[rank]
    want = torch.autograd.grad(torch.stack(losses).sum(), [own.x, own.ws[0]])
    weight = weights[rank if len(weights) > 1 else 0]
    with forced(call.algorithm):
        for _ in range(TIMES):
            got = torch.autograd.grad((call.public(own)[0].float() * weight).sum(), [own.x, own.ws[0]])
        fusedcomm.synchronize()
    errors = {}
    for name, one, other in zip("xw", got, want, strict=True):
        errors[name] = ((one.float() - other.float()).norm() / other.float().norm()).item()
        assert errors[name] < 2e-2, f"{call.case} gradient of {name}, rank {rank}: relative error {errors[name]}"
    return errors


def _weights(rank: int, out: Tensor) -> Tensor:
    generator = torch.Generator(out.device).manual_seed(1000 + rank)
    return torch.randint(-2, 3, out.shape, generator=generator, device=out.device).float()


def absent(rank: int, device_type: str) -> dict[str, Any]:
    """The last rank does not come: the others name it, and after a reset all go on. `unfused` would wait in gloo."""
    call = call_of_all(device_type)
    exact_call(rank, device_type)  # the group's first call is a collective, which has errors of its own
    dist.barrier()
    seconds = 0.0 if rank == call.group_size - 1 else lone_call(rank, device_type)
    dist.barrier()
    fusedcomm.reset()
    exact_call(rank, device_type)
    return {"op": call.op, "seconds": seconds}


def differing(rank: int, device_type: str) -> dict[str, Any]:
    """Rank 1 has more columns: both ranks say so, and after a reset both go on."""
    exact_call(rank, device_type)
    call = call_of_all(device_type)
    other = call._replace(case=replace(call.case, n=(call.case.n[0] + 16 * rank,)))
    try:
        with fusedcomm.force_algorithm("fused", strict=True):
            other.public(other.inputs(torch.device(device_type), 0)[rank])
            fusedcomm.synchronize()
    except fusedcomm.PeerMismatchError as error:
        text = str(error)
    else:
        raise AssertionError("nothing was reported")
    dist.barrier()
    fusedcomm.reset()
    exact_call(rank, device_type)
    return {"error": text}


def call_of_all(device_type: str) -> GpuCall:
    size = dist.get_world_size()
    return GpuCall(size, DTYPE, first_of(ABSENT_OPS[size], device_type == "cuda"), algorithm="chunked")


def exact_call(rank: int, device_type: str) -> None:
    call = call_of_all(device_type)
    every = call.inputs(torch.device(device_type), 0)
    with forced(call.algorithm):
        outs = call.public(every[rank])
        fusedcomm.synchronize()
    assert_equal(outs, call.expected(every)[rank], f"{call.case} rank {rank}")


def lone_call(rank: int, device_type: str) -> float:
    """The last rank of the group is not there. Returns the seconds until that was reported."""
    call = call_of_all(device_type)
    inputs = call.inputs(torch.device(device_type), 0)[rank]
    start = time.monotonic()
    try:
        with forced(call.algorithm):
            outs = call.public(inputs)
            fusedcomm.synchronize()
    except fusedcomm.PeerTimeoutError as error:
        assert error.peers == [call.group_size - 1], error.peers
        return round(time.monotonic() - start, 2)
    raise AssertionError(f"nothing was reported; output {outs[0].flatten()[:4].tolist()}")


def killed(pools: Pools) -> dict[str, Any]:
    """Rank 1 is killed between two calls: rank 0 names it in time."""
    pools.need_segments()
    pool = pools.get(2)
    pool.run(exact_call, pools.device_type)
    pool.kill(1)
    try:
        seconds, other = pool.run(lone_call, pools.device_type)
    finally:
        pools.close()
    assert other is KILLED
    return {"seconds": seconds}
