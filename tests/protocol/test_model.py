"""Every interleaving of the model of the protocol (tests/protocol/), with planted bugs; -s prints how many states."""

from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.explorer import Outcome, explore
from tests.protocol.model import ProtocolModel
from tests.protocol.programs import ProgramModel, ProgramRules
from tests.protocol.scenario import (
    ALL_REDUCE,
    COMBINE,
    DISPATCH,
    EMPTY,
    EMPTY_FROM_0,
    GATHER,
    GATHERED_K,
    HANDSHAKE,
    OTHER_OP,
    PLAIN_ALL_REDUCE,
    PLAIN_GATHER,
    PLAIN_PUSH,
    PLAIN_REDUCE,
    PUSH,
    REDUCE,
    RESET,
    RETURN,
    UNEVEN,
    UNFUSED,
    Call,
    Rules,
    Scenario,
    all_run,
    captured,
    in_rounds,
)

REPLAYS = (PUSH, UNFUSED, PUSH, PUSH)
OVERWRITE, EARLY, DEADLOCK = "overwrite of unread data", "read before the matching write", "deadlock"
WRONG, SPURIOUS = "wrong data without an error", "error without a fault"


def run(scenario: Scenario) -> Outcome:
    outcome = explore(ProtocolModel(scenario))
    print(f"{scenario.group_size} ranks: {outcome.states} states")
    return outcome


def expect(outcome: Outcome, violation: str) -> None:
    assert outcome.violation is not None and outcome.violation.startswith(violation), outcome


def with_another_op(*tail: Call) -> tuple[tuple[Call, ...], ...]:
    """Three ranks, the last of which calls another op in its second call."""
    script = (PUSH, PUSH, *tail)
    return script, script, (PUSH, OTHER_OP, PUSH, *tail)


# Without faults the time-outs are off, so that nothing but the protocol ends a wait.


CALLS = {
    "push": (in_rounds(PUSH, 4), PUSH),
    "mixed": (PUSH, GATHER, ALL_REDUCE, REDUCE),
    "gather": (GATHER, GATHER, GATHER),
    "empty": (PUSH, EMPTY, EMPTY_FROM_0, GATHER),
    "uneven": (UNEVEN, PUSH, UNEVEN),
    "unfused": (PUSH, UNFUSED, PUSH, UNFUSED, GATHER, PUSH),
    "replays-with-device-slots": (*REPLAYS, *REPLAYS),
    "replays-with-fixed-slots-and-barriers": (captured(1), HANDSHAKE) * 3,
    "grown": (PUSH, GATHER, HANDSHAKE, RESET, GATHER, PUSH),
    "rows": (DISPATCH, COMBINE, DISPATCH, COMBINE),
    "rows-among-others": (COMBINE, PUSH, COMBINE, GATHER, DISPATCH),
    "rows-returned": (RETURN, COMBINE, RETURN, DISPATCH, RETURN),
}


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("calls", CALLS)
def test_without_faults_all_data_arrive(calls: str, device: bool) -> None:
    assert run(Scenario(all_run(2, *CALLS[calls]), device=device)).violation is None
    assert run(Scenario(all_run(3, *CALLS[calls][:3]), device=device)).violation is None


# ranks whose programs differ


def by_copies(call: Call) -> Call:
    assert call.traffic is not None
    return replace(call, traffic=replace(call.traffic, algorithm="chunked"))


DIFFERING = {
    "no-matmul": ((PUSH, GATHER, REDUCE), (PLAIN_PUSH, PLAIN_GATHER, PLAIN_REDUCE)),
    "no-matmul-twice": ((ALL_REDUCE, PUSH), (PLAIN_ALL_REDUCE, PLAIN_PUSH)),
    "matmuls-behind-and-before": ((PUSH, PUSH, PUSH), (GATHERED_K, PLAIN_PUSH, GATHERED_K)),
    "cut-in-chunks-and-in-tiles": ((PUSH, GATHER, REDUCE), (by_copies(PUSH), by_copies(GATHER), by_copies(REDUCE))),
    "three": ((PUSH, GATHER), (PLAIN_PUSH, by_copies(GATHER)), (GATHERED_K, PLAIN_GATHER)),
    "rounds": ((in_rounds(PUSH, 3), PUSH), (in_rounds(PLAIN_PUSH, 3), GATHERED_K)),
}


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("scripts", DIFFERING)
def test_ranks_of_one_wire_may_multiply_as_they_like(scripts: str, device: bool) -> None:
    assert run(Scenario(DIFFERING[scripts], device=device)).violation is None


