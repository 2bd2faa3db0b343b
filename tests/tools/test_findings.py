"""What the doctor prints: each thing once, and ranks that are alike together."""

from __future__ import annotations

from typing import Any

import pytest

from fusedcomm.doctor import across_ranks
from fusedcomm.doctor.across_ranks import GroupAnswer
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding, by_value, told_once


def test_what_is_on_record_of_proofs_is_shown() -> None:
    proofs = {"matmul_all_reduce fused float32": "", "matmul_all_reduce fused bfloat16": "fused of bfloat16 failed"}
    wrong, right = across_ranks.find_proofs(GroupAnswer([], [], proofs))
    assert (wrong.level, wrong.text) == (WARNING, "fused of bfloat16 failed") and "proofs-*.json" in wrong.advice
    assert right.level == OK and right.text.startswith("right on record: matmul_all_reduce fused float32;")
    [nothing] = across_ranks.find_proofs(GroupAnswer([], [], {}))
    assert nothing.text == "right on record: none; others are proved at their first use"
    assert across_ranks.find_proofs(GroupAnswer([], [])) == []


def test_what_a_line_above_says_is_referred_to_and_equal_lines_are_one() -> None:
    reason = "the native part of fusedcomm cannot be loaded (no file); pip install builds it"
    findings = [
        Finding("versions", "native part", WARNING, reason, "needed on CPU only"),
        *(Finding("gpus", f"GPU {index}", ERROR, "MIG is on", "nvidia-smi -mig 0") for index in range(8)),
        Finding("gpus", "GPU 8", WARNING, "slowed down now", ""),
        Finding("algorithms", "cpu unfused", OK, f"used for 30 of 30 example calls ({reason})"),
        Finding("algorithms", "cpu chunked", ERROR, f"not used: {reason}"),
        Finding("algorithms", "cpu fused", ABSENT, f"not used: {reason}"),
    ]
    shown = [(each.name, each.level, each.text) for each in told_once(findings)]
    assert shown == [
        ("native part", WARNING, reason),
        ("GPU 0, 1, 2, 3, 4, 5, 6, 7", ERROR, "MIG is on"),
        ("GPU 8", WARNING, "slowed down now"),
        ("cpu unfused", OK, "used for 30 of 30 example calls (see native part, above)"),
        ("cpu chunked, fused", ERROR, "not used: see native part, above"),
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({0: "a", 1: "a", 2: "a", 3: "a"}, "ranks 0 to 3: a"),
        ({0: "a", 1: None, 2: "a", 3: "b"}, "ranks 0 and 2: a, rank 1: not set, rank 3: b"),
        ({**dict.fromkeys(range(62), 1), 62: 2, 63: 1}, "ranks 0 to 61 and 63: 1, rank 62: 2"),
    ],
)
def test_ranks_with_equal_values_are_named_together(values: dict[int, Any], text: str) -> None:
    assert by_value(values) == text
