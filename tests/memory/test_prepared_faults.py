"""Faults in prepared calls: the errors and records of calls in Python, peers that are told, and the reset."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.memory import flight_recorder
from fusedcomm.ops import prepared
from tests.helpers.groups import call, member_of, refuse_a_forked_child
from tests.helpers.on_ranks import on_ranks
from tests.helpers.op_problems import NAMED
from tests.helpers.prepared import check_prepared, python_calls, started_group
from tests.helpers.problems import HEADS, integers
from tests.helpers.symmetric_memory import in_child
from tests.helpers.waiting import wait_until
from tests.memory.test_exits import AFTER_S, interrupted

FACTS = ("op", "group_name", "device", "exchange", "dtype", "ranks", "resets", "algorithm", "state", "error", "peers")


@contextmanager
def prepared_group(timeout_s: float = 20.0) -> Iterator[Any]:
    """Calls of HEADS are prepared; after what fails inside it is reset and used. ``timeout_s``: of waits until then."""
    with started_group("chunked") as group:
        check_prepared(group, HEADS, torch.float32)
        member_of(group).workspace.timeout_s = timeout_s
        yield group
        dist.barrier(group)
        fusedcomm.reset(group)
        check_prepared(group, HEADS, torch.float32)


def fails(group: Any) -> Any:
    with python_calls() as ran, pytest.raises(fusedcomm.PeerError) as caught:
        call(group, HEADS)
    assert ran == []
    return caught.value


@on_ranks(2)
def test_a_late_peer_is_told_of_in_time(rank: int, tmp_path: Path) -> None:
    with prepared_group(timeout_s=1.0) as group, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEDCOMM_DUMP_DIR", str(tmp_path))
        dist.barrier(group)
        if rank == 0:
            start = time.monotonic()
            error = fails(group)
            assert isinstance(error, fusedcomm.PeerTimeoutError) and 0.9 < time.monotonic() - start < 20
            assert (error.peers, error.op, error.epoch) == ([1], HEADS.op, member_of(group).workspace.epoch + 1)
            dump = json.loads((tmp_path / "rank0.json").read_text())
            assert dump["why"].startswith("PeerTimeoutError") and error.args[0].split(",")[0] in dump["why"]
            last = dump["calls"][-1]
            assert (last["op"], last["state"], last["peers"]) == (HEADS.op, flight_recorder.FAILED, [1])
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError, match=r"fusedcomm\.reset"):
            call(group, HEADS)


@contextmanager
def multiplied_by(product: Callable[..., Tensor]) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.out", product, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@on_ranks(3)
def test_an_op_that_fails_in_a_prepared_call(rank: int) -> None:
    """A peer must not take the round that is left half way for the next one."""

    def fail(*args: Any, **kwargs: Any) -> Tensor:
        raise LookupError("on purpose")

    with prepared_group() as group:
        dist.barrier(group)
        if rank == 1:
            with multiplied_by(fail), pytest.raises(LookupError, match="on purpose"):
                call(group, HEADS)
            assert flight_recorder.last()[-1].error == "LookupError: on purpose"
        else:
            with pytest.raises(fusedcomm.PeerError, match="left their call") as caught:
                call(group, HEADS)
            assert caught.value.peers == [1]
        with pytest.raises(fusedcomm.PeerError, match="left by LookupError" if rank == 1 else "left their call"):
            call(group, HEADS, 1)


@on_ranks(2)
def test_a_rank_that_goes_on_when_its_peer_has_given_up(rank: int, tmp_path: Path) -> None:
    """It finds all signals, and must raise too."""

    def product(x: Tensor, w: Tensor, *, out: Tensor) -> Tensor:
        wait_until((tmp_path / "0 gave up").exists)
        return out.copy_((x[:, :, None] * w).sum(1))

    with prepared_group(timeout_s=1.0) as group:
        dist.barrier(group)
        with multiplied_by(product) if rank == 1 else nullcontext():
            error = fails(group)
        (tmp_path / f"{rank} gave up").touch()
        assert error.peers == [1 - rank]


@on_ranks(2)
def test_prepared_calls_that_differ(rank: int) -> None:
    other = NAMED["bias"]
    with prepared_group() as group:
        check_prepared(group, other, torch.float32)
        dist.barrier(group)
        with python_calls() as ran, pytest.raises(fusedcomm.PeerMismatchError):
            call(group, (HEADS, other)[rank])
        assert ran == []


@on_ranks(2)
def test_ctrl_c_in_a_wait(rank: int) -> None:
    with prepared_group() as group:
        dist.barrier(group)
        if rank == 1:
            with interrupted():
                call(group, HEADS)
        dist.barrier(group)
        with pytest.raises(fusedcomm.PeerError) as caught:
            call(group, HEADS)
        assert caught.value.peers == [1]
        assert rank == 0 or "left by KeyboardInterrupt" in str(caught.value)


@on_ranks(2)
def test_ctrl_c_before_python_has_begun_to_wait(rank: int) -> None:
    """A signal that has come while no Python ran is seen where Python begins. The round is left half way."""

    def seen(*args: Any) -> None:
        raise KeyboardInterrupt

    with prepared_group(timeout_s=5.0) as group:
        dist.barrier(group)
        if rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prepared.Rescue, "wait", seen)
                with pytest.raises(KeyboardInterrupt):
                    call(group, HEADS)
        dist.barrier(group)
        for _ in range(2):
            with pytest.raises(fusedcomm.PeerError) as caught:
                call(group, HEADS, 1)
            assert caught.value.peers == [1]


class LeftByHandler(Exception):
    pass


@contextmanager
def handled(handler: Callable[[], None]) -> Iterator[None]:
    """A signal comes after a moment, and its handler runs."""
    before = signal.signal(signal.SIGUSR2, lambda *args: handler())  # by SIGUSR1 silent ranks tell where they are
    timer = threading.Timer(AFTER_S, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)


@on_ranks(2)
@pytest.mark.parametrize("raises", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_handler_takes_the_workspace_of_a_call_that_waits(rank: int, raises: bool) -> None:
    """The call ends as it does in Python, and touches nothing of what comes after it."""

    def handler() -> None:
        fusedcomm.reset(group)
        if raises:
            raise LeftByHandler

    with started_group("chunked") as group:
        check_prepared(group, HEADS, torch.float32)
        workspace = member_of(group).workspace
        workspace.timeout_s = 4 * AFTER_S
        dist.barrier(group)
        if rank == 0:
            with handled(handler), pytest.raises(LeftByHandler if raises else fusedcomm.PeerTimeoutError) as caught:
                call(group, HEADS)
            assert getattr(caught.value, "peers", [1]) == [1]
            states = [record.state for record in flight_recorder.last() if record.op == HEADS.op]
            assert states[-1] == flight_recorder.FAILED
        else:
            fusedcomm.reset(group)
        dist.barrier(group)
        after = member_of(group).workspace
        assert after is not workspace
        flags = after.segment[after.layout.flags : after.layout.header_bytes]
        assert after.epoch == 0 and not flags.any()
        dist.barrier(group)
        check_prepared(group, HEADS, torch.float32)


@on_ranks(2)
def test_records_are_those_of_calls_in_python(rank: int) -> None:
    with prepared_group(timeout_s=1.0) as group:
        flight_recorder.forget()
        member_of(group).num_calls = 0
        with fusedcomm.force_algorithm("unfused"):
            for _ in range(4):
                call(group, HEADS)
        for _ in range(4):
            call(group, HEADS)
        records = flight_recorder.last()
        for first, found in ((records[0], records[:4]), (records[4], records[4:])):
            for record in found:
                assert [getattr(record, name) for name in FACTS] == [getattr(first, name) for name in FACTS]
                assert record.ended is not None and record.ended >= record.started and record.workspace is None
        epoch = member_of(group).workspace.epoch
        assert [record.number for record in records] == list(range(1, 9))
        assert [record.rounds for record in records[:4]] == [None] * 4
        assert [record.rounds for record in records[4:]] == [(epoch - i, epoch - i + 1) for i in (4, 3, 2, 1)]
        dist.barrier(group)
        if rank == 0:
            error = fails(group)
            record = flight_recorder.last()[-1]
            assert (record.state, record.peers, record.number) == (flight_recorder.FAILED, (1,), 9)
            assert record.rounds == (epoch, epoch) and record.error.startswith(f"PeerTimeoutError: {error.args[0]}")
        dist.barrier(group)


@on_ranks(2)
def test_plans_hold_nothing_alive(rank: int) -> None:
    """Neither the tensors of a call, nor after close() a workspace."""
    with started_group("chunked") as group:
        check_prepared(group, HEADS, torch.float32)
        x, w, bias = integers(HEADS, rank, 2)
        alive = [weakref.ref(t.untyped_storage()) for t in (x, w)]
        for _ in range(3):
            y = HEADS.call((x, w, bias), group)
        kept = weakref.ref(member_of(group).workspace)
        del x, w, y
        fusedcomm.close(group)
        gc.collect()
        assert kept() is None and [each() for each in alive] == [None, None]


@on_ranks(2)
def test_a_forked_child_is_no_rank(rank: int) -> None:
    with prepared_group() as group:
        refuse_a_forked_child(group, HEADS)


@on_ranks(2)
def test_a_child_of_a_process_in_a_call_finds_the_records(rank: int, tmp_path: Path) -> None:
    """A thread waits in a prepared call while another one forks."""
    with prepared_group() as group:
        if rank == 0:
            thread = threading.Thread(target=call, args=(group, HEADS))
            thread.start()
            wait_until(lambda: flight_recorder.last()[-1].state == flight_recorder.RUNNING)
            record, epoch = flight_recorder.last()[-1], member_of(group).workspace.epoch
            assert (record.state, record.ended, record.rounds) == (flight_recorder.RUNNING, None, (epoch, epoch))
            assert record.workspace is member_of(group).workspace
            assert in_child(lambda: flight_recorder.last()[-1].state == flight_recorder.RUNNING) == 0
            (tmp_path / "forked").touch()
            thread.join()
            assert flight_recorder.last()[-1].state == flight_recorder.DONE
        else:
            wait_until((tmp_path / "forked").exists)
            call(group, HEADS)
