"""A wait that takes long says once for whom."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import fusedcomm
from fusedcomm.runtime import patience, workspace
from fusedcomm.runtime.vote import agree
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import PROBLEMS
from tests.helpers.waiting import wait_until

HEADS = next(problem for problem in PROBLEMS if problem.name == "heads")


SECONDS = r"\d+(\.\d+)?"


class Kept(logging.Handler):
    """``logged``: a file that is there when there is a text."""

    def __init__(self, logged: Path) -> None:
        super().__init__()
        self.logged = logged
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.logged.touch()


@on_ranks(3)
def test_a_long_wait_is_logged_once(rank: int, tmp_path: Path) -> None:
    """It names all ranks that are missing, not only the one whose turn it is."""
    kept = Kept(tmp_path / "logged")
    with (
        fresh_group() as group,
        fusedcomm.force_algorithm("chunked", strict=True),
        pytest.MonkeyPatch.context() as patch,
    ):
        check(group, HEADS, call(group, HEADS))
        dist.barrier(group)
        patch.setattr(patience, "PATIENCE_S", 0.2)
        patch.setattr(workspace, "LOOK_S", 0.1)
        logging.getLogger("fusedcomm").addHandler(kept)
        try:
            if rank:
                wait_until((tmp_path / "logged").exists)
                time.sleep(0.5)  # for a second line, if there is one
            check(group, HEADS, call(group, HEADS, 1), 1)
        finally:
            logging.getLogger("fusedcomm").removeHandler(kept)
        name = group.group_name
    if rank == 0:
        (text,) = kept.texts
        where = f"in matmul_all_to_all, call 2 of group {name!r}"
        assert re.fullmatch(rf"still waiting for ranks 1, 2 \({SECONDS} s\) {re.escape(where)}", text)


def test_a_long_vote_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    with pytest.raises(fusedcomm.PeerTimeoutError):
        agree(HashStore(), 0, 2, {}, what="a vote", names=[4, 7])
    (text,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"still waiting for rank 7 \({SECONDS} s\) in a vote", text)
