"""Findings of `make host-cost` in a trace, without the torch that it needs; `make nightly PART=cuda` runs it."""

from __future__ import annotations

import pytest

from fusedcomm.bench.host_cost.traces import (
    READS,
    WRITES,
    Access,
    counts,
    early_signals,
    foreign_streams,
    misplaced_copies,
    races,
)

MAIN, SIDE, EVENT = 1, 2, 3


def at(what: str, stream: int, access: int = 0, address: int = 0, size: int = 16) -> Access:
    return Access(what, 0, stream, access, address, size)


def event(what: str, stream: int) -> Access:
    return at(what, stream, address=EVENT)


WRITE, READ = at("matmul", MAIN, WRITES), at("copy", SIDE, READS, 8)
RECORD, WAIT = event("record", MAIN), event("wait", SIDE)
OPERAND, USE = at("operand", SIDE, WRITES), at("use", MAIN, WRITES, 64)


@pytest.mark.parametrize(
    ("trace", "num_races"),
    [
        ([WRITE, RECORD, WAIT, READ], 0),
        ([WRITE, RECORD, READ, WAIT], 1),
        ([RECORD, WRITE, WAIT, READ], 1),
        ([WRITE, WAIT, RECORD, READ], 1),
        ([WRITE, at("copy", MAIN, READS)], 0),
        ([WRITE, at("copy", SIDE, READS, 16)], 0),
        ([at("copy", MAIN, READS), READ], 0),
        ([WRITE, RECORD, event("host waits", 0), READ], 0),
        ([WRITE, at("synchronize", MAIN), READ], 0),
        ([at("copy", 0, WRITES), Access("copy", 1, 0, READS, 0, 8)], 1),  # each device has a stream 0
        ([WRITE, OPERAND], 0),  # parts of one tensor
        ([WRITE, USE, OPERAND], 1),  # the memory of a call that was before
        ([WRITE, RECORD, event("wait", 4), event("record", 4), WAIT, READ], 0),  # by way of a third stream
    ],
)
def test_races(trace: list[Access], num_races: int) -> None:
    assert len(list(races(trace))) == num_races


def test_copies_signals_and_streams() -> None:
    peer = [(100, 200)]
    copy, signal = at("copy", SIDE, WRITES, 100), at("signal", SIDE, address=190)
    assert not [*early_signals([copy, signal], peer), *misplaced_copies([copy, signal], peer, SIDE)]
    moved = at("copy", MAIN, WRITES, 100)
    assert len([*early_signals([moved, signal], peer)]) == len([*misplaced_copies([moved], peer, SIDE)]) == 1
    assert not [*foreign_streams([copy, signal], 0, [SIDE])]
    assert len([*foreign_streams([copy], 1, [SIDE])]) == len([*foreign_streams([copy], 0, [MAIN])]) == 1
    assert counts([at("matmul", MAIN, READS), WRITE, READ, copy, OPERAND, USE]) == {"copy": 1, "matmul": 1}
