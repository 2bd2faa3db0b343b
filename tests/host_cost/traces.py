"""Work that one rank gives to the streams of its pretended GPUs, in the host's order, and its faults.

A device may run its streams as far apart as events let it. So accesses to the same bytes need an order if one writes;
and memory that torch's allocator gives away again has the same bytes as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

NEITHER, READS, WRITES = range(3)  # as in pretended_cuda.c


@dataclass(frozen=True)
class Access:
    """A use of memory by an operation on a stream. ``device``: the current one of the thread that enqueued it.

    ``what``: copy, memset, matmul, launch (of Triton), kernel (of torch), signal (a word that the stream writes),
    record, wait, host waits or synchronize; operand, a tensor of the launch before; and use, of tensors by the caller
    between two calls. An event's address is its handle.
    """

    what: str
    device: int
    stream: int
    access: int = NEITHER
    address: int = 0
    bytes: int = 0

    @property
    def end(self) -> int:
        return self.address + self.bytes

    def conflicts(self, other: Access) -> bool:
        both = WRITES in (self.access, other.access) and NEITHER not in (self.access, other.access)
        return both and self.address < other.end and other.address < self.end


Trace = Sequence[Access]


def come_before(trace: Trace) -> list[int]:
    """For each entry the set, as bits, of entries surely before it: by streams, events and waits of the host."""
    done: dict[tuple[int, int], int] = {}  # by stream
    recorded: dict[int, int] = {}  # by event
    by_host, before = 0, []
    for i, each in enumerate(trace):
        stream = each.device if each.stream == 0 else 0, each.stream  # each device has a default stream
        done[stream] = done.get(stream, 0) | by_host
        before.append(done[stream])
        if each.what == "record":
            recorded[each.address] = done[stream]
        elif each.what == "wait":
            done[stream] |= recorded.get(each.address, 0)
        elif each.what == "host waits":
            by_host |= recorded.get(each.address, 0)
        elif each.what == "synchronize":
            by_host |= done[stream]
        else:
            done[stream] |= 1 << i
    return before


def races(trace: Trace) -> Iterator[str]:
    """Conflicts without an order. Launches may use any part of their operands: no conflict within one call."""
    before, calls = come_before(trace), [*accumulate(each.what == "use" for each in trace)]
    for i, second in enumerate(trace):
        for j, first in enumerate(trace[:i]):
            in_parts = calls[i] == calls[j] and "operand" in (first.what, second.what)
            if not in_parts and not before[i] >> j & 1 and first.conflicts(second):
                yield f"nothing orders {_named(trace, j)} before {_named(trace, i)}, at {second.address:#x}"


def early_signals(trace: Trace, segments: Sequence[tuple[int, int]]) -> Iterator[str]:
    """Signals to a segment (start, end) that may come before an earlier send of the host to it."""
    before = come_before(trace)
    for i, signal in enumerate(trace):
        if signal.what == "signal":
            start, end = next(each for each in segments if each[0] <= signal.address < each[1])
            for j, sent in enumerate(trace[:i]):
                if sent.access == WRITES and start <= sent.address < end and not before[i] >> j & 1:
                    yield f"nothing orders {_named(trace, j)} before {_named(trace, i)} to the same peer"


def foreign_streams(trace: Trace, device: int, streams: Sequence[int]) -> Iterator[str]:
    """Work enqueued with another device current, or on a stream that is not the caller's or the workspace's."""
    for i, each in enumerate(trace):
        if each.device != device:
            yield f"device {device} must be current, is {each.device}: {_named(trace, i)}"
        elif each.stream not in streams and each.what != "host waits":
            yield f"the stream must be one of {[*map(hex, streams)]}: {_named(trace, i)}"


def misplaced_copies(trace: Trace, segments: Sequence[tuple[int, int]], side: int) -> Iterator[str]:
    """Copies to the peers' segments that are not on the stream for sends, ``side``, and so hold up another one."""
    for i, each in enumerate(trace):
        to_peer = each.access == WRITES and any(start <= each.address < end for start, end in segments)
        if each.what == "copy" and to_peer and each.stream != side:
            yield f"a copy to a peer must be on stream {side:#x}: {_named(trace, i)}"


def counts(trace: Trace) -> dict[str, int]:
    """Driver calls by purpose; operations with several operands count once."""
    found = Counter(each.what for each in trace if each.access != READS and each.what not in ("use", "operand"))
    return dict(sorted(found.items()))


def _named(trace: Trace, i: int) -> str:
    each = trace[i]
    return f"#{i} {each.what} on stream {each.stream:#x} of device {each.device}"
