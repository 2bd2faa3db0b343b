"""Every error between ranks ends with one line of what to do next."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from fusedcomm.errors import RESET_FIRST, PeerError, PeerMismatchError, PeerTimeoutError

CHECK, MORE_TIME, POSTMORTEM = "FUSEDCOMM_CHECK=1", "FUSEDCOMM_TIMEOUT_S", "fusedcomm postmortem"


def next_line(kind: type[PeerError], **known: Any) -> str:
    error = kind("what happened", peers=[1], op="op", epoch=2, **known)
    first, last = str(error).splitlines()
    assert first == "what happened" and last == error.next_step and last.startswith("Next: ")
    return last


@pytest.mark.parametrize("folder", [None, "some/place"])
def test_the_last_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch, folder: str | None) -> None:
    monkeypatch.delenv("FUSEDCOMM_DUMP_DIR", raising=False)
    if folder is not None:
        monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", folder)
    late, differ = next_line(PeerTimeoutError), next_line(PeerMismatchError)
    known, other = next_line(PeerMismatchError, differs="x shape"), next_line(PeerError)
    gone = next_line(PeerTimeoutError, left=True)
    assert [MORE_TIME in line for line in (late, differ, known, other, gone)] == [True, False, False, False, False]
    assert [CHECK in line for line in (late, differ, known, other, gone)] == [False, True, False, False, False]
    assert "make x shape the same" in known and gone == other
    for line in (late, differ, known, other):
        assert f"`{POSTMORTEM} {folder or 'DIR'}`" in line
        assert ("with FUSEDCOMM_DUMP_DIR=DIR" in line) == (folder is None)


def test_copies_say_what_the_rank_that_raised_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", "of this rank")
    error = PeerMismatchError("what happened", peers=[1], op="op", epoch=2, differs="dtype")
    sent = pickle.dumps(error)
    monkeypatch.setenv("FUSEDCOMM_DUMP_DIR", "of another process")
    for each in (pickle.loads(sent), copy.copy(error), error.again()):
        assert type(each) is PeerMismatchError and str(each) == str(error) and each.__dict__ == error.__dict__
        assert each is not error and each.args == ("what happened",) and each.peers is not error.peers
    assert str(error.until_reset()) == f"what happened. {RESET_FIRST}\n{error.next_step}"
