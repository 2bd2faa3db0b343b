"""What ``fusedcomm doctor`` finds where ranks differ, or are on several hosts."""

from __future__ import annotations

from typing import Any

import pytest

from fusedcomm.doctor import across_ranks
from fusedcomm.doctor.across_ranks import AlgorithmVerdict, GroupAnswer
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING
from tests.helpers.doctor_machines import rank_facts

DIFFERENCES: list[tuple[dict[str, Any], str, str]] = [
    ({"versions": {"python": "3.11", "torch": "2.14", "triton": "3.9"}}, "torch", ERROR),
    ({"settings": {"FUSEDCOMM_ALGORITHM": "unfused", "FUSEDCOMM_TIMEOUT_S": None}}, "FUSEDCOMM_ALGORITHM", ERROR),
    ({"settings": {"FUSEDCOMM_ALGORITHM": None, "FUSEDCOMM_TIMEOUT_S": "5"}}, "FUSEDCOMM_TIMEOUT_S", WARNING),
    ({"visible": "1"}, "CUDA_VISIBLE_DEVICES", WARNING),
    ({"host": "other namespace"}, "containers", WARNING),
    ({"gpu": "uuid 0"}, "GPUs", ERROR),
    ({"gpus": ["uuid 0"]}, "GPUs by rank", ERROR),
    ({"host": "other", "boot": "other", "visible": "1"}, "ranks", OK),  # on another host they may differ
]


@pytest.mark.parametrize("changes, name, level", DIFFERENCES, ids=str)
def test_differences_between_ranks_are_found(changes: dict[str, Any], name: str, level: str) -> None:
    first = rank_facts(gpu="uuid 0") if "gpu" in changes else rank_facts()
    found = across_ranks.find_differences(GroupAnswer([first, rank_facts(**changes)], []))
    assert [(each.name, each.level) for each in found] == [(name, level)]
    assert across_ranks.find_differences(GroupAnswer([rank_facts()] * 2, []))[0].level == OK


def test_several_hosts_are_no_error() -> None:
    verdict = AlgorithmVerdict("cuda", "chunked", False, False, "rank 1 is on another host than rank 0")
    (finding,) = across_ranks.find_verdicts(GroupAnswer([rank_facts(), rank_facts(boot="other")], [verdict]), "cuda")
    assert finding.level == ABSENT and finding.advice


def test_ranks_of_several_hosts_hear_what_groups_across_them_run() -> None:
    verdicts = [
        AlgorithmVerdict("cpu", name, used, True, "of a reason")
        for name, used in (("pipelined", True), ("chunked", False), ("unfused", True))
    ]
    ranks = [rank_facts(host=host, boot=host) for host in "aabba"]
    (finding,) = across_ranks.find_hosts(GroupAnswer(ranks, verdicts))
    assert (finding.section, finding.level) == ("network", OK)
    hosts, run = "ranks share memory inside 2 hosts (ranks 0, 1 and 4; ranks 2 and 3)", "run pipelined or unfused"
    assert finding.text == f"{hosts}; groups across them {run}"
    assert across_ranks.find_hosts(GroupAnswer([rank_facts()] * 2, verdicts)) == []