@pytest.mark.parametrize(
    ("script", "violation"),
    [
        ((in_rounds(PLAIN_PUSH, 2), PUSH), DEADLOCK),  # as where K decides into how many rounds a rank cuts
        ((replace(PLAIN_PUSH, op=9), PUSH), SPURIOUS),  # as where the fingerprint has the op
        ((UNFUSED, PUSH), DEADLOCK),  # as where K decides whether a rank takes the group's own collective
    ],
)
def test_a_matmul_that_changes_the_wire_is_caught(script: tuple[Call, ...], violation: str) -> None:
    expect(run(Scenario(((PUSH, PUSH), script))), violation)


# with faults


def on_host(group_size: int, *script: Call, **faults: Any) -> Scenario:
    return Scenario(all_run(group_size, *script), **faults)


def on_device(group_size: int, *script: Call, **faults: Any) -> Scenario:
    return Scenario(all_run(group_size, *script), device=True, **faults)


LATE_OR_DEAD: dict[str, Any] = {"timeouts": True, "dies": (0, 1)}
MIXED = (PUSH, GATHER, ALL_REDUCE, EMPTY_FROM_0)

HOST_FAULTS = {
    "late-or-dead": on_host(2, *MIXED, RESET, GATHER, PUSH, **LATE_OR_DEAD),
    "late-3-ranks": on_host(3, PUSH, timeouts=True),
    "dead-3-ranks": on_host(3, PUSH, timeouts=True, dies=(0,)),
    "leaves": on_host(2, *MIXED, RESET, GATHER, PUSH, leaves=(0, 1)),
    "leaves-3-ranks": on_host(3, PUSH, PUSH, leaves=(0,)),
    "ends": on_host(2, *MIXED, GATHER, PUSH, ends=(0, 1)),
    "ends-3-ranks": on_host(3, PUSH, REDUCE, ends=(0,)),
    "ends-or-dead-or-late": on_host(2, PUSH, GATHER, PUSH, RESET, PUSH, ends=(0,), **LATE_OR_DEAD),
    "dead-and-found": on_host(2, *MIXED, dies=(0,)),
    "another-op": Scenario(with_another_op(RESET, PUSH), mismatched=True),
    "one-call-fewer": Scenario(((PUSH, GATHER), (PUSH,)), mismatched=True, timeouts=True),
    "rows-late-or-dead": on_host(2, DISPATCH, COMBINE, RESET, COMBINE, DISPATCH, **LATE_OR_DEAD),
    "rows-leave": on_host(2, DISPATCH, COMBINE, PUSH, RESET, COMBINE, leaves=(0, 1)),
    "rows-end": on_host(2, DISPATCH, COMBINE, COMBINE, DISPATCH, ends=(0, 1)),
    "rows-late-3-ranks": on_host(3, COMBINE, timeouts=True, dies=(0,)),
}
DEVICE_FAULTS = {
    "late-or-dead": on_device(2, PUSH, GATHER, PUSH, RESET, PUSH, timeouts=True),
    "late-3-ranks": on_device(3, PUSH, timeouts=True),
    "late-with-an-empty-round": on_device(2, PUSH, PUSH, EMPTY, PUSH, PUSH, timeouts=True),
    "reads-beside-sends": on_device(2, UNEVEN, GATHER, UNEVEN, timeouts=True),
    "leaves": on_device(2, *MIXED, RESET, GATHER, PUSH, leaves=(0, 1)),
    "ends": on_device(2, PUSH, GATHER, ALL_REDUCE, PUSH, ends=(0, 1)),
    "another-op": Scenario(with_another_op(), mismatched=True, device=True),
    "rows-late": on_device(2, *(COMBINE,) * 4, timeouts=True),
    "rows-leave": on_device(2, DISPATCH, COMBINE, COMBINE, RESET, COMBINE, leaves=(0, 1)),
    "rows-end": on_device(2, DISPATCH, COMBINE, COMBINE, PUSH, ends=(0, 1)),
    "rows-late-3-ranks": on_device(3, COMBINE, timeouts=True),
    "another-op-beside-rows": Scenario(
        ((COMBINE, PUSH), (COMBINE, PUSH), (COMBINE, OTHER_OP, PUSH)), mismatched=True, device=True
    ),
}


@pytest.mark.parametrize("scenario", HOST_FAULTS)
def test_on_a_host_every_wait_ends_in_data_or_an_error(scenario: str) -> None:
    assert run(HOST_FAULTS[scenario]).violation is None


@pytest.mark.parametrize("scenario", DEVICE_FAULTS)
def test_on_a_device_every_wait_ends_in_data_or_an_error(scenario: str) -> None:
    assert run(DEVICE_FAULTS[scenario]).violation is None


