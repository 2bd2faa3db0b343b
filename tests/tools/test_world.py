"""How many ranks a command starts, and that none outlives it."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusedcomm import env
from fusedcomm.bench import common
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import world
from fusedcomm.tools import explain, main, postmortem

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ["bench", "ops", "--world-size"],
    ["demo", "--world-size"],
    ["selftest", "--world-size"],
    ["tune", "--world-size"],
    ["explain", "--nproc"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_worlds_are_bounded_by_the_cpus(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "available_cpus", lambda: 8)
    monkeypatch.setattr(world, "default_device_type", lambda: "cpu")
    monkeypatch.setattr(world, "ranks", None)
    script = [str(ROOT / "examples/tensor_parallel_mlp.py")] * (command[0] == "explain")
    assert main([*command, "9", *script]) == 2
    expected = f"{command[-1]} must be at most 8 here, got 9: this process may use 8 CPUs, and ranks that share a CPU"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["bench", "ops", "--graph", "--device", "cpu"], "bench: --graph replays CUDA graphs: it needs --device cuda"),
        (["bench", "ops", "-b", "2M", "-e", "1M"], "--maxbytes must be at least --minbytes, got 2097152 to 1048576"),
        (["bench", "ops", "--shape", "36", "16", "24", "-b", "1M"], "--shape and --minbytes both say the sizes"),
        (
            ["bench", "ops", "-b", "3", "-e", "5", "--dtype", "float32"],
            "--minbytes must be at least 16384, the smallest size of matmul_all_to_all in float32 here, got 3; ",
        ),
        (["bench", "ops", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: No such file or directory"),
        (["bench", "ops", "--device", "cuda", "--world-size", "64"], "--device cuda: each rank needs a GPU of its own"),
        (["bench", "overhead", "--world-size", "1"], "--world-size must be at least 2, got 1"),
        (["bench", "moe", "--experts", "3"], "--experts must be a multiple of 2 ranks and at least --k, 2, got 3"),
        (["bench", "moe", "--k", "10"], "--experts must be a multiple of 2 ranks and at least --k, 10, got 8"),
        (["tune", "--device", "cpu", "--world-size", "1"], "--world-size must be at least 2, for one rank exchanges"),
        (["demo", "--device", "cpu", "--world-size", "1", "--trace", "x.json"], "--trace needs at least 2 ranks"),
        (["selftest", "--json", "/nowhere/x.json"], "--json /nowhere/x.json: No such file or directory"),
        (["explain", "/nowhere/x.py"], "/nowhere/x.py: No such file or directory"),
        (["explain", "--json", "/nowhere/x.json", __file__], "fusedcomm explain: /nowhere/x.json: No such file or dir"),
        (["selftest", "--device", "cuda", "--world-size", "2"], "a GPU of its own, got 2 ranks and 1 GPUs"),
    ],
)
def test_wrong_arguments_are_refused_before_any_rank_starts(
    command: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "ranks", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and text in captured.err


def test_the_size_must_be_that_of_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, text)
    for command in (["selftest"], ["bench", "plain"]):
        assert main([*command, "--device", "cpu", "--world-size", "4"]) == 2
        assert "--world-size must be that of torchrun, 2, got 4" in capsys.readouterr().err


def test_the_default_dtype_is_of_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    common.add_arguments(parser := argparse.ArgumentParser())
    assert common.dtypes_of(parser.parse_args(["--device", "cpu"])) == ["float32"]
    assert common.dtypes_of(parser.parse_args([])) == ["bfloat16"]


def test_two_ranks_are_never_too_many_and_oversubscribe_allows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available_cpus", lambda: 1)
    assert world.cannot_start("cpu", 2, False) is None
    assert "at most 2 here, got 3" in str(world.cannot_start("cpu", 3, False))
    assert world.cannot_start("cpu", 3, True) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert world.cannot_start("cpu", 3, False) is None


def test_ranks_without_a_gpu_each_do_not_run_on_cpus_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "8")):
        monkeypatch.setenv(name, text)
    assert main(["selftest"]) == 2
    assert "each rank needs a GPU of its own, got 8 ranks and 4 GPUs" in capsys.readouterr().err


def test_ranks_of_srun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two machines with 4 GPUs each; without ranks each task would start a world."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    for command in (["selftest", "--device", "cpu"], ["tune", "--device", "cuda"], ["doctor"], ["explain", __file__]):
        assert main(command) == 2
        assert "each task of srun must have RANK, WORLD_SIZE" in capsys.readouterr().err
    for name, text in (("RANK", "6"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, text)
    assert world.cannot_start("cuda", 8, False) is None and world.rank_device("cuda").index == 2


def test_ranks_of_explain_are_bounded_by_the_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr(explain, "_start_ranks", lambda args: 0)
    script = str(ROOT / "examples/tensor_parallel_mlp.py")
    assert main(["explain", "--nproc", "5", script]) == 2
    assert "--nproc must be at most 4 here, got 5: this process may use 4 GPUs" in capsys.readouterr().err
    assert main(["explain", "--nproc", "4", script]) == 0
    assert main(["explain", "--nproc", "5", "--oversubscribe", script]) == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_cpus_are_those_that_the_quota_of_a_container_is_enough_for(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(env, "CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    assert env.available_cpus() == expected


def test_a_rank_without_a_world_size_is_not_torchrun_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert world.world_size_of(None, "cpu") == 2 and world.is_rank_0()
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert world.world_size_of(None, "cpu") == 4 and not world.is_rank_0()


def test_nothing_is_destroyed_behind_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would wait for the graphs that the traceback holds, and for ranks that have not failed."""
    ended: list[str] = []
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.set_num_threads", lambda number: None)
    for name in ("init_process_group", "get_rank", "destroy_process_group"):
        monkeypatch.setattr(f"torch.distributed.{name}", lambda *args, name=name, **options: ended.append(name))
    with pytest.raises(ValuesDiffer), world.ranks("cpu", 1, 60):
        raise ValuesDiffer
    with world.ranks("cpu", 1, 60):
        assert ended == ["init_process_group", "get_rank"] * 2
    assert ended[4:] == ["destroy_process_group"]


def test_a_command_runs_in_any_thread_and_after_any_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postmortem, "run", lambda args: 0)

    def command() -> int:
        return main(["postmortem", "folder"])

    with ThreadPoolExecutor() as threads:
        assert threads.submit(command).result() == 0
    handlers: list[object] = []
    # C code has set the handler that is replaced
    monkeypatch.setattr(signal, "signal", lambda signum, handler: handlers.append(handler))
    assert command() == 0 and handlers[1:] == [signal.SIG_DFL]


def death_signal(rank: int) -> int:
    import ctypes

    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found), 0, 0, 0)  # PR_GET_PDEATHSIG
    return found.value


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_get_a_signal_when_their_parent_ends(ranks: Callable[[int], object]) -> None:
    assert ranks(2).run(death_signal) == [signal.SIGKILL] * 2  # type: ignore[attr-defined]
