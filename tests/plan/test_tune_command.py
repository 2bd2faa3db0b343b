"""``fusedcomm tune``, which writes the file of tuned numbers: what it prints and reports."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from fusedcomm.bench import tune
from fusedcomm.launch import world
from fusedcomm.memory import members
from fusedcomm.memory.group import resolve
from fusedcomm.plan.cost import model, tuned
from fusedcomm.plan.cost.links import INTER, Reach
from fusedcomm.plan.cost.model import DEFAULTS
from fusedcomm.tools import main
from tests.plan.test_tuned import CPU, own_cache

SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "tune.json").read_text())

TINY = tune.TuneSizes(
    matmuls=((16, 32, 32), (64, 64, 64), (32, 64, 64)),
    narrow=((4, 64, 64),),
    num_bytes=(4 << 10, 64 << 10),
    calls=((16, 64, 64),),
)


def tune_tiny(rank: int, directory: str, *args: str, most_noise: float = 1e9) -> tuple[int, str, str]:
    """Tune tiny sizes. This rank has RANK and a group, as under torchrun. Tests share the machine, so it is busy."""
    out, err, sizes_of = io.StringIO(), io.StringIO(), tune.TuneSizes.of
    with own_cache(directory), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        tune.TuneSizes.of = staticmethod(lambda device_type, quick: TINY)  # type: ignore[method-assign]
        limits, line = (tune.MOST_NOISE, tune.MOST_LOSS), tune.line
        tune.MOST_NOISE = tune.MOST_LOSS = most_noise
        tune.line = lambda seconds: line({num_bytes: num_bytes * 1e-9 for num_bytes in seconds})
        try:
            code = main(["tune", "--quick", "--device", "cpu", *args])
        finally:
            tune.TuneSizes.of = sizes_of  # type: ignore[method-assign]
            (tune.MOST_NOISE, tune.MOST_LOSS), tune.line = limits, line
    return code, out.getvalue(), err.getvalue()


@pytest.mark.thorough
def test_the_command_measures_writes_shows_and_resets(
    ranks: Any, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "tune.json"
    first, second = ranks(2).run(tune_tiny, str(cache), "--json", str(json_file))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert not second[1] + second[2]
    report = json.loads(json_file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert (report["world_size"], report["quick"], len(report["samples"])) == (2, True, 5 * 2)
    [file] = cache.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (report["file"], 0o600)
    for text in ("matmul_flops bfloat16", "backend_latency all_reduce", f"written to {file}"):
        assert text in first[1]

    assert main(["tune", "--show", "--device", "cpu", "--json", str(json_file)]) == 0
    shown = json.loads(json_file.read_text())
    jsonschema.validate(shown, SCHEMA)
    assert shown["constants"] == report["constants"]
    assert f"2 ranks, cpu: tuned numbers of {file}" in capsys.readouterr().out
    assert main(["tune", "--reset", "--device", "cpu"]) == 0
    assert main(["tune", "--reset", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"removed {file}\nthere was no {file}\n"
    assert main(["tune", "--show", "--device", "cpu"]) == 0
    assert f"default numbers: nothing usable in {file}" in capsys.readouterr().out


def tune_without_workspace(rank: int, directory: str) -> tuple[int, str, str]:
    ours = members.member(resolve(None)[1], CPU)
    ours.unavailable = "rank 1 has no memory to give"
    try:
        return tune_tiny(rank, directory)
    finally:
        ours.unavailable = None


def test_where_nothing_can_be_measured_nothing_is_written(ranks: Any, cache: Path) -> None:
    first, second = ranks(2).run(tune_without_workspace, str(cache))
    text = "what calls can run here cannot be measured: rank 1 has no memory to give"
    assert first == (1, "", f"fusedcomm tune: {text}\n")
    assert second[1:] == ("", "")
    assert not list(cache.iterdir())


def tune_apart(rank: int, directory: str, *args: str) -> tuple[int, str, str]:
    """Tune as a group on two hosts, whose ranks share no folder."""
    ours = members.member(resolve(None)[1], CPU)
    before = ours.topology
    ours.topology = replace(before, no_workspace="elsewhere", across=Reach(INTER, 2, 1, 1), num_hosts=2)
    try:
        return tune_tiny(rank, f"{directory}/{rank}", *args)
    finally:
        ours.topology = before


def test_groups_on_several_hosts_measure_what_they_can_run(
    ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "tune.json"
    first, second = ranks(2).run(tune_apart, str(tmp_path), "--json", str(json_file))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    report = json.loads(json_file.read_text())
    jsonschema.validate(report, SCHEMA)
    assert report["hosts_without_workspace"] == 2 and "2 ranks on 2 hosts" in first[1]
    assert {tuple(each["measured"]) for each in report["samples"]} == {("unfused", "pipelined")}
    assert {each["what"] for each in report["points"]} == {"copy", *model.KINDS.values()}
    assert report["constants"]["piece_overhead"] != DEFAULTS["cpu"].piece_overhead
    for rank in range(2):
        monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / str(rank)))
        with tune_threads():
            found = tuned.read(CPU, 2, 2)
            assert tuned.read(CPU, 2) is None
        assert found is not None and found.digest == report["digest"]
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert main(["tune", "--show", "--device", "cpu"]) == 0
    assert f"tuned numbers of {tmp_path}/1/{report['file']}" in capsys.readouterr().out
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    assert main(["tune", "--show", "--device", "cpu"]) == 0
    assert "nothing usable" in capsys.readouterr().out


@contextlib.contextmanager
def tune_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tune_noisy(rank: int, directory: str) -> tuple[int, str, str]:
    return tune_tiny(rank, directory, most_noise=-1)


def test_what_a_busy_machine_measures_is_not_kept(ranks: Any, cache: Path) -> None:
    first, second = ranks(2).run(tune_noisy, str(cache))
    assert first[:2] == (1, "") and second == (0, "", "")
    assert "differed by" in first[2] and "nothing is kept. End what else runs here" in first[2]
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_told_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(world, "ranks", None)
    assert main(["tune", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"fusedcomm tune: cannot write {tmp_path}/file") and "set FUSEDCOMM_CACHE_DIR to" in error
