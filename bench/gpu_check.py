"""Everything that one GPU can prove of matmul_all_to_all, in one command that ends well inside 8 minutes.

    python -m bench.gpu_check [--json FILE] [--device cpu]

values     every algorithm and dtype, R = 2, 4, 8 virtual ranks: one process, a stream each, the SMs divided
time-out   a rank that never comes: reported, output NaN, and the context lives
graph      an odd number of calls, captured once, replayed with fresh inputs
processes  2 and 4 ranks in processes of their own on this GPU, over torch's symmetric memory, gloo beside it
speed      our matmul against cuBLAS; the whole op against matmul + pack + copy + unpack on the same GPU

``--device cpu`` dry-runs what Triton's interpreter can (TRITON_INTERPRET=1), to find slips before a GPU is there.
"""

from __future__ import annotations

import os

# Before CUDA starts: one hardware queue per stream, and several ranks on one GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

import argparse
import faulthandler
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedcomm
from fusedcomm.algorithms import chunked, fused, launch
from fusedcomm.cli.launch import run_facts
from fusedcomm.exchange import Exchange
from fusedcomm.testing.ranks import RankPool
from fusedcomm.testing.virtual import VirtualGroup
from fusedcomm.workspace import Workspace

OP, FINGERPRINT = "matmul_all_to_all", 7
ALGORITHMS = {"chunked": chunked.push_matmul, "fused": fused.push_matmul}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TIMEOUT_S = "10"  # of every wait between ranks
LIMIT_S = 8 * 60


