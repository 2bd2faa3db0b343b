"""Everything that one GPU can prove of the five ops, in one command that ends inside 10 minutes.

    python -m benchmarks.gpu_check [--json FILE] [--device cpu]

values     every op, algorithm and dtype, R = 2, 4, 8 virtual ranks: one process, a stream each, the SMs divided
time-out   a rank that never comes: reported, output NaN, and the context lives
graph      an odd number of calls, captured once, replayed with fresh inputs
commands   `fusedcomm doctor` and the tests that need a GPU
processes  2 and 4 ranks in processes of their own on this GPU, over torch's symmetric memory, with gloo
speed      fusedcomm's matmuls against cuBLAS, its reduction against a copy; whole ops against the unfused program

``--device cpu`` dry-runs what Triton's interpreter can (TRITON_INTERPRET=1), to find slips before a GPU is there.
"""

from __future__ import annotations

import os

# This must be set before CUDA starts: one hardware queue per stream, and several ranks on one GPU.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

import argparse
import faulthandler
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusedcomm
from benchmarks.gpu_cases import ALGORITHMS, CASES, OPS, SMALL, GpuCase, GpuInputs, first_of, loaded_group
from benchmarks.gpu_speed import check_speed
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankPool

# Each case costs seconds of Triton's compiler. The first combination runs all, the others each op's ragged one.
COMBINATIONS = [
    (2, torch.bfloat16),
    (4, torch.float16),
    (8, torch.bfloat16),
    (2, torch.float32),
]
TIMEOUT_S = "10"  # limit of every wait between ranks
LIMIT_S = 595


# values


def check_values(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    checked: dict[str, int] = {}
    for group_size, dtype in COMBINATIONS if cuda else [(1, dtype) for _, dtype in COMBINATIONS[1:]]:
        every = (group_size, dtype) == COMBINATIONS[0]
        for case in [case for case in CASES if every or case.name == "ragged"] if cuda else SMALL:
            for algorithm in ALGORITHMS if cuda else ("fused",):
                name = f"R={group_size} {dtype} {algorithm}"
                checked[name] = checked.get(name, 0) + check_case(group_size, dtype, case, algorithm, device)
    return {"calls_checked": checked}


def check_case(
    group_size: int, dtype: torch.dtype, case: GpuCase, algorithm: str, device: torch.device, calls: int = 3
) -> int:
    group = loaded_group(group_size, case, dtype, algorithm, device)
    for seed in range(calls):
        inputs = [case.inputs(group_size, rank, dtype, device, seed) for rank in range(group_size)]
        results = group.run(lambda workspace, args: case.run(workspace, algorithm, args), inputs)
        group.check(case.op)
        for rank, expected in enumerate(case.expected(group_size, dtype, device, seed)):
            where = f"{case} {algorithm} {dtype} R={group_size} rank {rank} call {seed}"
            assert_equal(results[rank], expected, where)
    return calls * group_size


def assert_equal(outs: list[Tensor], expected: list[Tensor], where: str) -> None:
    """``expected`` may end with a gathered x that the caller did not get."""
    for i, (out, want) in enumerate(zip(outs, expected, strict=False)):
        if not torch.equal(out, want):
            wrong = (out != want).sum().item() if out.shape == want.shape else "all"
            raise AssertionError(f"{where}: {wrong} of {out.numel()} elements of result {i} wrong")


# time-out


def check_timeout(device: torch.device) -> dict[str, Any]:
    return {op: check_timeout_of(first_of(op, device.type == "cuda"), device) for op in OPS}


def check_timeout_of(case: GpuCase, device: torch.device) -> dict[str, Any]:
    """Rank 0 of 2 runs alone. Its wait must end in time, with NaN and an error that names rank 1."""
    dtype, cuda = torch.bfloat16, device.type == "cuda"
    group = loaded_group(2, case, dtype, "fused", device)
    alone = group.workspaces[0]
    alone.timeout_s = 1.0
    alone.arm()
    start = time.monotonic()
    outs: list[Tensor] = []
    try:
        with group.on_stream(0):
            outs = case.run(alone, "fused", case.inputs(2, 0, dtype, device, 0))
        group.check(case.op)
        raise AssertionError("nothing was reported")
    except fusedcomm.PeerTimeoutError as error:
        seconds = time.monotonic() - start
        assert error.peers == [1], error.peers
        assert 0.9 < seconds < 10, seconds
        text = str(error)
    if cuda:  # on CPU the op raises before there is a result
        assert outs and all(out.isnan().all() for out in outs), "the output must be poisoned"
    check_case(2 if cuda else 1, dtype, case, "fused", device)  # the context lives
    return {"seconds": seconds, "error": text}


# CUDA graph


def check_graph(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"skipped": "needs CUDA"}
    return {op: check_graph_of(first_of(op, cuda=True), device) for op in OPS}


def check_graph_of(case: GpuCase, device: torch.device, num_calls: int = 3, replays: int = 5) -> dict[str, Any]:
    """Each rank has a graph: branches of one graph need not run at the same time, and ranks wait for each other.

    num_calls is odd, so that a replay that took slots by fixed address would read the wrong call.
    """
    dtype, group_size = torch.bfloat16, 2
    group = loaded_group(group_size, case, dtype, "fused", device)
    calls = [[case.inputs(group_size, rank, dtype, device, 0) for rank in range(group_size)] for _ in range(num_calls)]
    graphs: list[torch.cuda.CUDAGraph] = []
    outs: list[list[list[Tensor]]] = []
    for rank, workspace in enumerate(group.workspaces):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=group.streams[rank]):
            outs.append([case.run(workspace, "fused", call[rank]) for call in calls])
    for replay in range(replays):
        for number, call in enumerate(calls):
            for rank, old in enumerate(call):
                new = case.inputs(group_size, rank, dtype, device, 10 * replay + number)
                for to, source in zip([old.x, *old.ws, *old.biases], [new.x, *new.ws, *new.biases], strict=True):
                    if to is not None and source is not None:
                        to.copy_(source)
        group.run(lambda _, graph: graph.replay(), graphs)
        group.check(case.op)
        for number in range(num_calls):
            for rank, expected in enumerate(case.expected(group_size, dtype, device, 10 * replay + number)):
                assert_equal(outs[rank][number], expected, f"{case} replay {replay}, call {number}, rank {rank}")
    return {"calls_in_graph": num_calls, "replays": replays}


