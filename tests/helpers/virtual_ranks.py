"""R ranks of the kernels' protocol in one process, for tests in Triton's interpreter."""

import dataclasses
import math
import mmap
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fusedcomm.bench import launch_now
from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.memory.topology import tf32_allowed
from fusedcomm.plan import launches, tiles
from fusedcomm.plan.builder import Builder, Device, Memory, RmsNorm, layout_of
from fusedcomm.plan.chunk_matmul import GatheredMatmul
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.geometry.spans import RoundSpans
from fusedcomm.plan.tiles import TileConfig
from fusedcomm.run import python_executor
from tests.helpers.op_problems import as_list
from tests.helpers.problems import GATHERS, Inputs, Problem, expected, expected_by_product, integers

GUARD = 0xA5
NOT_A_NUMBER = 0xFF  # in every byte of a float of any type
FINGERPRINT = 0x5A17C3
ARCHITECTURE = 0  # of Triton's interpreter; with 90 it loads by descriptors
NUM_PROGRAMS = {"push": 3, "pack": 2, "gather": 3, "copy-out": 2, "copy-out beside": 2}


class FewPrograms(Device):
    def num_programs(self, kind: str) -> int:
        return NUM_PROGRAMS[kind]


class VirtualRank:
    """One rank's view of segments that lie in this process."""

    def __init__(self, rank: int, segments: list[Tensor], slot_bytes: int, num_slots: int, timeout_s: float) -> None:
        self.rank, self.group_size = rank, len(segments)
        self.layout = HeaderLayout(self.group_size)
        self.segment_layout = self.layout.for_kernels._replace(num_slots=num_slots)
        self.segments = torch.tensor([segment.data_ptr() for segment in segments])
        self.buffers, self.segment = segments, segments[rank]
        self.device, self.kernels = torch.device("cpu"), dict[int, Any]()
        self.slot_bytes = slot_bytes
        self.record = torch.zeros(8 + 2 * self.group_size, dtype=torch.int64)
        self.word(self.layout.timeout)[0] = int(timeout_s * 1e9)
        self.word(self.layout.record)[0] = self.record.data_ptr()

    def device_facts(self) -> Device:
        return FewPrograms(shares_gpu=True, architecture=ARCHITECTURE, triton=(3, 7), allow_tf32=tf32_allowed())

    def memory_facts(self) -> Memory:
        return Memory(
            self.rank, self.group_size, self.slot_bytes, self.slot_bytes, self.slot_bytes, self.segment_layout
        )

    def empty(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        return torch.full([*shape], float("nan")).to(dtype)

    def word(self, offset: int, count: int = 1) -> Tensor:
        return self.segment[offset : offset + 8 * count].view(torch.int64)

    @property
    def epoch(self) -> int:
        return int(self.word(self.layout.epoch))

    @property
    def broken(self) -> list[int]:
        return self.word(self.layout.broken, self.group_size).tolist()

    def assert_idle(self, epoch: int, failed: bool = False) -> None:
        """Check that nothing is half counted between calls: ``epoch`` rounds are over."""
        assert self.epoch == epoch and bool(self.record.any()) == failed
        assert int(self.word(self.layout.arrivals)) == 0
        assert not self.word(self.layout.tiles_done, self.group_size).any()
        assert (self.segment[-64:] == GUARD).all()


def virtual_ranks(group_size: int, slot_bytes: int, num_slots: int = 2, timeout_s: float = 60) -> list[VirtualRank]:
    slot_bytes = -(-slot_bytes // 128) * 128
    header = HeaderLayout(group_size).header_bytes
    segments = []
    for _ in range(group_size):
        segment = torch.zeros(header + 2 * slot_bytes + 64, dtype=torch.uint8)
        segment[header:] = NOT_A_NUMBER
        segment[-64:] = GUARD
        segments.append(segment)
    return [VirtualRank(rank, segments, slot_bytes, num_slots, timeout_s) for rank in range(group_size)]


def sizes_and_names(names: Iterable[str], on_three: Collection[str]) -> list[tuple[int, str]]:
    """Each case once, on 2 ranks or on 3, where src_rank - 1 and src_rank + 1 differ: Triton's interpreter is slow."""
    names = list(names)
    assert set(on_three) <= set(names)
    return [(3 if name in on_three else 2, name) for name in names]


def guarded(shape: list[int], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A NaN tensor between NaNs that nobody may write."""
    numel = math.prod(shape)
    buffer = torch.full((numel + 64,), float("nan"), dtype=dtype)
    return buffer[32 : 32 + numel].view(shape), (buffer[:32], buffer[32 + numel :])


def assert_results(padded: list[tuple[Tensor, tuple[Tensor, Tensor]]], expected: list[Tensor]) -> None:
    """Results are bit-equal, nothing is written beside them. ``padded``: of `guarded`."""
    for (out, guards), value in zip(padded, expected, strict=True):
        torch.testing.assert_close(out, value, rtol=0, atol=0)
        assert all(torch.isnan(guard).all() for guard in guards)


def flag(epoch: int, fingerprint: int = FINGERPRINT) -> int:
    return epoch << 24 | fingerprint


def record(kind: int, epoch: int, rank: int, flags: list[int], bad: list[int]) -> list[int]:
    return [2, kind, epoch, rank, FINGERPRINT, 0, 0, 0, *flags, *bad]


def overflow_is_an_error(debug: bool = True) -> AbstractContextManager[object]:
    """Triton's own check of 32-bit sums, differences and products, in lanes behind a mask as well."""
    from triton.runtime.interpreter import interpreter_builder

    checked = dataclasses.replace(interpreter_builder.options, debug=debug, sanitize_overflow=True)
    return mock.patch.object(interpreter_builder, "options", checked)


@contextmanager
def only_programs(choose: Callable[[int], list[int]]) -> Iterator[None]:
    """Each program has one tile, and of ``num_tiles`` programs those of ``choose(num_tiles)`` run."""
    from triton.runtime.interpreter import interpreter_builder

    chosen: list[int] = []
    dims: list[int] = []

    def num_programs(s: Any, kind: str, num_tiles: int, *_: int) -> int:
        chosen[:], dims[:] = choose(num_tiles), (num_tiles, 1, 1)
        return len(chosen)

    def set_dim(*_: int) -> None:
        interpreter_builder.grid_dim = tuple(dims)

    def set_index(x: int, *_: int) -> None:
        interpreter_builder.grid_idx = (chosen[x], 0, 0)

    with (
        mock.patch.object(launches, "programs", num_programs),
        mock.patch.object(interpreter_builder, "set_grid_dim", set_dim),
        mock.patch.object(interpreter_builder, "set_grid_idx", set_index),
    ):
        yield


def large_ranks(group_size: int, slot_bytes: int) -> list[VirtualRank]:
    """Ranks whose slots are zeros; a page takes memory once it is touched."""
    num_bytes = HeaderLayout(group_size).segment_bytes(slot_bytes)
    segments = [sparse(num_bytes, torch.uint8) for _ in range(group_size)]
    return [VirtualRank(rank, segments, slot_bytes, 2, 60) for rank in range(group_size)]


def slot_of(rank: VirtualRank, epoch: int, dtype: torch.dtype) -> torch.Tensor:
    start = rank.layout.slot(epoch, rank.slot_bytes)
    return rank.segment[start : start + rank.slot_bytes].view(dtype)


def signalled(rank: VirtualRank, epoch: int, fingerprint: int) -> None:
    rank.word(rank.layout.flag(epoch, 0), rank.group_size)[:] = epoch << 24 | fingerprint


MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it before Python 3.13
_BEFORE = 2**31  # elements: an index that has wrapped to a negative one finds a zero, and no end of the memory


def sparse(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A flat tensor of zeros. The test is skipped where the kernel reserves no more than there is."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    num_bytes = (_BEFORE + numel) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except (OSError, MemoryError) as error:
        pytest.skip(f"this machine must reserve {num_bytes} bytes that are not used, but cannot ({error})")
    return torch.frombuffer(memory, dtype=dtype)[_BEFORE:]


def unpack_and_norm(normed: Tensor, out: Tensor, weight: Tensor, spans: Any, on: Any, number: int, own: bool) -> None:
    """Launch unpack_norm_kernel ``on`` a workspace. ``number``: the call's fingerprint."""

    def program(s: Builder, normed: Tensor, out: Tensor, weight: Tensor) -> None:
        launches.unpack(s, out, spans, norm=RmsNorm(normed, weight, 1e-5), own=own, arrived=True)

    launch_now.prepared(program, on, number, normed, out, weight)()


# Calls of ops by kernels alone, on virtual ranks in Triton's interpreter, against the oracle of problems.py.
def by_name(problems: Iterable[Problem]) -> dict[str, Problem]:
    return {problem.name: problem for problem in problems}


def by_tma(patch: pytest.MonkeyPatch, describe: str, config: TileConfig) -> list[Any]:
    """Take the path of sm_90 and later, by boxes. Returns what the function of launches describes, by launch."""
    described, original = [], getattr(launches, describe)

    def counted(*args: Any) -> Any:
        described.append(args)
        return original(*args)

    patch.setattr("tests.helpers.virtual_ranks.ARCHITECTURE", 90)
    patch.setattr(tiles, "BLOCK_K", 16)
    patch.setattr(tiles, "matmul_config", lambda *args: config)
    patch.setattr(launches, describe, counted)
    return described


def exchange_of(problem: Problem, group_size: int) -> Exchange:
    x, w, _ = integers(problem, 0, group_size)
    return problem.exchange(x, w, group_size)


def check_calls(
    problem: Problem,
    group_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    num_rounds: int = 1,
    num_calls: int = 1,
    by_product: bool = False,
    own: bool = True,
) -> None:
    """Results are bit-equal, nothing is written beside them. ``own``: the own chunk goes through the slot."""
    exchange = exchange_of(problem, group_size)
    chunk_numel = max(exchange.chunk_numel // num_rounds, exchange.row_numel)
    rounds = exchange.rounds(chunk_numel)
    assert len(rounds) >= num_rounds
    ranks = virtual_ranks(group_size, group_size * chunk_numel * dtype.itemsize)
    for seed in range(num_calls):
        inputs = [integers(problem, rank.rank, group_size, dtype, seed) for rank in ranks]
        outs = [[guarded(shape, dtype) for shape in _result_shapes(problem, exchange, by_product)] for _ in ranks]
        for spans in rounds:
            calls = [
                _gathered(problem, exchange, spans, rank, each, [out for out, _ in results], by_product, own)
                if problem.op in GATHERS
                else _pushed(problem, exchange, spans, rank, each, results[0][0])
                for rank, each, results in zip(ranks, inputs, outs, strict=True)
            ]
            for _ in zip_longest(*calls):  # all ranks send before any waits
                pass
        wanted = [as_list(each) for each in expected(problem, group_size, dtype, seed)]
        if by_product:
            copies = expected_by_product(problem, group_size, dtype, seed)
            wanted = [[*results, copy] for results, copy in zip(wanted, copies, strict=True)]
        for results, values in zip(outs, wanted, strict=True):
            assert_results(results, values)
    for rank in ranks:
        rank.assert_idle(len(rounds) * num_calls * (2 if problem.op == "matmul_all_reduce" else 1))


def run_now(program: Callable[..., None], *tensors: Tensor | None) -> None:
    memory = CallMemory(0, 1, "", torch.device("cpu"))
    inputs = [None if t is None else layout_of(t) for t in tensors]
    s = Builder(memory.memory_facts(), memory.device_facts(), inputs)
    program(s, *s.inputs)
    python_executor.run(s.finish(), memory, "", 0, tensors)


def _multiply_chunk(
    s: Builder, out: Tensor, w: Tensor, bias: Tensor | None, chunk: Tensor, *, exchange: Any, spans: Any, rank: int
) -> None:
    GatheredMatmul(s, out, w, bias, exchange).chunk(spans, rank, chunk)


def _result_shapes(problem: Problem, exchange: Exchange, by_product: bool) -> list[list[int]]:
    if problem.op in GATHERS:
        return [*exchange.out_shapes, *[exchange.shape] * by_product]
    return [exchange.out_shape]


def _pushed(
    problem: Problem, exchange: Exchange, spans: RoundSpans, rank: VirtualRank, inputs: Inputs, out: Tensor
) -> Iterator[None]:
    x, w, bias = inputs
    scale = 1 / rank.group_size if problem.reduce_op == "avg" else 1.0
    partial, bias = (bias, None) if problem.partial or problem.op == "matmul_all_to_all" else (None, bias)
    launch_now.push(x, w, partial, spans, rank, FINGERPRINT)
    yield
    if problem.op == "matmul_all_to_all":
        launch_now.unpack(out, spans, rank, FINGERPRINT)
    elif problem.op == "matmul_reduce_scatter":
        launch_now.reduce(out, spans, bias, scale, rank, FINGERPRINT)
    else:
        block = torch.full(exchange.block, math.nan, dtype=x.dtype)
        launch_now.reduce(block, spans, None, scale, rank, FINGERPRINT)
        yield
        launch_now.pack(block, spans, rank, FINGERPRINT)
        yield
        launch_now.unpack(out, spans, rank, FINGERPRINT)


def _gathered(
    problem: Problem, exchange: Any, spans: Any, rank: Any, inputs: Any, outs: list[Tensor], by_product: bool, own: bool
) -> Iterator[None]:
    x, w, bias = inputs
    ws, biases = (w, bias) if isinstance(problem.n, tuple) else ([w], [bias])
    epoch = rank.epoch
    launch_now.pack(x, spans, rank, FINGERPRINT, own=own)
    yield
    chunk = spans.pack.view(x.view(-1), 0, rank.rank)
    for i, (out, w, bias) in enumerate(zip(outs, ws, biases, strict=False)):
        last = i == len(ws) - 1 and not by_product
        if not own:
            multiply = partial(_multiply_chunk, exchange=exchange, spans=spans, rank=rank.rank)
            run_now(multiply, out, w, bias, chunk)
        launch_now.gather_matmul(out, w, bias, spans, rank, FINGERPRINT, end_round=last, own=own)
        assert rank.epoch == epoch + last
    if by_product:
        launch_now.unpack(outs[-1], spans, rank, FINGERPRINT)
