"""Traces of all ranks in one, and the lanes of the ops in them."""

from collections.abc import Callable
from typing import Any

import pytest

from fusedcomm.bench import trace
from fusedcomm.bench.measure import Options
from fusedcomm.bench.op_bench import PROGRAMS
from fusedcomm.bench.trace import PIDS_PER_RANK
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.testing import RankPool
from fusedcomm.tools.bench import record_op
from tests.host_cost import traces as found

SIZE = MatmulSize(300, 64, 96)


def record(rank: int, op: str, algorithm: str) -> trace.Trace:
    options = Options("cpu", rounds=1, warmup=1, check=False, graph=False, algorithms=(algorithm,))
    return record_op(rank, op, SIZE, "float32", "forward", options)


@pytest.mark.parametrize("op", PROGRAMS)
def test_the_lanes_of_an_op(ranks: Callable[[int], RankPool], op: str) -> None:
    every = ranks(2).run(record, op, "chunked")
    assert every[0] == every[1]
    ours = [event for event in every[0]["traceEvents"] if event.get("cat") == "fusedcomm"]
    for rank in (0, 1):
        lanes = {trace.LANES[event["tid"]] for event in ours if event["pid"] == rank * PIDS_PER_RANK}
        assert {"matmul", "push", "wait"} <= lanes
    assert {"fusedcomm.wait rank 0", "fusedcomm.wait rank 1"} <= {event["name"] for event in ours}
    variants = {event["name"] for event in every[0]["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"variant: baseline", "variant: fusedcomm"} <= variants


def rank_trace(base_us: float, offset: float) -> trace.Trace:
    """A rank with base ``base_us`` of its clock, and work from ``offset`` after 1 s of the host's clock on."""
    start = 1e6 + offset - base_us

    def event(name: str, cat: str, ts: float, dur: float, tid: int = 7, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "pid": 4711, "tid": tid, "ts": start + ts, "dur": dur, **more}

    events = [
        {"ph": "M", "name": "process_labels", "pid": 4711, "tid": 0, "ts": 0, "args": {"labels": "CPU"}},
        event("aten::mm", "cpu_op", -50.0, 10.0),  # a matmul of the call before
        event("variant: baseline", "user_annotation", 0.0, 100.0),
        event("aten::mm", "cpu_op", 10.0, 50.0),
        event("gloo:all_to_all", "user_annotation", 60.0, 40.0, tid=8),
        event("variant: ours", "user_annotation", 200.0, 80.0),
        event("fusedcomm.matmul rank 1", "user_annotation", 201.0, 59.0),
        event("aten::mm", "cpu_op", 202.0, 50.0),  # part of the range around it
        event("fusedcomm.wait rank 1", "user_annotation", 260.0, 10.0),
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 5, "pid": 4711, "tid": 7, "ts": start + 1.0},
    ]
    return {"baseTimeNanoseconds": base_us * 1e3, "traceEvents": events}


def test_ranks_are_put_on_one_clock() -> None:
    merged = trace.merged([rank_trace(base_us=500.0, offset=0.0), rank_trace(base_us=900.0, offset=7.0)])
    events = [event for event in merged["traceEvents"] if event["ph"] != "M"]
    assert min(event["ts"] for event in events) == 0.0
    starts = {event["pid"] // PIDS_PER_RANK: event["ts"] for event in events if event["name"] == "variant: baseline"}
    assert starts[1] - starts[0] == pytest.approx(7.0)
    assert len({event["id"] for event in events if event["ph"] == "s"}) == 2  # arrows do not cross ranks
    assert sum(event["name"] == "aten::mm" for event in events) == 4  # without the one before the first variant
    names = {event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert names == {f"rank {rank}: {what}" for rank in (0, 1) for what in ("CPU", "fusedcomm")}


# Findings of `make host-cost` in a trace, without the torch that it needs; `make nightly PART=cuda` runs it.
MAIN, SIDE, EVENT = 1, 2, 3


def at(what: str, stream: int, access: int = 0, address: int = 0, size: int = 16) -> found.Access:
    return found.Access(what, 0, stream, access, address, size)


def event(what: str, stream: int) -> found.Access:
    return at(what, stream, address=EVENT)


WRITE, READ = at("matmul", MAIN, found.WRITES), at("copy", SIDE, found.READS, 8)
RECORD, WAIT = event("record", MAIN), event("wait", SIDE)
OPERAND, USE = at("operand", SIDE, found.WRITES), at("use", MAIN, found.WRITES, 64)


@pytest.mark.parametrize(
    ("trace", "num_races"),
    [
        ([WRITE, RECORD, WAIT, READ], 0),
        ([WRITE, RECORD, READ, WAIT], 1),
        ([RECORD, WRITE, WAIT, READ], 1),
        ([WRITE, WAIT, RECORD, READ], 1),
        ([WRITE, at("copy", MAIN, found.READS)], 0),
        ([WRITE, at("copy", SIDE, found.READS, 16)], 0),
        ([at("copy", MAIN, found.READS), READ], 0),
        ([WRITE, RECORD, event("host waits", 0), READ], 0),
        ([WRITE, at("synchronize", MAIN), READ], 0),
        ([at("copy", 0, found.WRITES), found.Access("copy", 1, 0, found.READS, 0, 8)], 1),  # each device has a stream 0
        ([WRITE, OPERAND], 0),  # parts of one tensor
        ([WRITE, USE, OPERAND], 1),  # the memory of a call that was before
        ([WRITE, RECORD, event("wait", 4), event("record", 4), WAIT, READ], 0),  # by way of a third stream
    ],
)
def test_races(trace: list[found.Access], num_races: int) -> None:
    assert len(list(found.races(trace))) == num_races


def test_copies_signals_and_streams() -> None:
    peer = [(100, 200)]
    copy, signal = at("copy", SIDE, found.WRITES, 100), at("signal", SIDE, address=190)
    assert not [*found.early_signals([copy, signal], peer), *found.misplaced_copies([copy, signal], peer, SIDE)]
    moved = at("copy", MAIN, found.WRITES, 100)
    assert (
        len([*found.early_signals([moved, signal], peer)]) == len([*found.misplaced_copies([moved], peer, SIDE)]) == 1
    )
    assert not [*found.foreign_streams([copy, signal], 0, [SIDE])]
    assert len([*found.foreign_streams([copy], 1, [SIDE])]) == len([*found.foreign_streams([copy], 0, [MAIN])]) == 1
    assert found.counts([at("matmul", MAIN, found.READS), WRITE, READ, copy, OPERAND, USE]) == {"copy": 1, "matmul": 1}
