"""Every interleaving of the model with results in place (tests/protocol/results.py), with planted bugs.

With two ranks each word of a post is a step of its own. With three a post is one step, as its words concern two ranks.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.scenario import (
    ALL_REDUCE,
    COMBINE,
    DISPATCH,
    EMPTY_FROM_0,
    GATHER,
    HANDSHAKE,
    OTHER_OP,
    PUSH,
    REDUCE,
    RESET,
    UNEVEN,
    Call,
    ResultRules,
    Rules,
    Scenario,
    in_rounds,
)
from tests.protocol.test_model import EARLY, OVERWRITE, expect, on_host, run, with_another_op

LARGER = replace(PUSH, size=2)  # a result of another size, of a call with the fingerprint of PUSH
PARTS, OTHER_PARTS = ((replace(OTHER_OP, sizes=sizes), PUSH) for sizes in ((2, 1), (1, 2)))  # with one fingerprint


def two(*script: Call, **settings: Any) -> Scenario:
    return on_host(2, *script, **{"blocks": 1, **settings})


def three(*script: Call, offers: tuple[int, ...], **settings: Any) -> Scenario:
    return on_host(3, *script, blocks=1, offers=offers, whole_posts=True, **settings)


SCENARIOS = {
    "two-calls": two(PUSH, PUSH),
    "three-calls": two(PUSH, GATHER, PUSH),
    "rounds": two(in_rounds(PUSH, 2), PUSH),
    "two-blocks": two(PUSH, PUSH, blocks=2),
    "late": two(PUSH, PUSH, timeouts=True),
    "late-and-reset": two(PUSH, RESET, PUSH, timeouts=True),
    "dead": two(PUSH, GATHER, dies=(0,)),
    "leaves": two(PUSH, PUSH, leaves=(0,)),
    "ends": two(PUSH, REDUCE, PUSH, ends=(0, 1)),
    "another-op": Scenario(((PUSH, PUSH), (PUSH, OTHER_OP)), mismatched=True, blocks=1),
    "another-size": Scenario(((PUSH, PUSH), (PUSH, LARGER)), mismatched=True, blocks=1),
    "another-layout": Scenario(((PUSH, PUSH), (PUSH, replace(PUSH, layout=1))), blocks=1),
    "one-call-fewer": Scenario(((PUSH, GATHER), (PUSH,)), mismatched=True, timeouts=True, blocks=1),
    "uneven": two(UNEVEN, PUSH, UNEVEN),
    "other-parts": Scenario((PARTS, OTHER_PARTS), mismatched=True, blocks=1),
    "3-ranks": three(PUSH, offers=(0,)),
    "rows": two(DISPATCH, COMBINE, DISPATCH),
    "rows-late": two(DISPATCH, PUSH, timeouts=True),
    "rows-leave": two(DISPATCH, PUSH, leaves=(0,)),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_in_place_are_right_or_raise(scenario: str) -> None:
    assert run(SCENARIOS[scenario]).violation is None


FINISHED, ANOTHER, BEYOND = "write to a finished result", "write to the result of another call", "write beyond"
TAKEN = "result taken from its user"


def in_order(*chunk: str) -> ResultRules:
    return ResultRules(chunk=chunk)


PLANTED: dict[str, tuple[str, Rules | ResultRules, str]] = {
    "one-slot": ("two-calls", Rules(num_slots=1), OVERWRITE),
    "a-post-of-an-earlier-round-is-taken": ("two-calls", ResultRules(compares_epoch=False), ANOTHER),
    "fingerprint-of-a-post-not-compared": ("another-op", ResultRules(compares_fingerprint=False), ANOTHER),
    "layout-not-compared": ("another-layout", ResultRules(compares_layout=False), "write in another layout"),
    "size-not-compared": ("another-size", ResultRules(compares_size=False), BEYOND),
    "size-of-a-part-not-compared": ("other-parts", ResultRules(compares_size=False), BEYOND),
    "empty-chunk-unsignalled": ("uneven", Rules(signals_empty_chunks=False), "deadlock"),
    "mark-after-flag": ("two-calls", in_order("look", "place", "write", "signal", "mark"), EARLY),
    "flag-before-place": ("two-calls", in_order("look", "place", "mark", "signal", "write"), EARLY),
    "post-read-after-signal": ("two-calls", in_order("signal", "look", "place", "write", "mark"), EARLY),
    "place-read-before-stamp": ("two-blocks", in_order("place", "look", "write", "mark", "signal"), FINISHED),
    "stamp-posted-before-place": ("two-blocks", ResultRules(post=("stamp", "post")), FINISHED),
    "posted-before-the-reads-of-the-round-before": ("two-blocks", ResultRules(posts_after_reads=False), ANOTHER),
    "any-mark-is-taken": ("three-calls", ResultRules(mark_names="nothing"), EARLY),
    "a-mark-names-the-call-alone": ("three-calls", ResultRules(mark_names="op"), EARLY),
    "copied-out-over-what-is-in-place": ("two-calls", ResultRules(copies_slots_only=False), EARLY),
    "freed-before-the-waits": ("two-calls", ResultRules(holds_until="signal"), FINISHED),
    "block-of-a-late-call-used-again": ("late", ResultRules(retires=False), FINISHED),
    "block-of-a-left-call-used-again": ("leaves", ResultRules(retires=False), FINISHED),
    "post-of-earlier-counts-is-taken": ("rows", ResultRules(compares_epoch=False), FINISHED),
    "any-mark-of-rows-is-taken": ("rows", ResultRules(mark_names="nothing"), EARLY),
    "block-of-left-rows-used-again": ("rows-leave", ResultRules(retires=False), FINISHED),
    "reset-forgets-who-has-a-block": ("late-and-reset", ResultRules(heap_after_reset="forgotten"), TAKEN),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_each_bug_planted_in_results_is_caught(bug: str) -> None:
    """The scenarios without the bug are those above."""
    scenario, rules, check = PLANTED[bug]
    rules = rules if isinstance(rules, Rules) else Rules(results=rules)
    expect(run(replace(SCENARIOS[scenario], rules=rules)), check)


LONG = {
    "mixed": two(PUSH, GATHER, ALL_REDUCE, EMPTY_FROM_0),
    "sums-between": two(PUSH, REDUCE, ALL_REDUCE),
    "grown": two(PUSH, HANDSHAKE, RESET, GATHER),
    "three-calls-two-blocks": two(PUSH, GATHER, PUSH, blocks=2),
    "late-rounds": two(in_rounds(PUSH, 2), PUSH, timeouts=True),
    "uneven-late": two(UNEVEN, UNEVEN, timeouts=True),
    "3-ranks-uneven": three(UNEVEN, offers=(0,)),
    "late-two-blocks": two(PUSH, GATHER, timeouts=True, blocks=2),
    "late": three(PUSH, timeouts=True, offers=(0, 1, 2)),
    "late-calls": three(PUSH, PUSH, timeouts=True, offers=(0,)),
    "dead": three(PUSH, timeouts=True, dies=(0,), offers=(1,)),
    "leaves": three(PUSH, PUSH, leaves=(0,), offers=(1,)),
    "ends": three(PUSH, PUSH, ends=(0,), offers=(1,)),
    "another-op": Scenario(with_another_op(), mismatched=True, blocks=1, offers=(0, 2), whole_posts=True),
    "three-calls": three(PUSH, PUSH, PUSH, offers=(0,)),
    "late-or-dead-and-reset": two(PUSH, GATHER, RESET, PUSH, timeouts=True, dies=(0, 1)),
    "leaves-and-reset": two(PUSH, ALL_REDUCE, RESET, PUSH, leaves=(0, 1)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", LONG)
def test_long_scripts_with_results_in_place(scenario: str) -> None:
    assert run(LONG[scenario]).violation is None
