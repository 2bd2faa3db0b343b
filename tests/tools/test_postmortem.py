"""Hangs and errors of real ranks, their dumps, and what `fusedcomm postmortem` says of them."""

import dataclasses
import faulthandler
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm import tools
from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory import dumps
from fusedcomm.memory.departures import KILLED
from fusedcomm.tools import postmortem
from fusedcomm.tools.postmortem import Dump, RecordedCall, judge
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.problems import HEADS
from tests.helpers.waiting import wait_until

WORLD = [0, 1, 2]
FIELDS: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(RecordedCall))
FIELDS |= {"op": "op", "group": "g", "ranks": WORLD, "device": "cpu", "resets": 0, "peers": [], "arguments": {}}


def a_call(number: int, state: str = "done", **changes: Any) -> RecordedCall:
    times = {"started": 100.0 + number, "seconds": 5.0 if state == "running" else 0.1}
    return RecordedCall(**FIELDS | {"number": number, "state": state} | times | changes)


def a_dump(rank: int, *calls: RecordedCall, why: str = "SIGUSR1") -> Dump:
    return Dump(rank, len(WORLD), why, 110.0, "host", 90.0, list(calls), {"MainThread": ["main", f"line {rank}"]})


def same_but(*last: Dump, first: RecordedCall) -> list[Dump]:
    """Dumps of ranks 0 and 1, where call 2 is ``first``, and of others."""
    return [*(a_dump(rank, a_call(1), first) for rank in (0, 1)), *last]


OPEN, WAITING = a_call(2, "running"), a_call(2, "running", waiting_for=1)
TIMED_OUT = a_call(2, "failed", error="PeerTimeoutError: ...", peers=[2], seconds=3.0)
LAST_WORDS = "PeerTimeoutError: an op: rank 0 waited for ranks [2]: rank 2 has left: ValueError: boom, after call 1. "
LEFT = dataclasses.replace(TIMED_OUT, error=LAST_WORDS + "Call fusedcomm.reset(group) on every rank\nNext: read")
ENDED = a_dump(2, a_call(1), why=f"{dumps.ENDED} by ValueError: boom")
NEVER = "has finished call 1 (op) and never came to call 2 (op), for which ranks 0 and 1 wait since 5.0 s"
FOR_IT = "In call 2 (op) ranks 0 and 1 wait since 3.0 s for it"
WHY = f"op on group 'g', rank 0, round 2: rank 2 has left: {KILLED} (rounds seen by rank: 1: 2)"
GONE = dataclasses.replace(TIMED_OUT, error=WHY)
SHAPES = [a_dump(rank, a_call(1), a_call(2, arguments={"x shape": [8 + (rank == 2)]})) for rank in WORLD]
CIRCLE = [a_dump(r, a_call(1, "running", group="gbc"[r], ranks=sorted([r, (r + 1) % 3]))) for r in WORLD]
IN_CIRCLE = [f"waits in group {'gbc'[rank]!r}, call 1 (op), for rank {(rank + 1) % 3}" for rank in WORLD]
VOTING = [a_dump(0, a_call(0, "voting", seconds=2.0)), a_dump(1), a_dump(2, a_call(0, "voting"))]
LATE = [
    a_dump(0, TIMED_OUT),
    a_dump(1, a_call(2, started=106.0)),
    a_dump(2, a_call(2, "failed", peers=[0], started=106.0)),
]
INSIDE = [a_dump(0, WAITING), a_dump(1, OPEN), a_dump(2, WAITING)]
CASES = [
    (same_but(a_dump(2, a_call(1), a_call(2)), first=a_call(2)), "no rank waits for another"),
    (
        same_but(a_dump(2, a_call(1)), first=OPEN),
        f"rank 2 is behind: it {NEVER}. It is outside of fusedcomm, at line 2",
    ),
    (
        VOTING,
        "has called nothing and never came to its first call (op), for which ranks 0 and 2 wait since 2.0 s. It is",
    ),
    (same_but(first=TIMED_OUT), f"rank 2 has left no dump: it has died, is stopped, or never came. {FOR_IT}"),
    (same_but(first=LEFT), f"no dump, and its peers know why: ValueError: boom, after call 1. {FOR_IT}"),
    (same_but(first=GONE), f"no dump, and its peers know why: {KILLED}. {FOR_IT}"),
    (same_but(ENDED, first=OPEN), f"rank 2 is behind: its program has ended by ValueError: boom. It {NEVER}"),
    (LATE, "group 'g': rank 2 came to call 2 (op) 4.0 s after rank 0, which had given up by then"),
    (INSIDE, "rank 1 is in call 2 (op) too, and waits for nobody: it is at line 1"),
    (SHAPES, "call 2 differs: x shape is [8] on ranks 0 and 1 and [9] on rank 2"),
    (CIRCLE, f"in a circle: rank 0 {', which '.join(IN_CIRCLE)}. All ranks must use groups in the same order"),
]


