"""Ranks in processes of their own that share one GPU, over torch's symmetric memory and gloo, as users call the ops."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from benchmarks.gpu_check import child
from benchmarks.gpu_check.cases import CASES, OPS, SMALL, GpuCall, GpuCase, assert_equal, first_of
from fusedcomm.launch.ranks import KILLED, RankError, RankPool

DTYPE = torch.bfloat16
LIMIT_S = 55  # for a call of all ranks
TIMES = 2
HOST_CALLS = 5
ABSENT_OPS = {2: "matmul_all_to_all", 4: "all_gather_matmul"}


def problems(size: int, cuda: bool) -> list[GpuCase]:
    if not cuda:
        return SMALL
    return CASES if size == 2 else [case for case in CASES if case.name == "ragged" or case == first_of(case.op, cuda)]


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(size, DTYPE, case) for size in ABSENT_OPS for case in problems(size, cuda)]


def cases(device: torch.device) -> child.Cases:
    pools = Pools()
    found: child.Cases = {}
    for size in ABSENT_OPS if device.type == "cuda" else (2,):
        run = partial(pools.run, size)
        for name in ("planned", "unfused", "chunked", "fused"):
            found[f"{size} ranks {name}"] = partial(run, values, device.type, None if name == "planned" else name)
        found[f"{size} ranks backward"] = partial(run, backward, device.type)
        found[f"{size} ranks absent"] = partial(run, absent, device.type)
        found[f"{size} ranks host time"] = partial(run, host_time, device.type)
    found["2 ranks killed"] = partial(killed, pools, device.type)
    return found


class Pools:
    """One pool of ranks at a time. Ranks that have failed are not used again."""

    def __init__(self) -> None:
        self.pool: RankPool | None = None

    def get(self, size: int) -> RankPool:
        if self.pool is None or self.pool.dead or self.pool.world_size != size:
            self.close()
            self.pool = RankPool(size, timeout_s=LIMIT_S)
        return self.pool

    def run(self, size: int, fn: Callable[..., Any], *args: Any) -> Any:
        """Rank 0's result."""
        pool = self.get(size)
        try:
            return pool.run(fn, *args)[0]
        except RankError:
            self.close()
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


def values(rank: int, device_type: str, algorithm: str | None) -> dict[str, Any]:
    """Every case, as users call it, with fresh inputs; and how the planner runs each where nothing is forced."""
    size, device = dist.get_world_size(), torch.device(device_type)
    plans: dict[str, str] = {}
    with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
        for case in problems(size, device_type == "cuda"):
            for seed in range(TIMES):
                inputs = case.inputs(size, rank, DTYPE, device, seed)
                outs = case.call(inputs)
                fusedcomm.synchronize()
                where = f"{case} {algorithm} rank {rank} call {seed}"
                assert_equal(outs, case.expected(size, DTYPE, device, seed)[rank], where)
            if algorithm is None:
                args, options = case.arguments(inputs)
                plans[str(case)] = proved(fusedcomm.explain(case.op, *args, **options))
    return {"cases": len(problems(size, device_type == "cuda")), "calls_of_each": TIMES, "plans": plans}


def proved(plan: fusedcomm.Plan) -> str:
    """Its text; without a proof the call was right because it ran unfused."""
    text = str(plan)
    assert "failed its proof" not in text and "could not be proved" not in text, text
    return text


def backward(rank: int, device_type: str) -> dict[str, float]:
    """Each op's gradients of x and w against autograd of all ranks' program. Returns the relative errors."""
    size, device = dist.get_world_size(), torch.device(device_type)
    errors: dict[str, float] = {}
    for case in (first_of(op, device_type == "cuda") for op in OPS):
        every = [case.inputs(size, each, DTYPE, device, 0) for each in range(size)]
        for t in (t for inputs in every for t in (inputs.x, *inputs.ws)):
            t.requires_grad_()
        expected = case.program(every)
        if case.op == "matmul_all_reduce":  # all ranks have one result, whose gradient counts once
            expected = expected[:1]
        weights = [_weights(each, out[0]) for each, out in enumerate(expected)]
        losses = [(out[0].float() * weight).sum() for out, weight in zip(expected, weights, strict=True)]
        own = every[rank]
        want = torch.autograd.grad(torch.stack(losses).sum(), [own.x, own.ws[0]])
        weight = weights[rank if len(weights) > 1 else 0]
        got = torch.autograd.grad((case.call(own)[0].float() * weight).sum(), [own.x, own.ws[0]])
        fusedcomm.synchronize()
        for name, one, other in zip("xw", got, want, strict=True):
            error = ((one.float() - other.float()).norm() / other.float().norm()).item()
            assert error < 2e-2, f"{case} gradient of {name}, rank {rank}: relative error {error}"
            errors[f"{case} {name}"] = error
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
    pool, case = pools.get(2), first_of(ABSENT_OPS[2], device_type == "cuda")
    pool.run(exact_call, device_type, case)
    pool.kill(1)
    try:
        seconds, other = pool.run(lone_call, device_type, case)
    finally:
        pools.close()
    assert other is KILLED
    return {"seconds": seconds}


def host_time(rank: int, device_type: str) -> dict[str, float]:
    """Microseconds until a public call returns, forward, beside torch.mm's of as small a problem."""
    size, device = dist.get_world_size(), torch.device(device_type)
    found = {}
    for case in (first_of(op, device_type == "cuda") for op in OPS):
        inputs = case.inputs(size, rank, DTYPE, device, 0)
        found[case.op] = _microseconds(partial(case.call, inputs))
    x = torch.ones(64, 64, dtype=DTYPE, device=device)
    found["torch.mm"] = _microseconds(lambda: torch.mm(x, x))
    return found


def _microseconds(call: Callable[[], Any]) -> float:
    """A few calls at a time, so that no queue is full; the median."""
    times = []
    for _ in range(7):
        fusedcomm.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    child.main(cases)
