"""`fusedcomm bench plain`: values are checked, and every row has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fusedcomm
from fusedcomm.bench import bench_plain as plain
from fusedcomm.tools import main
from tests.helpers.on_ranks import on_ranks


@pytest.mark.usefixtures("shared_ranks")
def test_every_op_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plain.json"
    assert main(["bench", "plain", "--bytes", "4096", "--rounds", "2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["op"] for row in rows] == list(plain.CALLS)
    for row in rows:
        assert row["ratio"] == row["ours"]["median"] / row["backend"]["median"] and row["op"] in row["plan"]
        assert row["op"] in capsys.readouterr().out or row is not rows[0]


@on_ranks(2)
def test_wrong_values_are_found(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(plain.ValuesDiffer, match="rank 1"):
        patch.setitem(plain.CALLS, "all_reduce", (fusedcomm.all_reduce, lambda x: fusedcomm.all_reduce(x) + rank))
        plain.measure_plain(rank, "all_reduce", 64, "float32", "cpu", 1)
    assert torch.equal(fusedcomm.all_reduce(torch.ones(2)), torch.full((2,), 2.0))
