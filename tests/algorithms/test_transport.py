"""The memory that chunked takes on a GPU for what is on its way, with stand-ins for streams and the allocator.

The host runs ahead of the GPU here for good. So memory that an event of the side stream holds never comes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.algorithms import chunked, kernel_launch
from fusedcomm.algorithms.transport import CudaTransport
from fusedcomm.geometry import shapes
from fusedcomm.runtime import signals
from fusedcomm.runtime.workspace import Call, Round
from fusedcomm.testing.virtual import VirtualGroup

NUM_RANKS, NUM_ROUNDS, ROWS, K, N = 4, 8, 8 * 4, 6, 16
CHUNK_BYTES = ROWS // NUM_ROUNDS * (N // NUM_RANKS) * 4  # one round's, for one peer


class Stream:
    def __init__(self) -> None:
        self.launched = 0
        self.joined = 0  # how much of the other stream's work comes before what is launched here next

    def wait_stream(self, other: Stream) -> None:
        self.joined = other.launched


class Gpu(TorchDispatchMode):
    """Two streams, and an allocator of blocks for the main one, as torch.cuda's caching allocator gives them away."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = Stream(), Stream()
        self.current = self.main
        self.free: list[int] = []  # sizes
        self.reserved = 0  # bytes
        self.last_read: dict[int, int] = {}  # by address of what is in use: the side stream's work that reads it
        self.recorded: set[int] = set()  # addresses
        self.too_early = 0  # blocks that the main stream may overwrite before the side stream has read them

    def empty_like(self, t: Tensor) -> Tensor:
        block = t.new_empty(t.shape)
        if block.nbytes in self.free:
            self.free.remove(block.nbytes)
        else:
            self.reserved += block.nbytes
        self.last_read[block.data_ptr()] = 0
        weakref.finalize(block, self._freed, block.data_ptr(), block.nbytes)
        return block

    def _freed(self, address: int, num_bytes: int) -> None:
        last = self.last_read.pop(address)
        if address in self.recorded:
            self.recorded.remove(address)
            return
        self.too_early += last > self.main.joined
        self.free.append(num_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current is self.side:
            self.side.launched += 1
            for each in pytree.tree_leaves(args):
                if isinstance(each, Tensor) and (start := each.untyped_storage().data_ptr()) in self.last_read:
                    self.last_read[start] = self.side.launched
        return func(*args, **(kwargs or {}))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    monkeypatch.setattr(torch, "empty_like", found.empty_like)
    monkeypatch.setattr(Tensor, "record_stream", lambda t, stream: found.recorded.add(t.data_ptr()))
    monkeypatch.setattr(torch.cuda, "stream", found.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.main)
    for name in ("begin_push", "signal", "wait_source", "finish"):
        monkeypatch.setattr(signals, name, lambda *args, **options: None)
    monkeypatch.setattr(kernel_launch, "unpack", lambda *args: None)
    return found


def push(gpu: Gpu, transport: type[CudaTransport], monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's push in NUM_ROUNDS rounds; its peers' slots are memory that it writes."""
    exchange = shapes.matmul_all_to_all((ROWS, K), (K, N), None, 0, 1, NUM_RANKS)
    workspace = VirtualGroup(NUM_RANKS, CHUNK_BYTES * NUM_RANKS, "cpu").workspaces[0]
    assert len(exchange.rounds(workspace.max_chunk_numel(4))) == NUM_ROUNDS
    monkeypatch.setattr(workspace, "side_stream", lambda: gpu.side)
    monkeypatch.setattr(chunked, "transport_of", transport)
    x, w = torch.randn(ROWS, K), torch.randn(K, N)
    with gpu:
        chunked.push_matmul(Call("push", 1, exchange, workspace), x, w, None)
    last = (x @ w).view(NUM_ROUNDS, -1, NUM_RANKS, N // NUM_RANKS)[-1]  # [rows, dst_rank, columns]
    for dst_rank in range(NUM_RANKS):
        start = workspace.layout.slot(NUM_ROUNDS, workspace.slot_bytes)
        sent = workspace.buffers[dst_rank][start : start + CHUNK_BYTES].view(torch.float32)
        torch.testing.assert_close(sent.view(-1, N // NUM_RANKS), last[:, dst_rank])


def test_each_round_takes_the_memory_of_the_last_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        push(gpu, CudaTransport, monkeypatch)
        assert gpu.reserved == (NUM_RANKS - 1) * CHUNK_BYTES
        assert not gpu.last_read and not gpu.too_early


def test_recorded_streams_would_hold_the_memory_of_all_rounds(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: 24 chunks where 3 are enough."""

    class Records(CudaTransport):
        def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
            super().send(round, dst_rank, chunk)
            chunk.record_stream(self.side)

    push(gpu, Records, monkeypatch)
    assert gpu.reserved == NUM_ROUNDS * (NUM_RANKS - 1) * CHUNK_BYTES


def test_a_gather_holds_its_input_no_longer_than_the_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """x is the caller's, who may free it when the call returns: the main stream comes after all reads by then."""
    exchange = shapes.all_gather_matmul((ROWS, K), ((K, N),), 0, NUM_RANKS)
    workspace = VirtualGroup(NUM_RANKS, ROWS // NUM_ROUNDS * K * 4 * NUM_RANKS, "cpu").workspaces[0]
    monkeypatch.setattr(workspace, "side_stream", lambda: gpu.side)
    monkeypatch.setattr(chunked, "transport_of", CudaTransport)
    x = gpu.empty_like(torch.empty(ROWS, K)).fill_(1)
    with gpu:
        chunked.gather_matmul(Call("gather", 1, exchange, workspace), x, [torch.ones(K, N)], [None], False)
    assert gpu.last_read[x.data_ptr()] >= gpu.side.launched - 1  # the copy to the last peer
    del x
    assert len(gpu.free) == 1 and not gpu.too_early and not gpu.recorded


def test_memory_that_is_not_held_until_the_join_is_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control."""

    class Drops(CudaTransport):
        def send(self, round: Round, dst_rank: int, chunk: Tensor) -> None:
            super().send(round, dst_rank, chunk)
            self.held.clear()

    push(gpu, Drops, monkeypatch)
    assert gpu.too_early > 0
