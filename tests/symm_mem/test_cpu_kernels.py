"""torch.ops.symm_mem on CPU tensors, against gloo and plain programs, and torch's functions on them."""

import itertools
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor

from fusedcomm.symm_mem import cpu_kernels, enable_cpu
from fusedcomm.symm_mem.peers import Peers
from tests.helpers.on_ranks import on_ranks
from tests.helpers.symmetric_memory import CPU, Ranks, error_of, in_child, make, rendezvous, timeout

enable_cpu()
ops = torch.ops.symm_mem
NAME = "0"  # WORLD
SHAPE = (6, 12)  # 2 and 3 ranks divide the last dim
LATE_S = 0.004


def nan_like(t: Tensor) -> Tensor:
    return torch.full_like(t, torch.nan)


def symmetric(dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """A view into the middle of symmetric memory."""
    numel = torch.Size(shape).numel()
    base = symm_mem.empty(numel + 12, dtype=dtype, device=CPU).fill_(torch.nan)
    rendezvous(base)
    return base[4 : 4 + numel].view(shape)


def summed(parts: list[Tensor]) -> Tensor:
    acc = torch.zeros(parts[0].shape, dtype=torch.float32)
    for part in parts:
        acc = acc + part.float()
    return acc.to(parts[0].dtype)


# Each program gets the data of all ranks, its rank and symmetric memory, and returns what it got and what it must get.
Program = Callable[[list[Tensor], int, Tensor], tuple[Tensor, Tensor]]


def all_reduce(name: str) -> Program:
    def program(xs: list[Tensor], rank: int, t: Tensor) -> tuple[Tensor, Tensor]:
        if "copy" not in name:
            t.copy_(xs[rank])
        args = [t, xs[rank], "sum", NAME] if "copy" in name else [t, "sum", NAME]
        out = nan_like(t)
        got = getattr(ops, name)(*args, out) if name.endswith("_out") else getattr(ops, name)(*args)
        assert (got is out) == name.endswith("_out") and (got is t) == name.endswith("_reduce_")
        return got.clone(), summed(xs)

    return program


def reduce_scatter(split_last_dim: bool) -> Program:
    def program(xs: list[Tensor], rank: int, t: Tensor) -> tuple[Tensor, Tensor]:
        t.copy_(xs[rank])
        given, total = (each if split_last_dim else each.view(-1) for each in (t, summed(xs)))
        want = total.chunk(len(xs), -1)[rank]
        out = nan_like(want)
        ops.reduce_scatter_out(given, NAME, split_last_dim, out)
        return out, want

    return program


def all_gather(xs: list[Tensor], rank: int, t: Tensor) -> tuple[Tensor, Tensor]:
    got = ops._low_contention_all_gather(xs[rank].mT, NAME)
    return torch.ops._c10d_functional.wait_tensor(got), torch.cat([x.mT for x in xs])


def low_contention(op: str) -> Program:
    def program(xs: list[Tensor], rank: int, t: Tensor) -> tuple[Tensor, Tensor]:
        want = summed([x.float() for x in xs]) / (len(xs) if op == "avg" else 1)
        return ops._low_contention_reduce_scatter(xs[rank].mT, op, NAME), want.to(t.dtype).mT.chunk(len(xs))[rank]

    return program


PROGRAMS: dict[str, Program] = {
    **{
        name: all_reduce(name)
        for name in (
            *("one_shot_all_reduce", "one_shot_all_reduce_out", "one_shot_all_reduce_copy"),
            *("one_shot_all_reduce_copy_out", "two_shot_all_reduce_", "two_shot_all_reduce_out"),
        )
    },
    "reduce_scatter": reduce_scatter(split_last_dim=True),
    "reduce_scatter_flat": reduce_scatter(split_last_dim=False),
    "all_gather": all_gather,
    **{f"low_contention_{op}": low_contention(op) for op in ("sum", "avg")},
}


def values(round: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums are exact, and random numbers by turns."""
    generator = torch.Generator().manual_seed(100 * round + rank)
    integers = torch.randint(-8, 9, SHAPE, generator=generator)
    return (torch.randn(SHAPE, generator=generator) if round % 2 else integers).to(dtype)


def wrong_programs(
    rank: int, dtype: torch.dtype, num_rounds: int, late_s: float = LATE_S, skipped: int | None = None
) -> list[str]:
    """Calls back to back, one rank late after each barrier; nobody makes the barrier ``skipped`` (0: the meeting)."""
    size = dist.get_world_size()
    t, handle = symmetric(dtype), symm_mem.get_symm_mem_workspace(NAME, 4096)
    place = handle.get_buffer(rank, (handle.buffer_size // dtype.itemsize,), dtype)
    rounds = [[values(round, r, dtype) for r in range(size)] for round in range(num_rounds)]
    real, meet = Peers.barrier, cpu_kernels.same_call
    num_barriers: Counter[Peers] = Counter()
    late = 0

    def barrier(peers: Peers) -> None:
        num_barriers[peers] += 1
        if num_barriers[peers] != skipped:
            real(peers)
        if rank == late:
            time.sleep(late_s)

    @contextmanager
    def meeting(*args: Any, **arguments: Any) -> Iterator[None]:
        with nullcontext() if skipped == 0 else meet(*args, **arguments):
            yield
        if rank == late:
            time.sleep(late_s)

    wrong = []
    for name, program in PROGRAMS.items():
        program(rounds[0], rank, t)  # makes the workspace
        dist.barrier()
        with mock.patch.object(Peers, "barrier", barrier), mock.patch.object(cpu_kernels, "same_call", meeting):
            for round, xs in enumerate(rounds):
                late = round // 2 % size  # two rounds in turn: it comes late to the second
                got, want = program(xs, rank, t)
                for shared in (t, place):  # who has returned may write it
                    shared.fill_(torch.nan)
                if not torch.equal(got, want):
                    wrong.append(name)
        dist.barrier()
    return wrong


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float32), (3, torch.bfloat16)], ids=str)
def test_values_back_to_back(ranks: Ranks, world_size: int, dtype: torch.dtype) -> None:
    assert ranks(world_size).run(wrong_programs, dtype, 8) == [[]] * world_size


COPIES = {name for name in PROGRAMS if "copy" in name or name.startswith(("all_gather", "low"))}  # behind the meeting


@pytest.mark.thorough
@pytest.mark.parametrize("skipped", range(3))
def test_without_one_of_the_barriers_every_op_is_wrong(ranks: Ranks, skipped: int) -> None:
    results = ranks(2).run(wrong_programs, torch.float32, 4, 10 * LATE_S, skipped)
    has_it = (set(PROGRAMS) - COPIES, set(PROGRAMS), COPIES)[skipped]
    assert set().union(*results) == has_it


@on_ranks(3)
def test_fused_ops_equal_torchs_fallbacks(rank: int) -> None:
    torch.manual_seed(rank)
    world_size = 3

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape).float()

    for gather_dim in range(3):
        shape = (2, 3, 4)
        k = shape[-1] * (world_size if gather_dim == 2 else 1)
        a, bs = integers(*shape), [integers(k, 5), integers(k, 6).contiguous()]
        gathered, results = ops.fused_all_gather_matmul(a, bs, gather_dim, NAME)
        want_a, wanted = symm_mem._fused_all_gather_matmul_fallback(a, bs, gather_dim, NAME)
        for got, want in zip([gathered, *results], [want_a, *wanted], strict=True):
            assert torch.equal(got, want)
            assert got.stride() == want.stride()
        none, (result, _) = ops.fused_all_gather_matmul(a, bs, gather_dim, NAME, return_A=False)
        assert none is None and torch.equal(result, results[0])
    for scatter_dim in range(3):
        a, b = integers(6, 12, 4), integers(4, 18)
        want = symm_mem._fused_matmul_reduce_scatter_fallback(a, b, "sum", scatter_dim, NAME)
        got = ops.fused_matmul_reduce_scatter(a, b, "sum", scatter_dim, NAME)
        assert torch.equal(got, want) and got.stride() == want.stride()
        assert torch.allclose(ops.fused_matmul_reduce_scatter(a, b, "avg", scatter_dim, NAME), want / world_size)


@on_ranks(2)
def test_get_remote_tensors_of_a_view(rank: int) -> None:
    t = symmetric(torch.bfloat16).fill_(rank)
    symm_mem.rendezvous(t, NAME).barrier()
    assert [r.unique().tolist() for r in ops.get_remote_tensors(t[2:], NAME)] == [[0], [1]]
    symm_mem.rendezvous(t, NAME).barrier()


@on_ranks(2)
def test_a_forked_child_has_no_part(rank: int) -> None:
    t = symmetric(torch.float32).fill_(1)
    ops.one_shot_all_reduce(t, "sum", NAME)
    with timeout(1):
        assert in_child(lambda: "forked from rank" in error_of(lambda: ops.one_shot_all_reduce(t, "sum", NAME))) == 0
    dist.barrier()
    assert (ops.one_shot_all_reduce(t, "sum", NAME) == 2).all()


@on_ranks(2)
def test_a_peer_that_does_not_come(rank: int) -> None:
    t = symmetric(torch.float32).fill_(1)
    ops.one_shot_all_reduce(t, "sum", NAME)  # the first call makes memory
    dist.barrier()
    if rank == 0:
        with timeout(0.1):
            error = error_of(lambda: ops.one_shot_all_reduce(t, "sum", NAME))
        assert error.startswith("RuntimeError: torch.ops.symm_mem.one_shot_all_reduce: barrier timed out after 100 ms")
        assert "rank 1 has not come" in error
    dist.barrier()
    both = [symmetric(torch.float32), symmetric(torch.float32)]
    with timeout(1):
        error = error_of(lambda: ops.one_shot_all_reduce(both[rank], "sum", NAME))
    assert error.endswith("or its tensor lies in another allocation")
    dist.barrier()
    assert (ops.one_shot_all_reduce(t, "sum", NAME) == 2).all()  # nothing had been sent
    with timeout(0.1), mock.patch.object(Peers, "barrier", lambda _: dist.barrier()) if rank else nullcontext():
        error_of(lambda: ops.one_shot_all_reduce(t, "sum", NAME))
        if rank == 0:
            dist.barrier()
            error = error_of(lambda: Peers.of("two_shot_all_reduce_", "input", t, NAME))
            assert "a wait here has failed; allocate it again on all ranks" in error
    again = symmetric(torch.float32).fill_(1)
    assert (ops.one_shot_all_reduce(again, "sum", NAME) == 2).all()


@on_ranks(2)
def test_inputs_and_results_may_share_memory(rank: int) -> None:
    base = symm_mem.empty(40, device=CPU)
    rendezvous(base)
    t, peer = base[8:24], ops.get_remote_tensors(base, NAME)[1 - rank]
    x = torch.arange(16.0)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda given: ops.one_shot_all_reduce_copy(t, given, "sum", NAME),
        lambda given: ops._low_contention_reduce_scatter(given, "sum", NAME),
        lambda given: ops._low_contention_all_gather(given, NAME),
    ]
    for start in (0, 4, 8, 24):
        for op in (ops.one_shot_all_reduce_out, ops.two_shot_all_reduce_out):
            t.copy_(x + rank)
            dist.barrier()
            assert torch.equal(op(t, "sum", NAME, base[start : start + 16]), 2 * x + 1)
            dist.barrier()
        for given, call in itertools.product((base[start : start + 16], peer[start : start + 16]), calls):
            given.copy_(x)
            dist.barrier()
            want = (2 * x, (2 * x).chunk(2)[rank], torch.cat([x, x]))[calls.index(call)]
            assert torch.equal(call(given), want)
            dist.barrier()


@on_ranks(2)
def test_ranks_that_differ_all_raise_before_anything_is_sent(rank: int) -> None:
    t = symmetric(torch.float32, (48,)).fill_(1)
    differ: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "got tensor ['float32', [3, 2]] on rank 0 and ['float32', [5, 2]] on rank 1": (
            lambda: ops._low_contention_all_gather(torch.ones(3, 2), NAME),
            lambda: ops._low_contention_all_gather(torch.ones(5, 2), NAME),
        ),
        "got reduce_op sum on rank 0 and avg on rank 1": (
            lambda: ops._low_contention_reduce_scatter(torch.ones(2), "sum", NAME),
            lambda: ops._low_contention_reduce_scatter(torch.ones(2), "avg", NAME),
        ),
        "got input ['float32', [24], 16] on rank 0 and ['float32', [24], 112] on rank 1": (
            lambda: ops.two_shot_all_reduce_(t[:24], "sum", NAME),
            lambda: ops.two_shot_all_reduce_(t[24:], "sum", NAME),
        ),
        "got op torch.ops.symm_mem.reduce_scatter_out on rank 0 and torch.ops.symm_mem.one_shot_all_reduce on rank 1": (
            lambda: ops.reduce_scatter_out(t, NAME, False, torch.empty(24)),
            lambda: ops.one_shot_all_reduce(t, "sum", NAME),
        ),
        "one_shot_all_reduce: out must have shape [48], got [3] (rank 1)": (
            lambda: ops.one_shot_all_reduce_out(t, "sum", NAME, torch.empty(48)),
            lambda: ops.one_shot_all_reduce_out(t, "sum", NAME, torch.empty(3)),
        ),
    }
    for text, calls in differ.items():
        assert text in error_of(calls[rank])
    assert not symm_mem.rendezvous(t, NAME).get_signal_pad(rank).to(torch.int64).any()
    assert (ops.one_shot_all_reduce(t, "sum", NAME) == 2).all()


@on_ranks(2)
def test_nothing_is_reduced_to_nothing(rank: int) -> None:
    t = symmetric(torch.float32)
    assert ops.one_shot_all_reduce(t[:0], "sum", NAME).shape == t[:0].shape
    assert ops.get_remote_tensors(t[:0], NAME)[1 - rank].numel() == 0


@on_ranks(2)
def test_bad_input_raises_the_same_on_every_rank_and_sends_nothing(rank: int) -> None:
    t = symmetric(torch.float32).fill_(1)
    odd = symmetric(torch.float32, (5,)).fill_(1)
    bad = {
        "one_shot_all_reduce: reduce_op must be 'sum', got 'avg'": lambda: ops.one_shot_all_reduce(t, "avg", NAME),
        "one_shot_all_reduce: input must be contiguous, got strides [1, 12]": (
            lambda: ops.one_shot_all_reduce(t.mT, "sum", NAME)
        ),
        "one_shot_all_reduce: input must be made by torch.distributed._symmetric_memory.empty, got another tensor": (
            lambda: ops.one_shot_all_reduce(t.clone(), "sum", NAME)
        ),
        "one_shot_all_reduce: dtype must be float32 or bfloat16, got torch.int32": (
            lambda: ops.one_shot_all_reduce(t.view(torch.int32), "sum", NAME)
        ),
        "one_shot_all_reduce: out must have shape [6, 12], got [3]": (
            lambda: ops.one_shot_all_reduce_out(t, "sum", NAME, t.new_empty(3))
        ),
        "one_shot_all_reduce_copy: local_input must be torch.float32, got torch.bfloat16": (
            lambda: ops.one_shot_all_reduce_copy(t, t.bfloat16(), "sum", NAME)
        ),
        "reduce_scatter_out: input must have 1 dim without split_last_dim, got 2": (
            lambda: ops.reduce_scatter_out(t, NAME, False, t.new_empty(36))
        ),
        "reduce_scatter_out: last dim of input must be divisible by group_size=2, got 5": (
            lambda: ops.reduce_scatter_out(odd, NAME, True, t.new_empty(2))
        ),
        "_low_contention_reduce_scatter: reduce_op must be 'sum' or 'avg', got 'max'": (
            lambda: ops._low_contention_reduce_scatter(t, "max", NAME)
        ),
        "ValueError: group must be an initialised process group, got name 'nobody'": (
            lambda: ops._low_contention_all_gather(t, "nobody")
        ),
    }
    for message, call in bad.items():
        assert error_of(call).removeprefix("ValueError: torch.ops.symm_mem.") == message
    assert not symm_mem.rendezvous(t, NAME).get_signal_pad(rank).to(torch.int64).any()
    dist.barrier()
    assert (ops.one_shot_all_reduce(t, "sum", NAME) == 2).all()


def test_words() -> None:
    words = torch.zeros(8, dtype=torch.uint32)
    torch._C._distributed_c10d._SymmetricMemory.memset32(words, offset=2, val=5, count=3)
    torch._C._distributed_c10d._SymmetricMemory.stream_write_value32(words, 7, 2**32 - 1)
    assert words.tolist() == [0, 0, 5, 5, 5, 0, 0, 2**32 - 1]
    for offset, val, count in ((-1, 1, 1), (0, 1, 9), (0, 1, 0), (0, -1, 1), (0, 1 << 32, 1)):
        with pytest.raises(ValueError, match=r"memset32_: .* must be in "):
            ops.memset32_(words, offset, val, count)
    with pytest.raises(ValueError, match=r"input must be flat, contiguous and uint32, got torch\.int32"):
        ops.stream_write_value32_(words.view(torch.int32), 0, 1)


def test_what_has_no_implementation_says_so_by_name() -> None:
    t = torch.ones(4)
    for op, args in {
        "multimem_all_reduce_": (t, "sum", NAME),
        "multimem_all_gather_out": (t, NAME, t),
        "all_to_all_vdev": (t, t, t, t, NAME),
        "fused_scaled_matmul_reduce_scatter": (t, t, t, t, "sum", 0, 0, NAME, [4]),
    }.items():
        with pytest.raises(NotImplementedError, match=rf"^torch\.ops\.symm_mem\.{op} has no CPU implementation$"):
            getattr(ops, op)(*args)


def test_every_kernel_is_of_an_op_and_enabling_again_changes_nothing() -> None:
    assert all(hasattr(ops, op) for op in cpu_kernels.KERNELS)
    before = symm_mem.get_symm_mem_workspace
    enable_cpu()  # a second kernel for an op would raise
    assert symm_mem.get_symm_mem_workspace is before


def test_without_the_native_part_it_is_refused() -> None:
    with mock.patch("fusedcomm.symm_mem.no_native", return_value="the reason"), pytest.raises(RuntimeError) as raised:
        enable_cpu()
    assert str(raised.value) == "fusedcomm.symm_mem needs CPU symmetric memory: the reason"


@pytest.mark.thorough
def test_a_kernel_of_torch_stays_and_nothing_warns() -> None:
    code = """
import torch, torch.distributed._symmetric_memory as symm_mem, fusedcomm.symm_mem
theirs = torch.library.Library("symm_mem", "IMPL", "CPU")
theirs.impl("memset32_", lambda input, *args: input.fill_(9))
before = symm_mem.get_symm_mem_workspace
assert symm_mem.get_backend("cpu") is None
fusedcomm.symm_mem.enable_cpu()
assert symm_mem.get_backend("cpu") == "FUSEDCOMM_CPU" and symm_mem.get_symm_mem_workspace is not before
assert torch.ops.symm_mem.memset32_(torch.ones(1), 0, 1, 1) == 9
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# functions of torch.distributed._symmetric_memory
@on_ranks(3)
def test_a_workspace_is_kept_and_grows(rank: int) -> None:
    handle = symm_mem.get_symm_mem_workspace(NAME, 4096)
    size = handle.buffer_size
    assert size >= 4096
    assert symm_mem.get_symm_mem_workspace(NAME, min_size=1).buffer_ptrs == handle.buffer_ptrs
    grown = symm_mem.get_symm_mem_workspace(NAME, size + 1)
    assert grown.buffer_size > size
    words = grown.get_buffer((rank + 1) % 3, (3,), torch.int64).fill_(rank)
    grown.barrier(timeout_ms=5000)
    assert grown.get_buffer(rank, (3,), torch.int64).tolist() == [(rank - 1) % 3] * 3
    grown.barrier(timeout_ms=5000)
    del words


@pytest.mark.skipif(not hasattr(symm_mem, "put_signal"), reason="this release of torch has no put_signal")
@on_ranks(2)
def test_put_signal_puts_and_signals(rank: int) -> None:
    t, handle = make(4, torch.float32)
    for round in range(4):
        if rank == round % 2:
            symm_mem.put_signal(torch.full((4,), float(round)), handle, 1 - rank)
        else:
            symm_mem.wait_signal(handle, 1 - rank)
            assert (t == round).all()
    with timeout(0.1):
        assert "no signal from rank" in error_of(lambda: symm_mem.wait_signal(handle, 1 - rank))
    assert error_of(lambda: symm_mem.put_signal(t, handle, 2)) == (
        "ValueError: put_signal: peer must be in [0, 2), got 2"
    )
    assert "exceeds the allocated size" in error_of(lambda: symm_mem.put_signal(torch.ones(5), handle, 1 - rank))
    dist.barrier()


@on_ranks(2)
def test_enabling_a_group_changes_nothing_else(rank: int) -> None:
    group = dist.new_group([0, 1])
    assert not symm_mem.is_symm_mem_enabled_for_group(group.group_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch: there is no need to call it anymore
        symm_mem.enable_symm_mem_for_group(group.group_name)
    assert symm_mem.is_symm_mem_enabled_for_group(group.group_name)
    t = symm_mem.empty(2, device=CPU).fill_(rank)
    symm_mem.rendezvous(t, group).barrier()
    assert torch.ops.symm_mem.one_shot_all_reduce(t, "sum", group.group_name).tolist() == [1, 1]
    dist.destroy_process_group(group)
