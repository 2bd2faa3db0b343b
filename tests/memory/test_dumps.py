"""The ring of the last calls, and the dumps that are made of it: what they say, and what they do not."""

import getpass
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import dumps, flight_recorder
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS, OPS, integers
from tests.ops.test_call_check import ONE_EACH

CPU = torch.device("cpu")


@on_ranks(2)
def test_the_ring_has_every_call(rank: int) -> None:
    """Every op is there, forward and backward, whatever it runs as."""
    size = dist.get_world_size()
    with fresh_group() as group:
        flight_recorder.forget()
        for algorithm in ("unfused", "chunked"):
            with fusedcomm.force_algorithm(algorithm, strict=True):
                for op in OPS:
                    check(group, ONE_EACH[op], call(group, ONE_EACH[op]))
        fusedcomm.reset(group)
        x, w, bias = integers(HEADS, rank, size)
        HEADS.call((x.requires_grad_(), w, bias), group).sum().backward()
        found = flight_recorder.last()
    assert [record.op for record in found] == [*OPS, *OPS, "fusedcomm.reset", "matmul_all_to_all", "all_to_all_matmul"]
    assert [record.number for record in found] == [*range(1, 11), 0, 1, 2]
    assert [record.resets for record in found] == [0] * 10 + [1] * 3
    assert [record.algorithm for record in found[:10]] == ["unfused"] * 5 + ["chunked"] * 5
    assert all(
        record.state == flight_recorder.DONE and record.error is None and record.workspace is None for record in found
    )
    assert all(record.ranks == tuple(range(size)) for record in found)
    rounds = [record.rounds for record in found if record.rounds]
    assert rounds == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6), (0, 1), (1, 2)]
    assert found[0].arguments == {
        "x shape": list(integers(ONE_EACH[OPS[0]], rank, size)[0].shape),
        "w shape": list(integers(ONE_EACH[OPS[0]], rank, size)[1].shape),
        "out_shape": ONE_EACH[OPS[0]].sizes(size)[2],
        "gather_dim": ONE_EACH[OPS[0]].gather_dim,
        "scatter_dim": ONE_EACH[OPS[0]].scatter_dim,
    }


def test_the_ring_keeps_the_last_calls() -> None:
    flight_recorder.forget()
    for i in range(flight_recorder.NUM_CALLS + 5):
        with flight_recorder.Record("op", str(i), CPU):
            pass
    assert [record.group_name for record in flight_recorder.last()] == [
        str(i + 5) for i in range(flight_recorder.NUM_CALLS)
    ]


LOST = LookupError("lost")


