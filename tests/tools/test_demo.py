"""``fusedcomm demo`` as a user sees it: table, JSON, exit codes."""

import contextlib
import importlib.metadata
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from torch import Tensor

import fusedcomm
from fusedcomm.bench.start_program import ProgramSizes
from fusedcomm.testing import RankPool
from fusedcomm.tools import demo, main
from fusedcomm.tools.demo import DTENSOR, OURS, ROOF, UNFUSED

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "demo.json").read_text())


def small_demo_with_one_wrong_element(rank: int, wrong_rank: int | None, *options: str) -> tuple[int, str, str]:
    """Run a small demo, with one wrong element on ``wrong_rank``. This rank has RANK and a group, as under torchrun."""
    sizes_of, ours = demo.sizes_of, fusedcomm.matmul_all_to_all

    def wrong(*args: object, **kwargs: object) -> Tensor:
        y = ours(*args, **kwargs)  # type: ignore[arg-type]
        if rank == wrong_rank:
            y[0, 3, 1, 2] += 1
        return y

    out, err = io.StringIO(), io.StringIO()
    demo.sizes_of, fusedcomm.matmul_all_to_all = lambda *args: ProgramSizes(1, 2, 9, 16, 64, 16), wrong  # type: ignore[assignment]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["demo", "--rounds", "2", "--device", "cpu", *options])
    finally:
        demo.sizes_of, fusedcomm.matmul_all_to_all = sizes_of, ours
    return code, out.getvalue(), err.getvalue()


def test_wrong_values_on_one_rank_end_every_rank_with_code_1(ranks: Callable[[int], RankPool]) -> None:
    for code, out, err in ranks(2).run(small_demo_with_one_wrong_element, 1):
        assert code == 1
        assert "'fusedcomm' gave wrong values: rank 1: pair 0: 1 of" in err
        assert "first at [0, 3, 1, 2]" in err
        assert not out


def test_in_ranks_of_torchrun_rank_0_prints_a_table_and_writes_json(
    ranks: Callable[[int], RankPool], tmp_path: Path
) -> None:
    file, trace = tmp_path / "demo.json", tmp_path / "trace.json"
    files = ["--json", str(file), "--trace", str(trace)]
    found = ranks(2).run(small_demo_with_one_wrong_element, None, *files)
    (code_0, out_0, _), (code_1, out_1, _) = found
    assert (code_0, code_1, out_1) == (0, 0, "")
    for text in (DTENSOR, UNFUSED, OURS, ROOF, "values equal on all ranks", "plan of fusedcomm"):
        assert text in out_0

    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {f"variant: {UNFUSED}", f"variant: {OURS}", "fusedcomm.wait rank 0"} <= names
    report = json.loads(file.read_text())
    jsonschema.validate(report, SCHEMA)
    # On the CPU wheel "+cpu" is in the metadata of some installs and missing in others
    torch_version = importlib.metadata.version("torch")
    assert report["versions"]["torch"].split("+")[0] == torch_version.split("+")[0]
    assert report["machine"]["cpus"] == os.cpu_count()
    assert (report["world_size"], report["rounds"]) == (2, 2)
    assert {"command", "date", "commit", "problem", "device", "plan"} <= set(report)
    ours, unfused = report["times"][OURS], report["times"][UNFUSED]
    assert set(report["times"]) == set(report["ratios"]) == {DTENSOR, UNFUSED, OURS, ROOF}
    assert report["ratios"][OURS]["faster_than_matmul_and_all_to_all"] == pytest.approx(
        unfused["median"] / ours["median"]
    )
    assert ours["p10"] <= ours["median"] <= ours["p90"]
