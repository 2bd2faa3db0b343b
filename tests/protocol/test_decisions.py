"""The decision of a push's programs: no interleaving is wrong, and each rule that is taken away is found."""

from __future__ import annotations

import pytest

from tests.protocol.decisions import DecisionModel, DecisionRules
from tests.protocol.explorer import explore


def test_no_interleaving_is_wrong() -> None:
    outcome = explore(DecisionModel(DecisionRules()))
    assert outcome.violation is None, str(outcome)
    assert outcome.states > 1000


@pytest.mark.parametrize(
    ("rule", "violation"),
    [
        ("decides_once", "wrong data"),
        ("exact_epoch", "wrong data in place"),
        ("looks_first", "wrong data"),
        ("clears", "wrong data in place"),
        ("counts", "wrong data"),
        ("marks_first", "wrong data"),
        ("marks_epoch", "wrong data in place"),
        ("stamps_last", "wrong data in place"),
        ("in_stream_order", "a finished result is written"),
    ],
)
def test_a_rule_that_is_taken_away_is_found(rule: str, violation: str) -> None:
    outcome = explore(DecisionModel(DecisionRules(**{rule: False})))
    assert outcome.violation is not None and violation in outcome.violation, str(outcome)
