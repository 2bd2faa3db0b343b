"""DeviceToHost: values on CPU, in compiled graphs and on a GPU; and on a made-up GPU what waits for what."""

import contextlib
import copy
import pickle
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from fusedcomm import DeviceToHost
from fusedcomm.run import device_to_host
from tests.helpers.on_ranks import on_ranks
from tests.helpers.tiers import nightly_but

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def exactly(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


class Stream:
    """Stands for a stream: runs what it was given, in order, when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []
        self.log: list[Any] = []

    def add(self, what: str, fn: Callable[[], Any]) -> None:
        self.log.append(what)
        self.queue.append(fn)

    def run(self) -> None:
        while self.queue:
            self.queue.pop(0)()


class Event:
    failure: Exception | None = None

    def __init__(self, *, blocking: bool) -> None:
        self.blocking, self.reached, self.waits = blocking, False, 0

    def record(self, stream: Stream) -> None:
        self.stream = stream
        stream.add("event", lambda: setattr(self, "reached", True))

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.waits += 1
        if self.failure:
            raise self.failure
        self.stream.run()
        assert self.reached


class OnGpu(Tensor):
    """A tensor of the made-up GPU: the stream makes the copies from it."""

    is_cuda = True
    stream: Stream

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            host, source = args
            assert kwargs == {"non_blocking": True} and source.is_contiguous() and not source.is_conj()
            cls.stream.add("copy", lambda: host.copy_(source.as_subclass(Tensor)))
            return host
        return super().__torch_function__(func, types, args, kwargs or {})

    def record_stream(self, stream: Any) -> None:
        assert stream is self.stream
        stream.log.append("record_stream")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """The current stream of a made-up GPU."""
    stream = OnGpu.stream = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        device_to_host, "_pinned", lambda source: torch.full(source.shape, float("nan"), dtype=source.dtype)
    )
    yield stream
    del OnGpu.stream


def on_gpu(t: Tensor) -> Tensor:
    return t.as_subclass(OnGpu)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_host_goes_on_until_it_waits(gpu: Stream, blocking: bool) -> None:
    copied = DeviceToHost(on_gpu(torch.arange(4.0)), blocking=blocking)
    assert gpu.log == ["copy", "event", "record_stream"]
    assert not copied.ready() and len(gpu.queue) == 2  # nothing has run
    event = copied._done
    assert event.blocking is blocking and event.waits == 0
    lazy = copied.lazy()
    assert event.waits == 0
    exactly(copied.wait(), torch.arange(4.0))
    assert copied.ready() and copied.wait() is copied.wait() and lazy.data_ptr() == copied.wait().data_ptr()
    assert event.waits == 1


@pytest.mark.parametrize("name", ["strided", "conjugate", "negative"])
def test_the_stream_gets_a_copy_that_needs_nothing_more_on_the_host(gpu: Stream, name: str) -> None:
    source = SOURCES[name]()
    exactly(DeviceToHost(on_gpu(source)).wait(), source.resolve_conj().resolve_neg())


def test_a_capture_is_refused_before_anything_is_given_to_the_stream(
    gpu: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph: start the copy after the replay"):
        DeviceToHost(on_gpu(torch.ones(2)))
    assert gpu.log == []
    exactly(DeviceToHost(torch.ones(2)).wait(), torch.ones(2))  # on CPU a capture takes no notice


def test_a_failure_of_the_device_is_raised_by_every_wait(gpu: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = DeviceToHost(on_gpu(torch.ones(2)))
    monkeypatch.setattr(Event, "failure", RuntimeError("CUDA error"))
    for use in (copied.wait, copied.wait, lambda: copied.lazy().tolist()):
        with pytest.raises(RuntimeError, match="CUDA error"):
            use()


def test_a_block_ends_with_the_copy_complete_unless_an_exception_leaves_it(gpu: Stream) -> None:
    with DeviceToHost(on_gpu(torch.ones(2))) as copied:
        assert not copied.ready()
    assert copied.ready()
    with pytest.raises(KeyError), DeviceToHost(on_gpu(torch.ones(2))) as copied:
        raise KeyError
    assert not copied.ready()
    exactly(copied.wait(), torch.ones(2))


SOURCES = {
    "contiguous": lambda: torch.randn(3, 4),
    "transposed": lambda: torch.randn(3, 4).t(),
    "strided": lambda: torch.randn(6, 8)[::2, 1::3],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "empty": lambda: torch.empty(0, 5),
    "scalar": lambda: torch.tensor(7),
    "bfloat16": lambda: torch.randn(5, dtype=torch.bfloat16),
    "bool": lambda: torch.tensor([True, False]),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: nn.Parameter(torch.randn(3)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_values_of_every_kind_of_source(name: str) -> None:
    source = SOURCES[name]()
    copied = DeviceToHost(source)
    got, want = copied.wait(), source.detach().clone()
    assert type(got) is Tensor and got.is_contiguous() and not got.requires_grad and copied.ready()
    assert not got.is_conj() and not got.is_neg()
    exactly(got, want.resolve_conj().resolve_neg())


class Named(Tensor):
    pass


def test_what_is_no_plain_tensor() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    assert type(DeviceToHost(torch.ones(2).as_subclass(Named)).wait()) is Tensor
    for source, text in (
        ([1.0], "source must be a tensor, got list"),
        (TwoTensor(torch.ones(2), torch.ones(2)), "must be a plain tensor, got TwoTensor: pass the tensor inside"),
        (torch.ones(2, device="meta"), "dense tensor on CPU or CUDA, got torch.strided on meta"),
        (torch.eye(2).to_sparse(), "dense tensor on CPU or CUDA, got torch.sparse_coo on cpu"),
    ):
        with pytest.raises(ValueError, match=text):
            DeviceToHost(source)


@on_ranks(2)
def test_the_result_of_a_functional_collective(rank: int) -> None:
    pending = funcol.all_reduce(torch.full((3,), rank + 1.0), "sum", dist.group.WORLD)
    assert type(pending) is not Tensor
    got = DeviceToHost(pending).wait()
    assert type(got) is Tensor
    exactly(got, torch.full((3,), 3.0))


T = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
USES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda t: (t.shape, t.dtype, t.T),
    "method": lambda t: (t.sum(0).tolist(), t[1, 0].item(), len(t)),
    "bool": lambda t: bool(t[0, 0] > 0) and not bool((t < 0).any()),
    "iteration": lambda t: ([row.tolist() for row in t], list(reversed(t)), torch.cat([*t])),
    "indexing": lambda t: (t[:, 1], 3.0 in t, 9.0 in t),
    "arithmetic": lambda t: (t + 1, 2 - t, t * t, t @ t, -t, 2**t, t // 2, 7 % t, abs(t), 1 / t),
    "with a tensor": lambda t: (T + t, t + T, T @ t, t != T),
    "comparison": lambda t: (t > 2, t == t, t != 1, ~(t > 2), (t > 2) | (t < 2), (t > 2) ^ True),
    "function": lambda t: (torch.stack([t, t]), torch.add(T, t, alpha=2), torch.where(t > 2, t, other=T)),
    "format": lambda t: (repr(t), str(t), f"{t[0, 0]:.2f}"),
    "copy": lambda t: (copy.copy(t), copy.deepcopy(t), pickle.loads(pickle.dumps(t))),
}


@pytest.mark.parametrize("name", USES)
def test_lazy_is_used_as_the_tensor(gpu: Stream, name: str) -> None:
    copied = DeviceToHost(on_gpu(T.clone()))
    event, lazy = copied._done, copied.lazy()
    got, want = USES[name](lazy), USES[name](T)
    assert event.waits == 1 and type(got) is type(want)
    assert str(got) == str(want)


def test_lazy_scalars_convert() -> None:
    lazy = DeviceToHost(torch.tensor(3)).lazy()
    assert (int(lazy), float(lazy), complex(lazy), bool(lazy), [10, 11, 12, 13][lazy]) == (3, 3.0, 3 + 0j, True, 13)
    assert lazy == 3 and lazy in {lazy} and torch.overrides.is_tensor_like(lazy)


def test_lazy_is_written_to_as_the_tensor() -> None:
    copied = DeviceToHost(torch.zeros(3))
    lazy = copied.lazy()
    lazy[1] = 5
    lazy.note = "here"
    result = lazy
    result += 1
    assert result is copied.wait() and vars(result) == {"note": "here"}
    assert torch.add(lazy, 1, out=lazy) is copied.wait()
    exactly(copied.wait(), torch.tensor([2.0, 7.0, 2.0]))
    del lazy.note
    assert not hasattr(copied.wait(), "note")


def copied_then_written(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    copied = DeviceToHost(y)
    y.add_(1)
    x.mul_(3)
    with DeviceToHost(x) as of_input:
        x.zero_()
    assert copied.ready() and of_input.ready()
    return copied.wait(), copied.wait() + of_input.wait(), of_input.lazy() * 2, y


@pytest.mark.parametrize("backend", nightly_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_a_compiled_graph_passes_through_it_and_writes_later(backend: str) -> None:
    start = torch.randn(3, 4)
    x, compiled_x = start.clone(), start.clone()
    expected = copied_then_written(x)
    got = torch.compile(copied_then_written, fullgraph=True, backend=backend)(compiled_x)
    for one, other in zip(got, expected, strict=True):
        assert type(one) is Tensor
        exactly(one, other * 1)
    exactly(expected[0], start * 2)  # the control: written before the copy, these would differ
    exactly(expected[2], start * 6)
    exactly(compiled_x, x)


def test_it_goes_into_and_out_of_compiled_graphs() -> None:
    x = torch.randn(3, 4, requires_grad=True)

    def start(x: Tensor) -> DeviceToHost:
        return DeviceToHost(x * 2)

    def end(copied: DeviceToHost, x: Tensor) -> Tensor:
        return copied.wait() + x

    started = torch.compile(start, fullgraph=True, backend="aot_eager")(x)
    assert not started.wait().requires_grad
    ended = torch.compile(end, fullgraph=True, backend="aot_eager")(DeviceToHost(x * 2), x)
    exactly(ended, x * 3)
    added = torch.compile(torch.add, fullgraph=True, backend="aot_eager")(x, DeviceToHost(x * 2).lazy())
    exactly(added, x * 3)


class TorchEvent(torch.Event):
    """An event of torch's, as Dynamo knows them."""

    waits = 0

    def synchronize(self) -> None:
        TorchEvent.waits += 1


def test_compiled_code_waits_in_every_call_and_dynamo_does_not_see_the_event() -> None:
    compiled = torch.compile(lambda copied, x: copied.wait() + x, backend="aot_eager")
    TorchEvent.waits = 0
    for calls in range(1, 4):
        copied, event = DeviceToHost(torch.ones(2)), TorchEvent(device="cpu")
        copied._done, copied._has_event = event, True  # type: ignore[assignment]
        exactly(compiled(copied, torch.ones(2)), torch.full((2,), 2.0))
        assert TorchEvent.waits == calls and copied.ready()
        assert weakref.getweakrefcount(event) == 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("blocking", "side_stream"), [(True, False), (False, True)])
def test_on_a_gpu_the_host_goes_on_and_the_source_can_go(blocking: bool, side_stream: bool) -> None:
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    DeviceToHost(torch.ones(1 << 20, device="cuda")).wait()  # pinned memory is there from here on
    source = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # half a second
        copied = DeviceToHost(source, blocking=blocking)
    begun = time.perf_counter() - begin
    del source
    overwriting = [torch.zeros(1 << 20, device="cuda") for _ in range(4)]  # would take the source's memory
    assert not copied.ready() and begun < 0.1
    got = copied.wait()
    assert copied.ready() and got.is_pinned() and len(overwriting) == 4
    exactly(got, torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", SOURCES)
def test_on_a_gpu_values_of_every_kind_of_source(name: str) -> None:
    on_cpu = SOURCES[name]().detach()
    source = on_cpu.cuda().conj() if name == "conjugate" else on_cpu.cuda()
    got = DeviceToHost(source).wait()
    assert got.is_contiguous() and got.device.type == "cpu"
    exactly(got, source.cpu().resolve_conj())