# processes


def check_rank(rank: int, device_type: str, absent_op: str, calls: int) -> dict[str, Any]:
    import torch.distributed as dist

    size, device, dtype = dist.get_world_size(), torch.device(device_type), torch.bfloat16
    done: dict[str, int] = {}
    plans: dict[str, str] = {}
    cuda = device_type == "cuda"
    for algorithm in (None, "fused", "chunked"):
        with fusedcomm.force_algorithm(algorithm, strict=algorithm is not None):
            for case in CASES if cuda else SMALL:
                for seed in range(calls):
                    inputs = case.inputs(size, rank, dtype, device, seed)
                    outs = case.call(inputs)
                    expected = case.expected(size, dtype, device, seed)[rank]
                    assert_equal(outs, expected, f"{case} {algorithm} rank {rank} call {seed}")
                done[str(algorithm)] = done.get(str(algorithm), 0) + calls
                if algorithm is None:
                    args, options = case.arguments(inputs)
                    plans[str(case)] = str(fusedcomm.explain(case.op, *args, **options))
    fusedcomm.synchronize()
    case = first_of(absent_op, cuda)
    with fusedcomm.force_algorithm("chunked", strict=True):  # unfused would wait in the group's own collective
        absent_rank_is_named(rank, size, case, case.inputs(size, rank, dtype, device, 0))
    return {"calls": done, "plans": plans, "absent": absent_op}


def absent_rank_is_named(rank: int, size: int, case: GpuCase, inputs: GpuInputs) -> None:
    import torch.distributed as dist

    if rank != size - 1:
        try:
            outs = case.call(inputs)
            fusedcomm.synchronize()
            raise AssertionError(f"nothing was reported; output {outs[0].flatten()[:4].tolist()}")
        except fusedcomm.PeerTimeoutError as error:
            assert error.peers == [size - 1], error.peers
    dist.barrier()
    fusedcomm.reset()
    outs = case.call(inputs)
    fusedcomm.synchronize()
    expected = case.expected(size, inputs.x.dtype, inputs.x.device, 0)[rank]
    assert_equal(outs, expected, f"{case} rank {rank} after reset")


def check_processes(device: torch.device) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    absent = {2: "matmul_all_to_all", 4: "all_gather_matmul"}
    for size in (2, 4) if device.type == "cuda" else (2,):
        with RankPool(size, env={"FUSEDCOMM_TIMEOUT_S": TIMEOUT_S}, timeout_s=150) as pool:
            answers[f"{size} processes"] = pool.run(check_rank, device.type, absent[size], 2)[0]
    return answers


# commands


def check_commands(device: torch.device) -> dict[str, Any]:
    """What users run first, and the tests of the copy to the host. One GPU tells nothing of several."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "doctor.json"
        doctor = run_module("fusedcomm", "doctor", "--json", str(file))
        found = json.loads(file.read_text()) if file.exists() else None
    tests = run_module("pytest", "-q", "tests/runtime/test_device_to_host.py")
    for name, done in (("doctor", doctor), ("tests", tests)):
        assert done.returncode == 0, f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return {"doctor": found, "gpu tests": tests.stdout.strip().splitlines()[-1]}


def run_module(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *args], capture_output=True, text=True, timeout=90)


SECTIONS: dict[str, Callable[[torch.device], dict[str, Any]]] = {
    "values": check_values,
    "time-out": check_timeout,
    "graph": check_graph,
    "processes": check_processes,
    "commands": check_commands,
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    args = parser.parse_args(argv)
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
