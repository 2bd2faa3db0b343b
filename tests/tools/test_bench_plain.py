"""`fusedcomm bench plain` and `decode`: values are checked, and every row has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fusedcomm
from fusedcomm.bench import bench_moe, decode
from fusedcomm.bench import bench_plain as plain
from fusedcomm.bench.timing import ValuesDiffer
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
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValuesDiffer, match="rank 1"):
        patch.setitem(plain.CALLS, "all_reduce", (fusedcomm.all_reduce, lambda x: fusedcomm.all_reduce(x) + rank))
        plain.measure_plain(rank, "all_reduce", 64, "float32", "cpu", 1)
    assert torch.equal(fusedcomm.all_reduce(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.usefixtures("shared_ranks")
def test_moe_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "moe.json"
    sizes = ("--tokens", "8", "--hidden", "4", "--rounds", "2")
    assert main(["bench", "moe", *sizes, "--dtype", "float32", "bfloat16", "--json", str(file)]) == 0
    for row in json.loads(file.read_text())["rows"]:
        assert row["tokens"] == 8 and row["ratio"] == row["ours"]["median"] / row["today"]["median"]


@on_ranks(2)
def test_wrong_rows_of_a_moe_are_found(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValuesDiffer, match="rank 1"):
        today = bench_moe.today
        patch.setattr(bench_moe, "today", lambda *args: today(*args) + rank)
        bench_moe.measure_moe(rank, 2, 4, 4, 1, "float32", "cpu", 1)


@pytest.mark.usefixtures("shared_ranks")
def test_decode_writes_what_it_draws_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "decode.json", tmp_path / "decode.png"
    sizes = ("--rows", "512", "600", "--hidden", "4096", "--K", "4", "--rounds", "1")  # of which one call is measured
    assert main(["bench", "decode", *sizes, "--json", str(file), "--plot", str(picture)]) == 0
    rows, printed = json.loads(file.read_text())["rows"], capsys.readouterr().out
    assert [(row["dtype"], row["rows"]) for row in rows] == [("float32", 512), ("float32", 600)]
    for row in rows:
        times = {name: timing["median"] for name, timing in row["times"].items()}
        assert row["tail_ratio"]["median"] == pytest.approx(times["tail"] / times["unfused tail"])
        assert row["ratio"]["median"] == pytest.approx(times["fused"] / times["unfused"])
        above = times["fused"] - times["matmul"]
        assert row["exposed_ratio"]["median"] == pytest.approx(above / times["unfused tail"], abs=1e-6)
        assert f"{row['tail_ratio']['median']:.2f}" in printed
        assert row["plan"].startswith("matmul_all_reduce_norm: chunked")
    assert picture.read_bytes().startswith(b"\x89PNG")


@on_ranks(2)
@pytest.mark.parametrize("result", [0, 1])
def test_wrong_values_of_a_tail_are_found(rank: int, result: int) -> None:
    call = fusedcomm.all_reduce_norm

    def wrong(*args: torch.Tensor) -> list[torch.Tensor]:
        return [each + rank * (i == result) for i, each in enumerate(call(*args))]

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValuesDiffer, match="rank 1"):
        patch.setattr(fusedcomm, "all_reduce_norm", wrong)
        decode.measure_decode(rank, 2, 8, 4, "float32", "cpu", 1)
