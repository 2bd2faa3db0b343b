"""A process that takes its CPU for a GPU: every tensor says that it is on cuda:0, and streams and events do nothing.

It is for processes of their own, as it cannot be undone. The package's code for GPUs then runs up to Triton's launchers
and cuBLAS's place, which is torch's matmul on the CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.helpers.device_rules import Range
from tests.helpers.fake_driver import NUM_SMS

DEVICE = torch.device("cuda", 0)
_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "randint", "empty_like")
_METHODS = ("new_empty", "new_zeros", "contiguous", "to", "clone")


class Stream:
    """``cuda_stream`` is the handle that launches carry: 0 for the main stream."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = Stream.created
        Stream.created += 1

    created = 0

    def wait_stream(self, other: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, **options: Any) -> None:
        pass


class Properties:
    multi_processor_count, name, uuid = NUM_SMS, "a pretended GPU", "0"

    def __init__(self, arch: int) -> None:
        self.major, self.minor = divmod(arch, 10)


class PretendedGpu:
    """``tensors`` are the addresses of what torch has made since the last `forget`, and of what is `kept`."""

    def __init__(self, arch: int) -> None:
        self._made: list[Tensor] = []
        self._lasting = 0
        self._current = Stream()
        self._patch_cuda(arch)
        for name in _FACTORIES:
            setattr(torch, name, self._on_host(getattr(torch, name)))
        for name in _METHODS:
            setattr(torch.Tensor, name, self._on_host(getattr(torch.Tensor, name)))
        torch.Tensor.device = property(lambda tensor: DEVICE)  # type: ignore[assignment,method-assign]
        torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment,method-assign]
        torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[assignment,method-assign]

    def tensors(self) -> Iterator[Range]:
        for tensor in self._made:
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def know(self, tensors: Iterable[Tensor | None]) -> None:
        self._made += [tensor for tensor in tensors if tensor is not None]

    def streams(self) -> range:
        return range(Stream.created)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What has been made so far lasts until the end of the block, and is then gone like all that was made in it."""
        before, self._lasting = self._lasting, len(self._made)
        yield
        self._lasting = before
        self.forget()

    def forget(self) -> None:
        del self._made[self._lasting :]

    def _on_host(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **options: Any) -> Tensor:
            options.pop("device", None)
            options.pop("pin_memory", None)
            tensor = make(*args, **options)
            self._made.append(tensor)
            return tensor

        return made

    def _patch_cuda(self, arch: int) -> None:
        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, self._current = self._current, chosen
            yield
            self._current = before

        @contextmanager
        def device(chosen: Any) -> Iterator[None]:
            yield

        replaced = {
            "Stream": Stream,
            "Event": Event,
            "stream": stream,
            "device": device,
            "current_stream": lambda device=None: self._current,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "get_device_capability": lambda device=None: divmod(arch, 10),
            "get_device_properties": lambda device=None: Properties(arch),
        }
        for name, value in replaced.items():
            setattr(torch.cuda, name, value)
