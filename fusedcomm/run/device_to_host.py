"""A tensor on its way to the host: the copy is started at once, and waited for where its values are needed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

T = TypeVar("T")


class DeviceToHost:
    """Copy a tensor to the host without making the host wait: ``DeviceToHost(t).wait()`` equals ``t.detach().cpu()``.

    On CUDA the copy goes into pinned memory, on the current stream of the source's device, so after all earlier work of
    this stream. Its later work can write to the source, and the source can be freed at once; before a write on another
    stream, make that stream wait for this one. On CPU the copy is made before this returns, and the source can be
    written to at once.

    The result is detached, contiguous and a plain tensor of the source's shape and dtype. A source that is the result
    of a functional collective is waited for first: by the stream on CUDA, by the host on CPU. In code that
    torch.compile compiles, this is an ordinary copy, done where it is written, and nothing is refused: a copy of a
    wrapper is a wrapper; the wait for a copy from CUDA that was started outside breaks the graph. In a ``with``
    statement the end waits, unless an exception is on its way.

    Args:
        source: a dense tensor on CPU or CUDA, of any shape and dtype; of a wrapper as DTensor, the tensor inside.
        blocking: whether a host that waits sleeps until the device wakes it; otherwise it spins, which may answer some
            microseconds sooner and takes a whole core.

    Raises:
        ValueError: source is no dense tensor on CPU or CUDA, or a wrapper.
        RuntimeError: a CUDA graph is captured: nobody could wait for the copies of its replays.

    Example, on each of 2 ranks::

        copy = fusedcomm.DeviceToHost(torch.arange(3))
        total = sum(range(3))  # other work of the host
        assert copy.wait().sum() == total
    """

    def __init__(self, source: Tensor, *, blocking: bool = True) -> None:
        self._done: torch.cuda.Event | None = None
        self._has_event = False  # read by compiled code
        if torch.compiler.is_compiling():
            self._host = source.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            return
        source = _plain(source)
        with torch.inference_mode(False), torch.no_grad():  # it may be read, and written, in another mode
            if source.is_cuda:
                self._host, self._done = _copy_on_stream(source, blocking)
                self._has_event = True
            else:
                self._host = source.clone(memory_format=torch.contiguous_format).as_subclass(Tensor)

    def wait(self) -> Tensor:
        """Wait for the copy and return the tensor on the host, the same one every time.

        A failure on the device is raised here.
        """
        if torch.compiler.is_compiling() and self._has_event:
            return _outside_graphs(DeviceToHost.wait, self)
        done = self._done  # other threads may wait too
        if done is not None:
            done.synchronize()
            self._done = None
        return self._host

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        if torch.compiler.is_compiling() and self._has_event:
            return _outside_graphs(DeviceToHost.ready, self)
        done = self._done
        return done is None or done.query()

    def lazy(self) -> Any:
        """A stand-in for the tensor, which waits when it is first used; in compiled code the tensor itself.

        It serves in attributes, operators, conversions and functions of torch, but is no instance of torch.Tensor. An
        in-place operator gives back the tensor in its place.
        """
        return self.wait() if torch.compiler.is_compiling() else LazyTensor(self)

    def __enter__(self) -> DeviceToHost:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Waits, unless an exception is on its way: that is not held up, and the copy ends safely by itself."""
        if kind is None:
            self.wait()


def _outside_graphs(method: Callable[[DeviceToHost], T], copy: DeviceToHost) -> T:
    """Breaks the graph: Dynamo must not see the event.

    Torch 2.11 traces its wait away, and 2.11 and 2.12 keep weak references to it that they use when it is gone
    (pytorch/pytorch#183403): a segmentation fault.
    """
    from fusedcomm.run import outside_graphs

    return outside_graphs.call(method, copy)


class LazyTensor:
    """Stands for the tensor of a `DeviceToHost`: in attributes, operators, conversions and functions of torch.

    The first use waits; several in one call are all under way already, so waiting in turn costs no more than the
    slowest. It is no instance of torch.Tensor, and an in-place operator gives back the tensor in its place.
    """

    _copy: DeviceToHost

    def __init__(self, copy: DeviceToHost) -> None:
        object.__setattr__(self, "_copy", copy)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(cls, _tensor, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(_tensor(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_tensor(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_tensor(self), name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tensor(self).__reduce_ex__(protocol)

    def __dir__(self) -> list[str]:
        return dir(_tensor(self))


def _tensor(lazy: LazyTensor) -> Tensor:
    return lazy._copy.wait()


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: LazyTensor, *args: Any) -> Any:
        return getattr(_tensor(self), name)(*args)

    method.__name__ = name
    return method


# Python looks these up in the class, not by __getattr__.
_ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_CONVERSIONS = ("bool", "int", "float", "complex", "index", "repr", "str", "format")
_OTHERS = ("lt", "le", "eq", "ne", "gt", "ge", "neg", "pos", "abs", "invert")
_CONTAINER = ("len", "iter", "reversed", "contains", "getitem", "setitem")
_BINARY = tuple(kind + name for name in _ARITHMETIC + _BITWISE for kind in ("", "r", "i"))
for _name in (*_BINARY, *_OTHERS, *_CONVERSIONS, *_CONTAINER):
    if hasattr(Tensor, f"__{_name}__"):
        setattr(LazyTensor, f"__{_name}__", _forwarded(f"__{_name}__"))


def _plain(source: Tensor) -> Tensor:
    if not isinstance(source, Tensor):
        raise ValueError(f"source must be a tensor, got {type(source).__name__}")
    if hasattr(source, "trigger_wait"):  # functional collectives' AsyncCollectiveTensor
        source = source.trigger_wait()
    if is_traceable_wrapper_subclass(source):
        raise ValueError(f"source must be a plain tensor, got {type(source).__name__}: pass the tensor inside")
    if source.layout != torch.strided or source.device.type not in ("cpu", "cuda"):
        raise ValueError(f"source must be a dense tensor on CPU or CUDA, got {source.layout} on {source.device}")
    # lazy conjugates and negatives are resolved on the device: torch does it on the host, before the data arrive
    return source.detach().resolve_conj().resolve_neg()


def _copy_on_stream(source: Tensor, blocking: bool) -> tuple[Tensor, torch.cuda.Event]:
    """The tensor on the host, and the event after which it is complete."""
    with torch.cuda.device(source.device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("DeviceToHost cannot be captured in a CUDA graph: start the copy after the replay")
        stream = torch.cuda.current_stream()
        done = torch.cuda.Event(blocking=blocking)
        host = _pinned(source)
        # Both sides are contiguous, because otherwise torch copies through ordinary memory, and the host waits.
        host.copy_(source.contiguous(), non_blocking=True)
        done.record(stream)
    # The source may belong to another stream, which could otherwise reuse its memory before the copy is done.
    source.record_stream(stream)
    return host, done


def _pinned(source: Tensor) -> Tensor:
    # torch's pinned allocator keeps the memory until the copy is done, even if the host frees it early.
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
