"""A wait that takes long says once for whom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch.distributed import HashStore

import fusedcomm
from fusedcomm.memory import patience, workspace
from fusedcomm.memory.vote import agree
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import HEADS
from tests.helpers.waiting import wait_until

SECONDS = r"\d+(\.\d+)?"


@on_ranks(3)
def test_a_long_wait_is_logged_once(rank: int, tmp_path: Path) -> None:
    """It names all ranks that are missing, not only the one whose turn it is."""
    looks, texts, must_stop = list[int](), list[str](), workspace.Workspace._must_stop
    waited_long = tmp_path / "rank 0 has waited for twenty looks"

    def counted(self: workspace.Workspace, epoch: int) -> bool:
        looks.append(epoch)
        if len(looks) == 20:
            waited_long.touch()
        return must_stop(self, epoch)

    with fresh_group() as group, fusedcomm.force_algorithm("chunked", strict=True):
        check(group, HEADS, call(group, HEADS))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patience, "PATIENCE_S", 0.05)
            patch.setattr(workspace, "LOOK_S", 0.01)
            patch.setattr(workspace.Workspace, "_must_stop", counted)
            patch.setattr(patience.log, "warning", lambda text, *args: texts.append(text % args))
            if rank:
                wait_until(waited_long.exists)
            check(group, HEADS, call(group, HEADS, 1), 1)
        name = group.group_name
    if rank == 0:
        (text,) = texts
        where = f"in matmul_all_to_all, call 2 of group {name!r}"
        assert re.fullmatch(rf"still waiting for ranks 1, 2 \({SECONDS} s\) {re.escape(where)}", text)


def test_a_long_vote_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    with pytest.raises(fusedcomm.PeerTimeoutError):
        agree(HashStore(), 0, 2, {}, what="a vote", names=[4, 7])
    (text,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf"still waiting for rank 7 \({SECONDS} s\) in a vote", text)