# R = 3 after resets, and longer scripts: minutes


LONG = {
    "without-faults": on_device(3, PUSH, GATHER, ALL_REDUCE, EMPTY_FROM_0, GATHER),
    "host-reduces": on_host(3, PUSH, REDUCE, timeouts=True),
    "host-late": on_host(3, PUSH, PUSH, RESET, PUSH, timeouts=True),
    "host-dead": on_host(3, PUSH, PUSH, timeouts=True, dies=(0,)),
    "host-ends": on_host(3, PUSH, GATHER, REDUCE, ends=(0, 1)),
    "host-rows": on_host(3, DISPATCH, timeouts=True),
    "host-rows-dead": on_host(3, DISPATCH, COMBINE, dies=(0,)),
    "device-rows": on_device(3, DISPATCH, timeouts=True),
    "host-leaves": on_host(3, PUSH, REDUCE, RESET, PUSH, leaves=(0,)),
    "device-late": on_device(3, PUSH, PUSH, timeouts=True),
    "device-dead": on_device(3, PUSH, timeouts=True, dies=(0,)),
    "device-gathers": on_device(2, *(GATHER,) * 4, RESET, GATHER, **LATE_OR_DEAD),
    "device-leaves": on_device(3, PUSH, ALL_REDUCE, RESET, PUSH, leaves=(0,)),
    "device-may-die": on_device(2, PUSH, GATHER, PUSH, RESET, GATHER, timeouts=True, dies=(0,)),
    "device-two-may-die": on_device(2, *MIXED, RESET, GATHER, PUSH, **LATE_OR_DEAD),
    "device-another-op": Scenario(with_another_op(RESET, PUSH), mismatched=True, device=True),
}


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", LONG)
def test_long_scripts(scenario: str) -> None:
    assert run(LONG[scenario]).violation is None


# planted bugs, each next to the same without it


BEFORE_THE_END = "error before the end"
RETRIED = (PUSH, PUSH, RESET, PUSH, PUSH)

