"""One call of each variant in every rank under torch's profiler, as one trace that Perfetto opens.

Every rank has its threads, its GPU streams, and a process of its own with LANES. Times are the host clock's, shared by
ranks of one host; between hosts they differ by as much as the clocks do.
"""

import json
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.bench.timing import all_gather_bytes

VARIANT = "variant: "
PREFIX = "fusedcomm."
# A chunk's matmul, or a kernel of `fused` with its stores to peers; its copy to a peer and signal; the wait for a peer;
# moving or adding an arrived chunk.
LANES = ("matmul", "push", "wait", "copy")
QUIET = {"KINETO_LOG_LEVEL": "99"}  # for ranks that profile: else Kineto prints a line at every start and stop
Trace = dict[str, Any]  # as chrome://tracing and Perfetto read it
PIDS_PER_RANK = 100  # in the merged trace
ANNOTATIONS = ("user_annotation", "gpu_user_annotation")


def record(variants: Mapping[str, Callable[[], Any]], device: torch.device) -> Trace:
    """Record one call of each variant, which has run before. Ranks call this alike, and each gets the merged trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    synchronize = torch.cuda.synchronize if device.type == "cuda" else bool
    with torch.profiler.profile(activities=activities) as profiled:
        next(iter(variants.values()))()  # the first call under a profiler is slow
        for name, variant in variants.items():
            synchronize()
            dist.barrier()
            with torch.profiler.record_function(VARIANT + name):
                variant()
                synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        local = zlib.compress(file.read_bytes())
    return merged([json.loads(zlib.decompress(each)) for each in all_gather_bytes(local, device)])


def merged(traces: Sequence[Trace]) -> Trace:
    """One trace from every rank's. Events before the first variant are left out, and time starts at 0."""
    events: list[dict[str, Any]] = []
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    for rank, trace in enumerate(traces):
        events += _of_rank(rank, trace, (bases[rank] - min(bases)) / 1e3)
    start = min((event["ts"] for event in events if event["ph"] != "M"), default=0.0)
    for event in events:
        event["ts"] = event.get("ts", start) - start if event["ph"] != "M" else 0
    return {"displayTimeUnit": "ms", "traceEvents": events}


def joined(traces: Sequence[Trace]) -> Trace:
    """Several merged traces, one after the other, with a gap."""
    events: list[dict[str, Any]] = []
    offset = 0.0
    for i, trace in enumerate(traces):
        for event in trace["traceEvents"]:
            if event["ph"] == "M":
                events += [event] * (i == 0 or event not in events)
            else:
                events.append(event | {"ts": event["ts"] + offset})
        offset = max((event["ts"] + event.get("dur", 0) for event in events), default=0.0) + 1000.0
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _of_rank(rank: int, trace: Trace, late: float) -> Iterator[dict[str, Any]]:
    """One rank's events. ``late`` is by how many microseconds the base of its times is later than the earliest."""
    events = trace["traceEvents"]
    start = min((event["ts"] for event in events if str(event.get("name", "")).startswith(VARIANT)), default=0.0)
    labels = {e["pid"]: e["args"]["labels"] for e in events if e["ph"] == "M" and e["name"] == "process_labels"}
    pids: dict[Any, int] = {}
    for event in events:
        if event.get("cat") == "Trace" or event["ph"] not in "MXsfi" or (event["ph"] != "M" and event["ts"] < start):
            continue
        original = event["pid"]
        if event["ph"] == "M" and event["name"] != "thread_name":
            continue  # processes are named below
        pid = pids.setdefault(original, rank * PIDS_PER_RANK + len(pids) + 1)
        copy = event | {"pid": pid} | ({} if event["ph"] == "M" else {"ts": event["ts"] + late})
        if "id" in copy:  # an arrow from a launch to its kernel
            copy["id"] = f"{rank}.{copy['id']}"
        yield copy
        if _lane_of(event):
            tid = LANES.index(_lane_of(event) or "") + len(LANES) * ANNOTATIONS.index(event["cat"])
            yield copy | {"pid": rank * PIDS_PER_RANK, "tid": tid, "cat": "fusedcomm"}
    yield _name("process_name", rank * PIDS_PER_RANK, 0, f"rank {rank}: fusedcomm")
    for i, where in enumerate(("", "GPU ")):
        for tid, name in enumerate(LANES):
            yield _name("thread_name", rank * PIDS_PER_RANK, tid + i * len(LANES), where + name)
    for original, pid in pids.items():
        yield _name("process_name", pid, 0, f"rank {rank}: {labels.get(original, original)}")


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _lane_of(event: Mapping[str, Any]) -> str | None:
    name = str(event.get("name", ""))
    if event.get("cat") not in ANNOTATIONS or not name.startswith(PREFIX):
        return None
    found = name.removeprefix(PREFIX).split(" ")[0]
    return found if found in LANES else None
