"""The model is what the code does: by schedules, and by digests of what none says."""

from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.protocol import mirrored, mirrors
from tests.protocol.mirrored import MIRRORED
from tests.protocol.scenario import ALL_REDUCE, EMPTY, PUSH, REDUCE, Call
from tests.protocol.words import words


@pytest.mark.parametrize("call", [PUSH, REDUCE, ALL_REDUCE, EMPTY], ids=lambda call: str(call.op))
def test_all_algorithms_put_the_same_on_the_wire(call: Call) -> None:
    """To each rank in one order. They wait for one source after the other, or for all."""

    def on_the_wire(algorithm: str, rank: int, device: bool) -> tuple[list[Any], list[Any]]:
        assert call.traffic is not None
        found = words((replace(call.traffic, algorithm=algorithm),) * 2, rank, 3, device)
        return sorted((word[:3] for word in found.sends), key=itemgetter(2, 1)), sorted(
            word[:3] for word in found.receives
        )

    for rank in range(3):
        on_host = on_the_wire("chunked", rank, False)
        assert on_host == on_the_wire("chunked", rank, True) == on_the_wire("fused", rank, True)


def test_a_call_sends_and_receives_in_the_order_of_its_schedule() -> None:
    """By hand: rank 1 of 3 sends to the next rank first, and receives from the one that has sent to it first."""
    (sends, receives, _) = words((PUSH.traffic,), 1, 3, False)
    assert [word[:2] for word in sends] == [("write", 2), ("signal", 2), ("write", 0), ("signal", 0)]
    assert [word[:2] for word in receives] == [("wait", 0), ("read", 0), ("wait", 2), ("read", 2), ("finish", 1)]
    assert [word.after for word in receives] == [4] * 5


def test_the_code_is_what_the_model_was_read_against() -> None:
    found = mirrors.complaints(MIRRORED, mirrored.__name__)
    assert not found, "\n\n".join(found)


WAIT, NATIVE_WAIT = ("fusedcomm/memory/workspace.py:Workspace", "wait"), ("kernels/cpu/flags.h", "wait_word")


@pytest.mark.parametrize(
    ("source", "old", "new", "is_noticed"),
    [
        (WAIT, "if flag != epoch <<", "if flag < epoch <<", True),
        (WAIT, "self.fail(op, epoch, fingerprint)", "pass", True),
        (WAIT, "Acquire the flag that", "Get the flag that", False),
        (WAIT, "        if flag !=", "        # why\n        if flag !=", False),
        (NATIVE_WAIT, ">= epoch", "== epoch", True),
        (NATIVE_WAIT, "// the signal may", "// a signal may", False),
    ],
)
def test_a_change_of_mirrored_code_is_noticed(source: tuple[str, str], old: str, new: str, is_noticed: bool) -> None:
    place, names = source
    text = (mirrors.ROOT / place.partition(":")[0]).read_text()
    assert old in text
    assert (mirrors.digest(place, names, text.replace(old, new)) != mirrors.digest(place, names)) == is_noticed


def test_a_change_is_told_with_what_to_do() -> None:
    place, name = WAIT
    (text,) = mirrors.complaints({"model._wait": {place: (name, "another digest")}}, mirrored.__name__)
    assert all(each in text for each in (place, name, "model._wait", mirrors.digest(place, name)))