PLANTED: dict[str, tuple[Scenario, Rules, str]] = {
    "one-slot": (on_host(2, PUSH, PUSH), Rules(num_slots=1), OVERWRITE),
    "flag-before-data": (on_host(2, PUSH), Rules(data_before_flag=False), EARLY),
    "no-wait": (on_host(2, PUSH), Rules(waits=False), EARLY),
    "last-signal-before-the-reads-end": (
        on_device(2, REDUCE, REDUCE, REDUCE),
        Rules(reads_before_next_signals=False),
        OVERWRITE,
    ),
    "empty-chunk-unsignalled": (on_host(2, PUSH, EMPTY_FROM_0), Rules(signals_empty_chunks=False), DEADLOCK),
    "empty-chunk-to-one-peer-unsignalled": (on_host(3, UNEVEN), Rules(signals_empty_chunks=False), DEADLOCK),
    "empty-round-left-out": (on_host(2, PUSH, EMPTY, PUSH), Rules(takes_part_in_empty_rounds=False), OVERWRITE),
    "unfused-takes-an-epoch-here": (on_host(2, UNFUSED, PUSH), Rules(unfused_takes_epoch=(0,)), DEADLOCK),
    "unfused-takes-an-epoch-everywhere": (
        on_host(2, PUSH, UNFUSED, PUSH),
        Rules(unfused_takes_epoch=(0, 1)),
        OVERWRITE,
    ),
    "waits-for-the-equal-flag": (HOST_FAULTS["another-op"], Rules(waits_for="equal"), DEADLOCK),
    "fingerprint-not-compared": (HOST_FAULTS["another-op"], Rules(compares_fingerprints=False), WRONG),
    "peers-not-told": (HOST_FAULTS["leaves"], Rules(tells_peers=False), DEADLOCK),
    "peers-not-told-of-an-end": (HOST_FAULTS["ends"], Rules(tells_peers=False), DEADLOCK),
    "a-completed-round-spoiled-by-an-end": (HOST_FAULTS["ends"], Rules(ends_behind_its_rounds=False), BEFORE_THE_END),
    "a-completed-round-spoiled-by-an-end-on-a-device": (
        DEVICE_FAULTS["ends"],
        Rules(ends_behind_its_rounds=False),
        BEFORE_THE_END,
    ),
    "dead-not-found": (HOST_FAULTS["dead-and-found"], Rules(finds_dead=False), DEADLOCK),
    "late-broken-word-without-a-new-segment": (on_host(2, *RETRIED, timeouts=True), Rules(new_segment=False), SPURIOUS),
    "late-write-without-a-new-segment": (
        on_device(2, *RETRIED, timeouts=True),
        Rules(new_segment=False, drains=False),
        EARLY,
    ),
    "new-header-cleared-too-late": (on_host(2, PUSH, RESET, PUSH), Rules(clears_before_agreement=False), DEADLOCK),
    "no-look-after-the-reads": (
        on_device(2, PUSH, PUSH, PUSH, timeouts=True),
        Rules(checks_broken_after_reads=False),
        WRONG,
    ),
    "pushes-after-a-failure-untold": (DEVICE_FAULTS["another-op"], Rules(gives_up_earlier=False), WRONG),
    "pushes-after-a-time-out-untold": (DEVICE_FAULTS["late-or-dead"], Rules(gives_up_earlier=False), WRONG),
    "rows-sent-before-all-counts": (
        on_device(3, DISPATCH),
        Rules(rows_after_counts=False),
        "rows placed before the counts",
    ),
    "rows-of-one-slot": (on_host(2, DISPATCH), Rules(num_slots=1), OVERWRITE),
    "rows-read-without-a-wait": (on_host(2, COMBINE), Rules(waits=False), EARLY),
    "rows-of-peers-read-from-one-slot": (on_host(2, COMBINE, COMBINE), Rules(num_slots=1), OVERWRITE),
    "rows-overwritten-beside-their-readers": (
        on_device(2, COMBINE, COMBINE, COMBINE),
        Rules(reads_before_next_signals=False),
        OVERWRITE,
    ),
    "rows-shown-after-a-failure-untold": (DEVICE_FAULTS["rows-late"], Rules(gives_up_earlier=False), WRONG),
    "readers-of-a-slot-untold": (DEVICE_FAULTS["another-op-beside-rows"], Rules(tells_readers=False), WRONG),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_caught(bug: str) -> None:
    scenario, rules, check = PLANTED[bug]
    assert run(scenario).violation is None
    expect(run(replace(scenario, rules=rules)), check)


@pytest.mark.parametrize(
    "script",
    [(captured(1), captured(1)), (PUSH, captured(1), HANDSHAKE)],
    ids=["fixed-slots", "fixed-slots-and-calls-beside"],
)
def test_replays_that_need_a_barrier_are_caught(script: tuple[Call, ...]) -> None:
    expect(run(on_device(2, *script)), OVERWRITE)


def test_an_error_without_a_fault_is_caught() -> None:
    """The scripts differ, while the model is told that nothing is wrong."""
    expect(run(Scenario(with_another_op())), SPURIOUS)


def test_in_a_new_segment_late_writes_do_no_harm() -> None:
    """Late writes do no harm in a new segment, not even those of a device that the reset has not waited for."""
    scenario = on_device(2, *RETRIED, timeouts=True)
    assert run(replace(scenario, rules=Rules(drains=False))).violation is None


# inside a rank on a device


ROUNDS = [("push", "push", "push"), ("push", "gather"), ("gather", "push"), ("gather rows at once", "push at once")]


@pytest.mark.parametrize(
    "rounds", [*ROUNDS, pytest.param(("gather", "gather", "push", "gather"), marks=pytest.mark.nightly)], ids="-".join
)
def test_programs_signal_whole_chunks_and_find_their_epoch(rounds: tuple[str, ...]) -> None:
    assert explore(ProgramModel(rounds, ProgramRules())).violation is None


@pytest.mark.parametrize(
    ("rounds", "rules", "check"),
    [
        (("push", "push"), ProgramRules(last_signals=False), "wrong data"),
        (("push at once", "push"), ProgramRules(last_signals=False), "wrong data"),
        (("push", "push"), ProgramRules(clears_counter=False), DEADLOCK),
        (("gather", "push"), ProgramRules(waits_for_own=False), "wrong epoch"),
        (("gather rows", "push"), ProgramRules(waits_for_own=False), "wrong epoch"),
        (("push", "push"), ProgramRules(last_counts_epoch=False), "wrong epoch"),
        (("gather", "push"), ProgramRules(joins=False), "wrong data"),
    ],
    ids=[
        "first-signals",
        "first-signals-all",
        "counter-not-cleared",
        "own-chunk-not-awaited",
        "own-signal-not-awaited",
        "first-counts-epoch",
        "pack-not-joined",
    ],
)
def test_each_bug_planted_in_a_kernel_is_caught(rounds: tuple[str, ...], rules: ProgramRules, check: str) -> None:
    expect(explore(ProgramModel(rounds, rules)), check)
