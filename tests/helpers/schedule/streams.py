"""Stand-ins for torch.cuda's streams and events, which keep what comes before what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

DEVICE = torch.device("cuda", 0)


class Stream:
    """``last``: the number of its last operation. ``pending``: those that its next operation comes after."""

    def __init__(self, streams: Streams, priority: int = 0) -> None:
        self.streams, self.priority, self.device = streams, priority, DEVICE
        self.number = self.cuda_stream = len(streams.made)
        self.last: int | None = None
        self.pending: list[int] = list(streams.synchronized)
        streams.made.append(self)

    @property
    def tail(self) -> list[int]:
        """What is complete when all is that was enqueued here."""
        return [*self.pending, *([] if self.last is None else [self.last])]

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        if event.recording == self.streams.recording:
            self.pending = sorted({*self.pending, *event.after})

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.streams, event.after, event.recording = self.streams, self.tail, self.streams.recording
        return event

    def synchronize(self) -> None:
        self.streams.host_waits(self.tail)

    def query(self) -> bool:
        return True


class Event:
    streams: Streams | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        self.after: list[int] = []
        self.recording = 0

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)

    def synchronize(self) -> None:
        if self.streams is not None and self.recording == self.streams.recording:
            self.streams.host_waits(self.after)

    def query(self) -> bool:
        return True


class Properties:
    multi_processor_count, name, uuid, major, minor = 132, "a recorded H200", "0", 9, 0


class Streams:
    """One device's streams. ``synchronized``: operations that were complete before the host went on."""

    def __init__(self) -> None:
        self.made: list[Stream] = []
        self.synchronized: list[int] = []
        self._host_waits: list[int] = []
        self.recording = 0  # how often it has begun again
        self.current = Stream(self)

    def host_waits(self, after: list[int]) -> None:
        self.synchronized = sorted({*self.synchronized, *after})
        self._host_waits += after
        for stream in self.made:
            stream.pending = sorted({*stream.pending, *after})

    def forget(self) -> None:
        """Nothing was enqueued, or waited for."""
        self.recording += 1
        self.synchronized, self._host_waits = [], []
        for stream in self.made:
            stream.last, stream.pending = None, []

    def take_host_waits(self) -> list[int]:
        """What the host has waited for since this was asked last."""
        taken, self._host_waits = self._host_waits, []
        return taken

    def synchronize(self, device: Any = None) -> None:
        self.host_waits(sorted({number for stream in self.made for number in stream.tail}))

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        @contextmanager
        def device(chosen: Any) -> Iterator[None]:
            yield

        replaced = {
            "Stream": lambda device=None, priority=0: Stream(self, priority),
            "Event": Event,
            "stream": self.use,
            "device": device,
            "current_stream": lambda device=None: self.current,
            "default_stream": lambda device=None: self.made[0],
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": self.synchronize,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "get_device_capability": lambda device=None: (Properties.major, Properties.minor),
            "get_device_properties": lambda device=None: Properties(),
        }
        with ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, value))
            yield