@pytest.mark.parametrize("of_ranks, verdict", CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_the_verdict(of_ranks: list[Dump], verdict: str) -> None:
    *before, last = judge(of_ranks).verdicts
    assert verdict in last
    assert len(before) == (3 if of_ranks is CIRCLE else 0) and all("is behind" in each for each in before)


RAW = {"schema": dumps.SCHEMA, **dataclasses.asdict(a_dump(0, a_call(1)))}


BROKEN = [
    ("", "Expecting value"),
    ("[]", "it must be a dump of schema"),
    (json.dumps(RAW | {"calls": [{"op": "x"}]}), "missing 16 required positional arguments"),
    (json.dumps(RAW), "another file is of rank 0 too"),
    (json.dumps(RAW | {"rank": 1, "time": 80.0}), "of an earlier run"),
]


@pytest.mark.parametrize("text, problem", BROKEN)
def test_a_file_that_is_no_dump_is_named_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    report_file = tmp_path / "report.json"
    assert tools.main(["postmortem", str(tmp_path / "nowhere")]) == 1
    assert tools.main(["postmortem", str(tmp_path), "--json", str(report_file)]) == 1 and not report_file.exists()
    (tmp_path / "rank0.json").write_text(json.dumps(RAW))
    (tmp_path / "rank1.json").write_text(text)
    (tmp_path / "notes.txt").touch()
    assert tools.main(["postmortem", str(tmp_path), "--json", str(tmp_path / "out" / "x")]) == 2
    assert tools.main(["postmortem", str(tmp_path), "--json", str(report_file)]) == 0
    said = capsys.readouterr()
    assert "no dump is there" in said.err and "not read: rank1.json: " in said.err and problem in said.err
    assert "ranks 1 and 2: no dump" in said.out
    report = json.loads(report_file.read_text())
    assert (report["silent"], len(report["problems"]), report["groups"][0]["last"]["0"]["number"]) == ([1, 2], 1, 1)


def outside(go: Path) -> None:
    """Wait outside of fusedcomm, as in a data loader."""
    while not go.exists():
        time.sleep(0.02)


def run_late(rank: int, folder: Path) -> None:
    faulthandler.unregister(signal.SIGUSR1)  # it would block after some signals, as nobody reads from RankPool's
    for algorithm in ("chunked", "unfused"):
        with fresh_group() as group, fusedcomm.force_algorithm(algorithm, strict=True):
            for seed in range(3):
                check(group, HEADS, call(group, HEADS, seed), seed)
            if rank == 2:
                (folder / f"{algorithm} ready").touch()
                outside(folder / f"{algorithm} go")
            check(group, HEADS, call(group, HEADS, 3), 3)
            dist.barrier(group)


def test_a_rank_that_is_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The main threads of the others are in C++ all the time, in a wait of fusedcomm or of gloo, which is not seen."""
    with RankPool(3, env={"FUSEDCOMM_TIMEOUT_S": "20", "FUSEDCOMM_DUMP_DIR": str(tmp_path)}) as pool:
        pool.start(run_late, tmp_path)
        for algorithm in ("chunked", "unfused"):

            def both_wait(unseen: bool = algorithm == "unfused") -> bool:
                for rank in WORLD:
                    os.kill(pool.pid(rank), signal.SIGUSR1)
                time.sleep(0.2)
                last = [dump.calls[-1] for dump in postmortem.read(tmp_path)[0] if dump.calls]
                seen = unseen or any(each.waiting_for is not None for each in last[:2])
                return seen and [(c.number, c.state) for c in last] == [(4, "running"), (4, "running"), (3, "done")]

            wait_until((tmp_path / f"{algorithm} ready").exists)
            wait_until(both_wait)
            (tmp_path / f"{algorithm} go").touch()
            assert tools.main(["postmortem", str(tmp_path)]) == 0
            said = " ".join(capsys.readouterr().out.split())
            assert "rank 2 is behind: it has finished call 3 (matmul_all_to_all) and never came to call 4" in said
            assert "for which ranks 0 and 1 wait since" in said and "in a circle" not in said
            assert "It is outside of fusedcomm, at" in said and "in outside" in said
        pool.join()