@dataclass(frozen=True)
class Case:
    """A call; x_shape and w_shape are one rank's. Exact: small integers, so any order of sums gives the same."""

    name: str
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    gather_dim: int
    scatter_dim: int
    out_shape: tuple[int, ...] | None = None
    bias: bool = False
    transposed: bool = False

    def inputs(
        self, rank: int, dtype: torch.dtype, device: torch.device, seed: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        generator = torch.Generator(device).manual_seed(100 * seed + rank)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator, device=device).to(dtype)

        x, w = integers(*self.x_shape), integers(*self.w_shape)
        if self.transposed:
            w = w.mT.contiguous().mT
        return x, w, integers(self.w_shape[-1]) if self.bias else None

    def exchange(self, group_size: int) -> Exchange:
        return Exchange(
            self.x_shape,
            self.w_shape,
            self.out_shape,
            self.gather_dim,
            self.scatter_dim,
            group_size,
        )

    def expected(self, group_size: int, dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
        """What every rank must get, by torch's own matmul and no communication."""
        blocks = []
        for rank in range(group_size):
            x, w, bias = self.inputs(rank, dtype, device, seed)
            y = x.float() @ w.float()
            y = y if bias is None else y + bias.float()
            y = y if self.out_shape is None else y.unflatten(-1, self.out_shape)
            blocks.append(y.to(dtype).chunk(group_size, self.scatter_dim))
        return [torch.cat([b[rank] for b in blocks], self.gather_dim) for rank in range(group_size)]


CASES = [
    Case("rows-to-columns", (1024, 512), (512, 2048), 0, 1),
    Case("ragged", (1000, 392), (392, 1048), 0, 1, bias=True),
    Case("linear-weight", (1024, 512), (512, 2048), 0, 1, bias=True, transposed=True),
    Case("heads-batched", (2, 512, 256), (2, 256, 2048), 1, -2, (16, 128)),
    Case("packed-qkv", (2, 512, 256), (256, 3 * 16 * 64), 1, 3, (3, 16, 64), bias=True),
    Case("columns-to-rows", (2, 512, 256), (256, 1024), 2, 1),
    Case("batch-scattered", (8, 256, 256), (8, 256, 512), 1, 0),
    Case("zero-rows", (0, 64), (64, 128), 0, 1),
]
REPEATS = 4
FEW = ("ragged", "packed-qkv")
SMALL = [
    Case("rows-to-columns", (16, 24), (24, 32), 0, 1, bias=True),
    Case("packed-qkv", (2, 6, 8), (8, 48), 1, 3, (3, 4, 4)),
]


def push(workspace: Workspace, algorithm: str, case: Case, inputs: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
    exchange = case.exchange(workspace.group_size)
    return ALGORITHMS[algorithm](*inputs, exchange, workspace, OP, FINGERPRINT)


def slot_bytes(case: Case, group_size: int, dtype: torch.dtype) -> int:
    return max(128, case.exchange(group_size).chunk_numel * group_size * dtype.itemsize)


def loaded_group(group_size: int, case: Case, dtype: torch.dtype, algorithm: str, device: torch.device) -> VirtualGroup:
    group = VirtualGroup(group_size, slot_bytes(case, group_size, dtype), device)
    group.load(lambda ws: push(ws, algorithm, case, case.inputs(0, dtype, device, 0)), FINGERPRINT)
    return group


# values


def check_values(device: torch.device) -> dict[str, Any]:
    """Each combination costs seconds of Triton's compiler: R = 2 in bf16 takes all cases, the others two."""
    cuda = device.type == "cuda"
    checked: dict[str, int] = {}
    for group_size in (2, 4, 8) if cuda else (1,):
        for dtype in DTYPES:
            every = group_size == 2 and dtype == torch.bfloat16
            cases = [case for case in CASES if every or case.name in FEW] if cuda else SMALL
            for case in cases:
                for algorithm in ALGORITHMS if cuda else ("fused",):
                    name = f"R={group_size} {dtype} {algorithm}"
                    checked[name] = checked.get(name, 0) + check_case(group_size, dtype, case, algorithm, device)
    return {"calls_checked": checked}


def check_case(
    group_size: int,
    dtype: torch.dtype,
    case: Case,
    algorithm: str,
    device: torch.device,
    calls: int = 3,
) -> int:
    group = loaded_group(group_size, case, dtype, algorithm, device)
    for seed in range(calls):
        inputs = [case.inputs(rank, dtype, device, seed) for rank in range(group_size)]
        outs = group.run(lambda ws, args: push(ws, algorithm, case, args), inputs)
        group.check(OP)
        for rank, (out, want) in enumerate(zip(outs, case.expected(group_size, dtype, device, seed), strict=True)):
            if not torch.equal(out, want):
                wrong = (out != want).sum().item()
                raise AssertionError(
                    f"{case.name} {algorithm} {dtype} R={group_size} rank {rank} call {seed}: "
                    f"{wrong} of {out.numel()} elements wrong"
                )
    return calls * group_size


# time-out


def check_timeout(device: torch.device) -> dict[str, Any]:
    """Rank 0 of 2 runs alone. Its wait must end in time, with NaN and an error that names rank 1."""
    case, dtype = (CASES if device.type == "cuda" else SMALL)[0], torch.float32
    group = loaded_group(2, case, dtype, "fused", device)
    alone = group.workspaces[0]
    alone.timeout_s = 1.0
    alone.arm()
    start = time.monotonic()
    try:
        out = push(alone, "fused", case, case.inputs(0, dtype, device, 0))
        group.check(OP)
        raise AssertionError("nothing was reported")
    except fusedcomm.PeerTimeoutError as error:
        seconds = time.monotonic() - start
        assert error.peers == [1], error.peers
        assert 0.9 < seconds < 10, seconds
        text = str(error)
    if device.type == "cuda":  # on CPU the op raises before there is a result
        assert out.isnan().all(), "the output must be poisoned"
    check_case(2 if device.type == "cuda" else 1, dtype, case, "fused", device)  # the context lives
    return {"seconds": seconds, "error": text}


# CUDA graph


def check_graph(device: torch.device, num_calls: int = 3, replays: int = 5) -> dict[str, Any]:
    """A graph per rank: branches of one graph need not run at the same time, and ranks wait for each other.

    num_calls is odd: a replay that took slots by fixed address would read the wrong call.
    """
    if device.type != "cuda":
        return {"skipped": "needs CUDA"}
    case, dtype, group_size = CASES[0], torch.bfloat16, 2
    group = loaded_group(group_size, case, dtype, "fused", device)
    inputs = [[case.inputs(rank, dtype, device, 0) for rank in range(group_size)] for _ in range(num_calls)]
    graphs: list[torch.cuda.CUDAGraph] = []
    outs: list[list[Tensor]] = []
    for rank, workspace in enumerate(group.workspaces):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=group.streams[rank]):
            outs.append([push(workspace, "fused", case, each[rank]) for each in inputs])
    for replay in range(replays):
        for number, each in enumerate(inputs):
            for rank, tensors in enumerate(each):
                for old, new in zip(
                    tensors[:2],
                    case.inputs(rank, dtype, device, 10 * replay + number)[:2],
                    strict=True,
                ):
                    old.copy_(new)
        group.run(lambda _, graph: graph.replay(), graphs)
        group.check(OP)
        for number in range(num_calls):
            for rank, want in enumerate(case.expected(group_size, dtype, device, 10 * replay + number)):
                assert torch.equal(outs[rank][number], want), f"replay {replay}, call {number}, rank {rank}"
    return {"calls_in_graph": num_calls, "replays": replays}


# processes


def check_rank(rank: int, device_type: str, calls: int) -> dict[str, Any]:
    import torch.distributed as dist

    size, device = dist.get_world_size(), torch.device(device_type)
    done: dict[str, int] = {}
    cases = CASES if device_type == "cuda" else SMALL
    for algorithm in (None, "fused", "chunked"):
        with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
            for case in cases:
                for seed in range(calls):
                    x, w, bias = case.inputs(rank, torch.bfloat16, device, seed)
                    out = fusedcomm.matmul_all_to_all(
                        x, w, case.gather_dim, case.scatter_dim, bias=bias, out_shape=case.out_shape
                    )
                    want = case.expected(size, torch.bfloat16, device, seed)[rank]
                    assert torch.equal(out, want), f"{case.name} {algorithm} call {seed}"
                    done[str(algorithm)] = done.get(str(algorithm), 0) + 1
    fusedcomm.synchronize()
    x, w, bias = cases[0].inputs(rank, torch.bfloat16, device, 0)
    plan = fusedcomm.explain(OP, x, w, 0, 1, bias=bias, verbose=False)
    absent_rank_is_named(rank, size, cases[0], device)
    return {"calls": done, "plan": str(plan)}


def absent_rank_is_named(rank: int, size: int, case: Case, device: torch.device) -> None:
    import torch.distributed as dist

    x, w, bias = case.inputs(rank, torch.bfloat16, device, 0)
    if rank != size - 1:
        try:
            out = fusedcomm.matmul_all_to_all(x, w, case.gather_dim, case.scatter_dim, bias=bias)
            fusedcomm.synchronize()
            raise AssertionError(f"nothing was reported; output {out.flatten()[:4].tolist()}")
        except fusedcomm.PeerTimeoutError as error:
            assert error.peers == [size - 1], error.peers
    dist.barrier()
    fusedcomm.reset()
    out = fusedcomm.matmul_all_to_all(x, w, case.gather_dim, case.scatter_dim, bias=bias)
    fusedcomm.synchronize()
    assert torch.equal(out, case.expected(size, torch.bfloat16, device, 0)[rank])


def check_processes(device: torch.device) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for size in (2, 4) if device.type == "cuda" else (2,):
        with RankPool(size, env={"FUSEDCOMM_TIMEOUT_S": TIMEOUT_S}, timeout_s=100) as pool:
            answers[f"{size} processes"] = pool.run(check_rank, device.type, 3)[0]
    return answers


# speed


@dataclass(frozen=True)
class Shape:
    name: str
    batches: int  # 0: w is 2-D
    m: int
    n: int
    k: int


SHAPES = [
    Shape("start program, batch 4 of 16", 4, 16192, 8192, 4096),
    Shape("8192 x 4096 x 4096", 0, 8192, 4096, 4096),
    Shape("4096 x 4096 x 4096", 0, 4096, 4096, 4096),
    Shape("16384 x 3072 x 1024", 0, 16384, 3072, 1024),
    Shape("2048 x 8192 x 8192", 0, 2048, 8192, 8192),
    Shape("ragged 8000 x 4104 x 4104", 0, 8000, 4104, 4104),
    Shape("small 1024 x 1024 x 1024", 0, 1024, 1024, 1024),
]
TINY = [Shape("dry run", 0, 32, 32, 32)]


def check_speed(device: torch.device) -> dict[str, Any]:
    shapes, group_size = (SHAPES, 4) if device.type == "cuda" else (TINY, 1)
    return {shape.name: {**local_speed(shape, device), **op_speed(shape, group_size, device)} for shape in shapes}


def operands(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    batch = (shape.batches,) if shape.batches else ()
    x = torch.randn(*batch, shape.m, shape.k, device=device, dtype=torch.bfloat16)
    w = torch.randn(*batch, shape.k, shape.n, device=device, dtype=torch.bfloat16)
    return x, w


def local_speed(shape: Shape, device: torch.device) -> dict[str, float]:
    """Our push kernel in a group of one rank against torch.matmul: the same flops, no peer."""
    x, w = operands(shape, device)
    exchange = Exchange(x.shape, w.shape, None, x.ndim - 2, x.ndim - 1, 1)
    (spans,) = exchange.rounds(exchange.chunk_numel)
    group = VirtualGroup(1, exchange.chunk_numel * x.itemsize, device)
    workspace = group.workspaces[0]
    y = torch.empty(exchange.out_shape, device=device, dtype=x.dtype)
    launch.push(x, w, None, spans, workspace, FINGERPRINT)
    start = workspace.layout.slot(1, workspace.slot_bytes)  # round 1, as the epoch word never moves here
    ours = workspace.buffers[0][start : start + y.numel() * y.itemsize].view(y.dtype).view(y.shape)
    torch.matmul(x, w, out=y)
    error = ((ours.float() - y.float()).norm() / y.float().norm()).item()
    assert error < 1e-2, f"{shape.name}: relative error {error}"
    variants: dict[str, Callable[[], Any]] = {
        "cublas": lambda: torch.matmul(x, w, out=y),
        "ours": lambda: launch.push(x, w, None, spans, workspace, FINGERPRINT),
    }
    repeated = {f"{name} repeated": repeat(variant, 1 + REPEATS) for name, variant in variants.items()}
    times = interleaved({**variants, **repeated}, device)
    # What one more costs where many are queued: neither the start of a kernel nor the gap to an event counts.
    net = {name: (times[f"{name} repeated"] - times[name]) / REPEATS for name in variants}
    flops = 2 * max(1, shape.batches) * shape.m * shape.n * shape.k
    return {
        "cublas_ms": times["cublas"],
        "ours_ms": times["ours"],
        "ratio_to_cublas": times["cublas"] / times["ours"],
        "ours_tflops": flops / times["ours"] / 1e9,
        "cublas_launch_free_ms": net["cublas"],
        "ours_launch_free_ms": net["ours"],
        "launch_free_ratio_to_cublas": net["cublas"] / net["ours"],
        "relative_error": error,
    }


def repeat(variant: Callable[[], Any], times: int) -> Callable[[], None]:
    def repeated() -> None:
        for _ in range(times):
            variant()

    return repeated


def op_speed(shape: Shape, group_size: int, device: torch.device) -> dict[str, float]:
    """All ranks of a virtual group on one GPU, rows of each cut to M / R: the whole op against what users run today."""
    m = shape.m // group_size
    rank_shape = Shape(shape.name, shape.batches, m, shape.n, shape.k)
    inputs = [operands(rank_shape, device) for _ in range(group_size)]
    x, w = inputs[0]
    exchange = Exchange(x.shape, w.shape, None, x.ndim - 2, x.ndim - 1, group_size)
    group = VirtualGroup(group_size, exchange.chunk_numel * group_size * x.itemsize, device)

    def unfused() -> list[Tensor]:
        packed = [torch.stack(torch.matmul(x, w).chunk(group_size, -1)) for x, w in inputs]
        received = [torch.empty_like(p) for p in packed]
        for src in range(group_size):
            for dst in range(group_size):
                received[dst][src].copy_(packed[src][dst])
        return [torch.cat(r.unbind(0), -2) for r in received]

    def run(algorithm: str) -> Callable[[], list[Tensor]]:
        def call(workspace: Workspace, xw: tuple[Tensor, Tensor]) -> Tensor:
            return ALGORITHMS[algorithm](*xw, None, exchange, workspace, OP, FINGERPRINT)

        group.load(call, FINGERPRINT, inputs[0])
        return lambda: group.run(call, inputs)

    variants: dict[str, Callable[[], Any]] = {
        "unfused": unfused,
        "roof": lambda: [torch.matmul(x, w) for x, w in inputs],
    }
    variants |= {name: run(name) for name in (ALGORITHMS if device.type == "cuda" else ("fused",))}
    want = unfused()
    for name in variants.keys() - {"unfused", "roof"}:
        outs = variants[name]()
        group.check(OP)
        for out, wanted in zip(outs, want, strict=True):
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=1e-1 * shape.k**0.5)
    times = interleaved(variants, device)
    group.check(OP)
    return {f"op_R{group_size}_{name}_ms": ms for name, ms in times.items()}


def interleaved(variants: dict[str, Callable[[], Any]], device: torch.device, rounds: int = 15) -> dict[str, float]:
    """Milliseconds, median over rounds; every variant once per round, after two warm-ups each, on a cold L2."""
    cuda = device.type == "cuda"
    flush = torch.empty(256 << 20 if cuda else 1, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for variant in [*variants.values()] * 2 if cuda else ():
        variant()
        torch.cuda.synchronize()
    for _ in range(rounds if cuda else 1):
        for name, variant in variants.items():
            flush.zero_()
            times[name].append(_event_ms(variant) if cuda else _wall_ms(variant))
    return {name: statistics.median(each) for name, each in times.items()}


def _event_ms(variant: Callable[[], Any]) -> float:
    """Time on the GPU alone: all launches are queued before the first one runs."""
    for cycles in (20_000_000, 200_000_000):  # about 10 ms; more where the host was held up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        start.record()
        variant()
        queued = not start.query()
        end.record()
        torch.cuda.synchronize()
        if queued:
            return start.elapsed_time(end)
    raise AssertionError("the host took longer to launch than the GPU was kept waiting")


def _wall_ms(variant: Callable[[], Any]) -> float:
    start = time.perf_counter()
    variant()
    return (time.perf_counter() - start) * 1e3


SECTIONS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "values": check_values,
    "time-out": check_timeout,
    "graph": check_graph,
    "processes": check_processes,
    "speed": check_speed,
}


@contextmanager
def short_waits() -> Iterator[None]:
    saved = os.environ.get("FUSEDCOMM_TIMEOUT_S")
    os.environ["FUSEDCOMM_TIMEOUT_S"] = TIMEOUT_S
    try:
        yield
    finally:
        os.environ.pop("FUSEDCOMM_TIMEOUT_S") if saved is None else os.environ.update(FUSEDCOMM_TIMEOUT_S=saved)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    args = parser.parse_args()
    device = torch.device(args.device)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    report: dict[str, Any] = {**run_facts(), "sections": {}}
    failed = []
    with short_waits():
        for name in args.only:
            start = time.monotonic()
            print(f"{name}: running", flush=True)
            try:
                result = {"ok": True, **SECTIONS[name](device)}
            except Exception as error:
                traceback.print_exc()
                result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                failed.append(name)
            result["wall_s"] = round(time.monotonic() - start, 1)
            report["sections"][name] = result
            print(f"{name}: {'ok' if result['ok'] else 'FAILED'} after {result['wall_s']} s", flush=True)
            print(json.dumps(result, indent=2), flush=True)
            if args.json:  # after each section: a later one may not come back
                with open(args.json, "w") as file:
                    json.dump(report, file, indent=2)
    print("failed: " + ", ".join(failed) if failed else "all sections passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
