"""Whatever the graph, the estimates and the budget: scheduling never costs time, memory or values."""

import copy
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule, Node

from fusedcomm.compile.overlap import dependencies
from fusedcomm.compile.overlap.estimator import Estimator
from fusedcomm.compile.overlap.scheduler import schedule
from fusedcomm.compile.overlap.simulator import simulate
from tests.helpers.merge_world import fake_ranks
from tests.helpers.order_checks import Accesses, executed, group_of, is_start, peak_bytes, sent
from tests.helpers.random_graphs import Peers, build, inputs

BUDGETS = [100, 105, 120, 10**9]  # % of the peak as it comes


@contextmanager
def fake_world(rank: int) -> Iterator[list[Peers]]:
    """4 nodes of 4 ranks, with a group inside the node, one across nodes, and one of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    with fake_ranks(16, rank):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        groups = [mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD]
        yield [Peers(each.group_name, each.size(), each.rank()) for each in groups]


@pytest.fixture
def groups() -> Iterator[list[Peers]]:
    with fake_world(rank=1) as found:
        yield found


def told(rng: random.Random, gm: GraphModule) -> Estimator:
    """Times for an Estimator on both links. Most nodes have random times, or none has."""
    share, scale = rng.choice([0, 0.5, 1]), rng.choice([0.01, 1, 100])
    names = [node.name for node in gm.graph.nodes if node.op == "call_function" and rng.random() < share]
    times = {name: scale * rng.choice([0, 0.1, 1, 10]) * rng.random() for name in names}
    return Estimator("cuda", ranks_per_node=4, times=times)


def collectives(gm: GraphModule) -> Counter[tuple[str, str]]:
    return Counter((str(node.target), group_of(node)) for node in gm.graph.nodes if is_start(node))


def check(groups: list[Peers], seed: int, steps: int, percent: int, bucket: bool, fuse: bool) -> Any:
    rng = random.Random(seed)
    while True:
        gm = build(rng, groups, steps, unwaited=True)
        args = inputs(gm, seed)
        want, late = (executed(gm, args, groups, late=late) for late in (False, True))
        if all(map(torch.equal, want, late)):  # else the graph itself writes to what a collective still reads
            break
    estimator = told(rng, gm)
    before, peak, bytes_sent, starts = simulate(gm, estimator), peak_bytes(gm), sent(gm), collectives(gm)
    accesses = Accesses(gm.graph.nodes)
    budget = before.peak_bytes * percent // 100
    twin = copy.deepcopy(gm)
    options = {"memory_budget_bytes": budget, "bucket": bucket, "fuse": fuse}
    report = schedule(gm, estimator=estimator, **options)
    schedule(twin, estimator=estimator, **options)

    gm.graph.lint()
    assert [node.name for node in twin.graph.nodes] == [node.name for node in gm.graph.nodes], "not deterministic"
    assert not (found := accesses.violations(list(gm.graph.nodes))), found
    if not bucket and not fuse:
        assert collectives(gm) == starts and len(gm.graph.nodes) == len(accesses.nodes), "other nodes"
        assert peak == before.peak_bytes and peak_bytes(gm) <= max(budget, peak), "memory"
    if not fuse:
        assert sent(gm) == bytes_sent, "bytes sent"
    for at_end in (False, True):
        for got, expected in zip(executed(gm, args, groups, late=at_end), want, strict=True):
            assert torch.equal(got, expected), "values"
    after = simulate(gm, estimator)
    assert report.before == before and report.after == after, "report"
    assert after.peak_bytes <= max(budget, before.peak_bytes), "memory"
    assert after.total_ms <= before.total_ms * (1 + 1e-9), "time"
    return report


def random_schedules(groups: list[Peers], num_examples: int, most_steps: int) -> list[Any]:
    reports = []

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=num_examples < 1000,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        seed=st.integers(0, 1 << 32),
        steps=st.integers(0, most_steps),
        percent=st.sampled_from(BUDGETS),
        bucket=st.booleans(),
        fuse=st.booleans(),
    )
    def example(**drawn: Any) -> None:
        reports.append(check(groups, **drawn))

    example()
    return reports


def test_random_graphs(groups: list[Peers]) -> None:
    reports = random_schedules(groups, 50, 25)
    faster = [each for each in reports if each.after.total_ms < each.before.total_ms]
    assert len(faster) > len(reports) // 3  # not in vain


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_random_graphs(groups: list[Peers]) -> None:
    random_schedules(groups, 500, 60)


def test_ignored_writes_are_caught(groups: list[Peers], monkeypatch: pytest.MonkeyPatch) -> None:
    def data_only(nodes: list[Node], waits_for: Any, memory: Any) -> list[list[int]]:
        index = {node: i for i, node in enumerate(nodes)}
        inputs = [i for i, node in enumerate(nodes) if node.op == "placeholder"]
        before = [{index[each] for each in node.all_input_nodes} for node in nodes[:-1]]
        return [sorted(each | {p for p in inputs if p < i}) for i, each in enumerate(before)] + [
            list(range(len(nodes) - 1))
        ]

    monkeypatch.setattr(dependencies, "predecessors", data_only)
    with pytest.raises(AssertionError, match="one writes"):
        for seed in range(16):
            check(groups, seed, 30, 100, False, False)
