"""Hangs and errors of real ranks, their dumps, and what `fusedcomm postmortem` says of them."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm import cli
from fusedcomm.doctor import postmortem
from fusedcomm.doctor.postmortem import Dump, RecordedCall, judge
from fusedcomm.launch.ranks import RankPool
from fusedcomm.runtime import dumps
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.problems import PROBLEMS

HEADS = next(problem for problem in PROBLEMS if problem.name == "heads")
PATIENCE_S = 60


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Three ranks that dump on SIGUSR1."""
    folder = tmp_path_factory.mktemp("dumps")
    with RankPool(3, env={"FUSEDCOMM_TIMEOUT_S": "20", "FUSEDCOMM_DUMP_DIR": str(folder)}) as made:
        yield made


def wait_for_all(pool: RankPool, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob("ready*"))) < pool.world_size:
        assert time.monotonic() < deadline, "not all ranks are ready"
        time.sleep(0.05)


def dumped(pool: RankPool, folder: Path, enough: Callable[[list[Dump]], bool]) -> list[Dump]:
    """Ask all ranks for dumps until they say what the test waits for."""
    wait_for_all(pool, folder)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for rank in range(pool.world_size):
            os.kill(pool.pid(rank), signal.SIGUSR1)
        time.sleep(0.2)
        with suppress(FileNotFoundError):
            found, problems = postmortem.read(folder)
            assert not problems
            if len(found) == pool.world_size and enough(found):
                return found
    raise AssertionError("no such dumps")


def alone(folder: str) -> None:
    """Leave only the dumps: RankPool's handler of SIGUSR1 would block after some signals, as nobody reads from it."""
    faulthandler.unregister(signal.SIGUSR1)
    os.environ["FUSEDCOMM_DUMP_DIR"] = folder


