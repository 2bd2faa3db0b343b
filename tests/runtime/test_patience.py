"""A wait that takes long says once for whom."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

import fusedcomm
from fusedcomm.runtime import patience, workspace
from fusedcomm.runtime.vote import agree
from tests.helpers.groups import call, check, fresh_group
from tests.helpers.on_ranks import on_ranks
from tests.helpers.problems import PROBLEMS

HEADS = next(problem for problem in PROBLEMS if problem.name == "heads")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(3)
def test_a_long_wait_is_logged_once(rank: int) -> None:
    """It names all ranks that are missing, not only the one whose turn it is."""
    kept = Kept()
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
            time.sleep(1.5 if rank else 0.0)
            check(group, HEADS, call(group, HEADS, 1), 1)
        finally:
            logging.getLogger("fusedcomm").removeHandler(kept)
        name = group.group_name
    if rank == 0:
        (text,) = kept.texts
        assert text.startswith("still waiting for ranks 1, 2 (0.")
        assert text.endswith(f" s) in matmul_all_to_all, call 2 of group {name!r}")


def test_a_long_vote_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setenv("FUSEDCOMM_TIMEOUT_S", "1")
    with pytest.raises(fusedcomm.PeerTimeoutError):
        agree(HashStore(), 0, 2, {}, what="a vote", names=[4, 7])
    (text,) = [record.getMessage() for record in caplog.records]
    assert text.startswith("still waiting for rank 7 (0.") and text.endswith(" s) in a vote")


@pytest.mark.parametrize("patience_s", [patience.PATIENCE_S, 0.1], ids=["short", "long"])
def test_a_short_wait_is_not_logged(
    patience_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "PATIENCE_S", patience_s)
    store = HashStore()
    late = threading.Timer(0.5, agree, (store, 1, 2, {}), {"what": "a vote"})
    late.start()
    agree(store, 0, 2, {}, what="a vote")
    late.join()
    assert bool(caplog.records) == (patience_s < 0.5)