@pytest.mark.parametrize(
    ("last", "error", "why"),
    [
        (None, None, dumps.ENDED),
        (dumps.SIGUSR1, None, dumps.ENDED),
        ("PeerTimeoutError: text", None, None),  # what failed before a good end stays
        (None, LOST, f"{dumps.ENDED} by LookupError: lost"),
        ("PeerTimeoutError: text", LOST, f"{dumps.ENDED} by LookupError: lost"),
        ("LookupError: lost", LOST, None),  # the dump of the call that it left has more
    ],
)
def test_a_rank_that_ends_leaves_a_dump_over_none_that_says_more(
    last: str | None, error: Exception | None, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    monkeypatch.setattr(dumps, "_last_why", last)
    monkeypatch.setattr(dumps, "write", written.append)
    dumps.write_at_exit(error)
    assert written == [] if why is None else [why]


def test_a_dump_is_written_where_the_group_was_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", str(tmp_path))
    monkeypatch.setattr(dumps, "_place", None)
    monkeypatch.setattr(dumps, "_last_why", None)
    assert not dist.is_initialized() and dumps.write(dumps.ENDED) is None
    monkeypatch.setattr(dumps, "_place", (3, 4))
    written = dumps.write(dumps.ENDED)
    assert written is not None and written.name == "rank3.json"
    dump = json.loads(written.read_text())
    assert (dump["rank"], dump["world_size"]) == (3, 4)


NAMES = ("a-host", "a-user")
IMPORTED = time.time()


def check_text(text: str) -> None:
    dump = json.loads(text)
    assert (dump["schema"], dump["rank"], dump["world_size"]) == (dumps.SCHEMA, 0, 2)
    assert dump["why"].startswith("PeerTimeoutError: matmul_all_to_all on group")
    assert dump["versions"]["torch"]
    failed = dump["calls"][-1]
    assert (failed["op"], failed["number"], failed["state"], failed["peers"]) == ("matmul_all_to_all", 2, "failed", [1])
    assert failed["seconds"] >= 0.9
    assert abs(failed["started"] - time.time()) < 60
    assert any("test_an_error_leaves_a_dump" in line for line in dump["stacks"]["MainThread"])
    assert "do not tell" not in text
    assert dump["environment"]["FUSEDCOMM_DUMP_DIR"].endswith("/<host>/<user>")
    assert not [name for name in NAMES if name in text]
    assert dump["started"] < IMPORTED < dump["time"]


@on_ranks(2)
def test_an_error_leaves_a_dump_for_its_owner_alone(rank: int, tmp_path: Path) -> None:
    """The directory is not there yet, and a dump has its name in its environment."""
    folder = str(tmp_path)
    file = Path(folder, *NAMES, f"rank{rank}.json")
    chunked = fusedcomm.force_algorithm("chunked", strict=True)
    with fresh_group(TIMEOUT_S="1") as group, chunked, pytest.MonkeyPatch.context() as patch:
        check(group, HEADS, call(group, HEADS))
        patch.setenv("FUSEDCOMM_DUMP_DIR", str(file.parent))
        patch.setenv("FUSEDCOMM_SECRET", "do not tell")
        for module, function, name in zip((socket, getpass), ("gethostname", "getuser"), NAMES, strict=True):
            patch.setattr(module, function, lambda name=name: name)
        dist.barrier(group)
        if rank == 0:
            with pytest.raises(fusedcomm.PeerTimeoutError):
                call(group, HEADS)
        dist.barrier(group)
        assert file.exists() == (rank == 0)
        if rank == 0:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
            assert os.listdir(file.parent) == ["rank0.json"]
            check_text(file.read_text())
        dist.barrier(group)
        patch.delenv("FUSEDCOMM_DUMP_DIR")
        fusedcomm.reset(group)


@on_ranks(2)
def test_without_a_directory_nothing_is_written_or_set(rank: int) -> None:
    """Without FUSEDCOMM_DUMP_DIR there is no file, no thread, and no wake-up descriptor."""
    with fresh_group(TIMEOUT_S="20") as group:
        check(group, HEADS, call(group, HEADS))
    assert dumps.write("reason") is None
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == dumps.LISTENER]


def test_a_directory_that_cannot_be_written_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(tmp_path, "file").touch()
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(dumps, "_place", (0, 2))
    with pytest.raises(ZeroDivisionError), dumps.on_failure():
        raise ZeroDivisionError
    assert "no dump in FUSEDCOMM_DUMP_DIR" in caplog.text


LISTENING = """
import os, signal, threading, time
from fusedcomm.memory import dumps

heard = []
def handler(*args):
    heard.append("handler")
woken, wake = os.pipe()
os.set_blocking(wake, False)
signal.signal(signal.SIGUSR1, handler)
signal.set_wakeup_fd(wake)
dumps.write = heard.append
os.environ["FUSEDCOMM_DUMP_DIR"] = "/nowhere"
thread = threading.Thread(target=dumps.arm)
thread.start()
thread.join()
assert not dumps._armed  # not from there
dumps.arm()
dumps.arm()
assert [t.name for t in threading.enumerate()].count(dumps.LISTENER) == 1
os.kill(os.getpid(), signal.SIGUSR1)
deadline = time.monotonic() + 30
while "SIGUSR1" not in heard and time.monotonic() < deadline:
    time.sleep(0.01)
print(sorted(heard), os.read(woken, 9))
"""


@pytest.mark.thorough
def test_what_listened_before_goes_on_listening() -> None:
    run = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == r"['SIGUSR1', 'handler'] b'\n'", run.stderr