def verdicts(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert cli.main(["postmortem", str(folder)]) == 0
    return " ".join(capsys.readouterr().out.split())


def outside(go: Path) -> None:
    """Wait outside of fusedcomm, as in a data loader."""
    while not go.exists():
        time.sleep(0.02)


WORLD = [0, 1, 2]


def a_call(number: int, state: str = "done", **changes: Any) -> RecordedCall:
    fields: dict[str, Any] = {
        "op": "matmul_all_reduce",
        "group": "g",
        "ranks": WORLD,
        "device": "cpu",
        "resets": 0,
        "number": number,
        "arguments": {"x shape": [4, 8]},
        "dtype": "float32",
        "algorithm": "chunked",
        "state": state,
        "error": None,
        "peers": [],
        "rounds": None,
        "started": 100.0 + number,
        "seconds": 5.0 if state == "running" else 0.1,
        "waiting_for": None,
        "waiting_s": None,
    }
    return RecordedCall(**(fields | changes))


def a_dump(rank: int, *calls: RecordedCall, at: str = "line") -> Dump:
    return Dump(rank, len(WORLD), "SIGUSR1", 110.0, list(calls), {"MainThread": ["main", at]})


def ended(dump: Dump) -> Dump:
    return dataclasses.replace(dump, why=f"{dumps.ENDED} by ValueError: boom")


OPEN = a_call(2, "running")
WAITING = a_call(2, "running", waiting_for=1)
TIMED_OUT = a_call(2, "failed", error="PeerTimeoutError: ...", peers=[2], seconds=3.0)
LEFT_A_VOTE = dataclasses.replace(
    TIMED_OUT,
    error="PeerTimeoutError: an op: rank 0 waited for ranks [2]: rank 2 has left: ValueError: boom, after call 1. "
    "Call fusedcomm.reset(group) on every rank before the next call\nNext: read",
)
OTHER_SHAPE = a_call(2, arguments={"x shape": [4, 9]})
IN_B = a_call(1, "running", group="b", ranks=[1, 2])
CALL = "(matmul_all_reduce)"
CASES: dict[str, tuple[list[Dump], str]] = {
    "all-is-well": ([a_dump(rank, a_call(1), a_call(2)) for rank in WORLD], "no rank waits for another"),
    "behind": (
        [a_dump(0, a_call(1), OPEN), a_dump(1, a_call(1), OPEN), a_dump(2, a_call(1), at="a loader")],
        f"group 'g': rank 2 is behind: it has finished call 1 {CALL} and never came to call 2 {CALL}, for which "
        "ranks 0 and 1 wait since 5.0 s. It is outside of fusedcomm, at a loader",
    ),
    "never-called": (
        [a_dump(0, a_call(0, "voting", seconds=2.0)), a_dump(1), a_dump(2, a_call(0, "voting", seconds=1.0))],
        f"group 'g': rank 1 is behind: it has called nothing and never came to its first call {CALL}, for which "
        "ranks 0 and 2 wait since 2.0 s. It is outside of fusedcomm, at line",
    ),
    "no-dump": (
        [a_dump(0, TIMED_OUT), a_dump(1, TIMED_OUT)],
        "group 'g': rank 2 has left no dump: it has died, is stopped, or never came. "
        f"In call 2 {CALL} ranks 0 and 1 wait since 3.0 s for it",
    ),
    "no-dump-of-a-rank-that-is-there": (
        [a_dump(rank, dataclasses.replace(OPEN, rounds=[1, 1], waiting_s=5.0)) for rank in (0, 1)],
        "group 'g': rank 2 has left no dump, though its process was there: it is stopped, or got no SIGUSR1. "
        f"In call 2 {CALL} ranks 0 and 1 wait since 5.0 s for it",
    ),
    "no-dump-of-a-rank-that-had-left-before-a-vote": (
        [a_dump(0, LEFT_A_VOTE), a_dump(1, TIMED_OUT)],
        "group 'g': rank 2 has left no dump, and its peers know why: ValueError: boom, after call 1. "
        f"In call 2 {CALL} ranks 0 and 1 wait since 3.0 s for it",
    ),
    "ended": (
        [a_dump(0, a_call(1), OPEN), a_dump(1, a_call(1), OPEN), ended(a_dump(2, a_call(1)))],
        "group 'g': rank 2 is behind: its program has ended by ValueError: boom. It has finished call 1 "
        f"{CALL} and never came to call 2 {CALL}, for which ranks 0 and 1 wait since 5.0 s",
    ),
    "late": (
        [a_dump(0, TIMED_OUT), a_dump(1, a_call(2)), a_dump(2, a_call(2, "failed", peers=[0], started=106.0))],
        f"group 'g': rank 2 came to call 2 {CALL} 4.0 s after rank 0, which had given up by then",
    ),
    "inside": (
        [a_dump(0, WAITING), a_dump(1, OPEN, at="a matmul"), a_dump(2, WAITING)],
        f"group 'g': rank 1 is in call 2 {CALL} too, and waits for nobody: it is at a matmul",
    ),
    "other-shape": (
        [*(a_dump(rank, a_call(1), a_call(2)) for rank in (0, 1)), a_dump(2, a_call(1), OTHER_SHAPE)],
        "group 'g': call 2 differs: x shape is [4, 8] on ranks 0 and 1 and [4, 9] on rank 2",
    ),
}
BETWEEN_GROUPS: dict[str, tuple[list[Dump], str]] = {
    "row": (
        [
            a_dump(0, a_call(2, "running", ranks=[0, 1])),
            a_dump(1, a_call(1, ranks=[0, 1]), IN_B),
            a_dump(2, at="a loader"),
        ],
        f"in a row: rank 0 waits in group 'g', call 2 {CALL}, for rank 1, which waits in group 'b', call 1 {CALL}, "
        "for rank 2, which is at a loader",
    ),
    "circle": (
        [
            a_dump(0, a_call(1, "running", ranks=[0, 1])),
            a_dump(1, IN_B),
            a_dump(2, a_call(1, "running", group="c", ranks=[2, 0])),
        ],
        f"in a circle: rank 0 waits in group 'g', call 1 {CALL}, for rank 1, which waits in group 'b', call 1 {CALL}, "
        f"for rank 2, which waits in group 'c', call 1 {CALL}, for rank 0. All ranks must use groups in the same order",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_of_one_group(name: str) -> None:
    of_ranks, verdict = CASES[name]
    assert judge(of_ranks).verdicts == [verdict]


@pytest.mark.parametrize("name", BETWEEN_GROUPS)
def test_the_verdict_of_several_groups_comes_last(name: str) -> None:
    of_ranks, verdict = BETWEEN_GROUPS[name]
    found = judge(of_ranks).verdicts
    assert found[-1] == verdict
    assert all("is behind" in each for each in found[:-1])


def raw(dump: Dump) -> dict[str, Any]:
    return {"schema": dumps.SCHEMA, **dataclasses.asdict(dump)}


BROKEN: dict[str, tuple[str, str]] = {
    "empty": ("", "Expecting value"),
    "no-rank": (json.dumps({**raw(a_dump(1)), "rank": "1"}), "a dump's rank must be int, got '1'"),
    "bad-call": (json.dumps(raw(a_dump(1, a_call(1, group=3)))), "a dump's group must be str, got 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_dump_is_named_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text, problem = BROKEN[name]
    (tmp_path / "rank0.json").write_text(json.dumps(raw(a_dump(0, a_call(1)))))
    (tmp_path / "rank1.json").write_text(text)
    (tmp_path / "notes.txt").touch()
    assert cli.main(["postmortem", str(tmp_path), "--json", str(tmp_path / "out" / "x")]) == 2
    assert cli.main(["postmortem", str(tmp_path), "--json", str(tmp_path / "report")]) == 0
    said = capsys.readouterr()
    assert f"not read: rank1.json: {problem}" in said.err
    assert "ranks 1 and 2: no dump" in said.out
    report = json.loads((tmp_path / "report").read_text())
    assert report["silent"] == [1, 2] and len(report["problems"]) == 1
    assert report["groups"][0]["last"]["0"]["number"] == 1


def test_without_dumps_there_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["postmortem", str(tmp_path)]) == 1
    assert "no dump is there" in capsys.readouterr().err
    assert cli.main(["postmortem", str(tmp_path / "nowhere")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def run_late(rank: int, folder: str, algorithm: str) -> None:
    alone(folder)
    with fresh_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
        for seed in range(3):
            check(group, HEADS, call(group, HEADS, seed), seed)
        Path(folder, f"ready{rank}").touch()
        if rank == 2:
            outside(Path(folder, "go"))
        check(group, HEADS, call(group, HEADS, 3), 3)
        dist.barrier(group)


@pytest.mark.parametrize("algorithm", ["chunked", "unfused"])
def test_a_rank_that_is_late(
    pool: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: str
) -> None:
    """The main threads of the others are in C++ all the time, in a wait of fusedcomm or of gloo."""
    pool.start(run_late, str(tmp_path), algorithm)

    def both_wait(found: list[Dump]) -> bool:
        """A call that runs is on its way to its wait for some time, and one that runs unfused waits in gloo, unseen."""
        last = [dump.calls[-1] for dump in found if dump.calls]
        waits = algorithm == "unfused" or any(each.waiting_for is not None for each in last[:2])
        running = all(each.state == "running" for each in last[:2])
        return [each.number for each in last] == [4, 4, 3] and running and waits

    try:
        dumped(pool, tmp_path, both_wait)
    finally:
        Path(tmp_path, "go").touch()
        pool.join()
    said = verdicts(capsys, tmp_path)
    assert "rank 2 is behind: it has finished call 3 (matmul_all_to_all) and never came to call 4" in said
    assert "for which ranks 0 and 1 wait since" in said
    assert "It is outside of fusedcomm, at" in said and "in outside" in said
    assert "in a circle" not in said


def run_until_killed(rank: int, folder: str) -> None:
    with fusedcomm.force_algorithm("chunked", strict=True), suppress(fusedcomm.PeerTimeoutError):
        while True:
            call(dist.group.WORLD, HEADS)
            Path(folder, f"ready{rank}").touch()


@pytest.mark.nightly
def test_a_killed_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "dumps"
    with RankPool(2, env={"FUSEDCOMM_TIMEOUT_S": "2", "FUSEDCOMM_DUMP_DIR": str(folder)}) as own:
        own.start(run_until_killed, str(tmp_path))
        wait_for_all(own, tmp_path)
        own.kill(1)
        own.join()
    said = verdicts(capsys, folder)
    assert "rank 0: PeerTimeoutError" in said
    assert "rank 1 has left no dump, and its peers know why: its process is gone without a word" in said
