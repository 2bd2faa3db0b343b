"""`fusedcomm bench overhead`: planted costs are found where they belong. Figures of a machine in use mean nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import overhead
from fusedcomm.bench.op_bench import PROGRAMS
from fusedcomm.bench.overhead import CallRow, measure_overhead
from fusedcomm.testing import RankPool
from fusedcomm.tools import main

OP = "matmul_all_to_all"
PLANTED_S = 0.05
FEW_CALLS = {"WARMUP": 0, "HOT_CALLS": 3, "WARM_CALLS": 1, "COLD_CALLS": 2, "LAST_CALLS": 2}


@pytest.mark.usefixtures("shared_ranks")
def test_every_figure_follows_from_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directions = ["forward", "both"]
    file = tmp_path / "overhead.json"
    options = ["--op", OP, "--pass", *directions, "--rounds", "1", "--json", str(file)]
    assert main(["bench", "overhead", *options]) == 0
    report = json.loads(file.read_text())
    assert {row["op"] for row in report["rows"]} == {OP} and report["counts"]["HOT_CALLS"] == overhead.HOT_CALLS
    for direction in directions:
        calls = {row["name"]: row for row in report["rows"] if row["direction"] == direction}
        assert list(calls) == ["torch.mm", "empty op", "baseline", "unfused", "chunked"]
        for call in calls.values():
            assert call["over_baseline"] == pytest.approx(call["hot"]["median"] / calls["baseline"]["hot"]["median"])
            assert call["cpu_over_empty"] == pytest.approx(call["cpu"]["median"] / calls["empty op"]["cpu"]["median"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100 and any("docs/benchmark.md explains each" in line for line in lines)


class SlowBaseline(type(PROGRAMS["matmul_all_to_all"])):  # type: ignore[misc]
    def baseline(self, x: Tensor, w: Tensor) -> Tensor:
        time.sleep(PLANTED_S)
        return super().baseline(x, w)


def slow_op(*args: Any) -> Tensor:
    time.sleep(2 * PLANTED_S)
    return torch.ops.fusedcomm.matmul_all_to_all(
        *args[:2], None, None, *args[2:], *[None] * 5, dist.get_world_size(), dist.group.WORLD.group_name
    )


def measure_planted(rank: int) -> list[CallRow]:
    with (
        mock.patch.dict(vars(overhead), FEW_CALLS),
        mock.patch.dict(PROGRAMS, {OP: SlowBaseline()}),
        mock.patch.object(fusedcomm, OP, slow_op),
    ):
        return measure_overhead(rank, OP, "forward", "cpu", rounds=1)


def test_a_planted_delay_of_the_op_is_no_cpu_time(ranks: Callable[[int], RankPool]) -> None:
    (chunked,) = (row for row in ranks(2).run(measure_planted)[0] if row.name == "chunked")
    assert chunked.over_baseline == pytest.approx(2, rel=0.35)
    assert chunked.cold_over_baseline == pytest.approx(2, rel=0.35)
    assert chunked.cpu.median < PLANTED_S  # asleep
