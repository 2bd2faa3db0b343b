"""Two hosts, two ranks on each: algorithms inside a host and across, and a link that is cut in the middle of a call."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusedcomm.memory.vote import STORE_GRACE_S
from tests.helpers.hosts import Host, NoHosts, torchrun, two_hosts
from tests.helpers.hosts_world import BACK_S, GLOO_S, MEMBERS, PROBLEMS, STEPS, VOTE_S

pytestmark = pytest.mark.thorough

RUN_S = 180.0
LATE_S = 3.0  # on a machine that does other things
ELSEWHERE = "rank 2 is on another host than rank 0"


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    try:
        with two_hosts() as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def found(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The plans, by rank and group. The ranks compared the values themselves."""
    return torchrun(hosts, "tests.helpers.hosts_world", "values", tmp_path_factory.mktemp("hosts"), RUN_S)


def same_in(group: str, results: list[Any]) -> Any:
    """The result that all ranks of a group have alike, and no other rank has."""
    by_rank = [results[rank][group] for rank in MEMBERS[group]]
    assert by_rank == by_rank[:1] * len(by_rank)
    assert all(group not in results[rank] for rank in range(4) if rank not in MEMBERS[group])
    return by_rank[0]


def test_groups_inside_a_host_share_memory_and_groups_across_hosts_use_collectives(found: list[Any]) -> None:
    """These calls are too small to be worth pieces; the reason says so with both times."""
    for group in ("host 0", "host 1"):
        assert [(op, how) for op, how, _ in same_in(group, found)] == [(p.op, "chunked") for p in PROBLEMS]
    for group, elsewhere in (("whole", ELSEWHERE), ("across", "rank 1 is on another host than rank 0")):
        plans = same_in(group, found)
        assert [(op, how) for op, how, _ in plans] == [(p.op, "unfused") for p in PROBLEMS]
        for _, _, reason in plans:
            assert re.fullmatch(f"{elsewhere}; estimated .* [mu]s, pipelined .* [mu]s, default numbers", reason)


@pytest.mark.nightly
def test_a_link_that_is_cut_is_an_error_in_time_and_there_is_a_way_back(hosts: list[Host], tmp_path: Path) -> None:
    results = torchrun(hosts, "tests.helpers.hosts_world", "cut", tmp_path, RUN_S)
    for rank, each in enumerate(results):
        for failed in (each["across"], each["gather across"], each["old group"]):
            assert failed["type"] == "RuntimeError"  # gloo's own
            assert failed["seconds"] < GLOO_S + LATE_S
        for failed in (each["across"], each["gather across"]):
            assert any(text in failed["text"] for text in ("Timed out waiting", "closed", "closure")), failed
        if rank in MEMBERS["host 0"]:  # the first piece of that call had come, and the second never did
            assert each["across"]["before"] == 0
        for step in STEPS:
            if rank in MEMBERS["host 0"]:  # the store is on that host
                assert each[step]["text"] is None, each
            else:
                assert each[step]["type"] == "PeerTimeoutError"
                assert f"the store of the process group does not answer rank {rank - 2}" in each[step]["text"]
                assert VOTE_S <= each[step]["seconds"] < VOTE_S + STORE_GRACE_S + LATE_S
            # negative control: without fusedcomm's own bound the store's call would still wait
            assert (each[step]["blocked"] > 0) == (rank in MEMBERS["host 1"])
        assert max(each["back after"]) < BACK_S
        assert each["blocked"] == 0
