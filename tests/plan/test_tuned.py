"""The file of tuned numbers: who may have written it, what it may say, and that it decides on all ranks or on none."""

import contextlib
import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.bench import tune
from fusedcomm.launch import world
from fusedcomm.memory import members
from fusedcomm.memory.group import resolve
from fusedcomm.plan.cost import model, tuned
from fusedcomm.plan.cost.links import INTER, Reach
from fusedcomm.plan.cost.model import DEFAULTS, Constants
from fusedcomm.tools import main
from fusedcomm.tools.selftest import settings
from tests.helpers.spies import logged

CPU = torch.device("cpu")
FAST = replace(DEFAULTS["cpu"], source=model.TUNED, copy_bandwidth=3e9)
SLOW = replace(FAST, copy_bandwidth=2e9)
ROOT = os.geteuid() == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", "/a/b")
    assert env.cache_dir() == Path("/a/b")
    monkeypatch.delenv("FUSEDCOMM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert env.cache_dir() == Path("/c/fusedcomm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir() == Path.home() / ".cache" / "fusedcomm"


def test_what_is_written_is_read(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert tuned.read(tuned.key(CPU, 2)) is None
    file = tuned.write(FAST, tuned.key(CPU, 2))
    assert tuned.read(tuned.key(CPU, 2)) == FAST
    assert list(cache.iterdir()) == [file]
    assert tuned.read(tuned.key(CPU, 4)) is None  # it says nothing of other groups
    assert not caplog.records


def test_a_write_follows_no_link_and_asks_no_umask(cache: Path, tmp_path: Path) -> None:
    """A link of somebody else, in a directory that all can write to, must not lead a write elsewhere."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    before = os.umask(0)
    try:
        file = tuned.write(FAST, tuned.key(CPU, 2))
    finally:
        os.umask(before)
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(cache.stat().st_mode)) == (0o600, 0o700)
    file.unlink()
    file.symlink_to(victim)
    tuned.write(SLOW, tuned.key(CPU, 2))
    assert (victim.read_text(), file.is_symlink()) == ("mine", False)
    assert tuned.read(tuned.key(CPU, 2)) == SLOW


def test_a_key_is_of_one_machine_and_versions() -> None:
    key = tuned.key(CPU, 2)
    for name, value in (("device", "another CPU"), ("threads", 99), ("torch", "0"), ("triton", "0"), ("world_size", 3)):
        assert tuned.path_of(key | {name: value}) != tuned.path_of(key)


def content(**changes: Any) -> str:
    return json.dumps({"key": tuned.key(CPU, 2), "constants": asdict(FAST)} | changes)


def constants(**changes: Any) -> str:
    return content(constants=asdict(FAST) | changes)


BAD_CONTENT: dict[str, tuple[Callable[[], str], str]] = {
    "empty": (lambda: "", "Expecting value"),
    "cut": (lambda: content()[:-30], ""),
    "deep": (lambda: "[" * 60000, "recursion"),
    "another field": (lambda: content(version=3), "it must have the fields key and constants"),
    "another key": (lambda: content(key=tuned.key(CPU, 2) | {"torch": "1.0"}), "it must be of this device"),
    "too large": (lambda: content() + " " * tuned.MAX_BYTES, f"it must have at most {tuned.MAX_BYTES} bytes"),
    "no constants": (lambda: content(constants=None), "constants must have exactly the keys"),
    "absurd": (lambda: constants(link_bandwidth=1e40), "link_bandwidth must be a number"),
    "no number": (lambda: constants(copy_bandwidth=float("nan")), "copy_bandwidth must be a number in ["),
    "text": (lambda: constants(copy_bandwidth="1e12"), "copy_bandwidth must be a number"),
    "before it began": (lambda: constants(link_latency=-1e-6), "link_latency must be a number in [0, 1]"),
    "a part of a core": (lambda: constants(num_sms=1.5), "num_sms must be a number"),
    "one more": (lambda: constants(extra=1), "constants must have exactly the keys"),
    "a kind of rate": (lambda: constants(matmul_flops={"int8": 1e12}), "matmul_flops must have exactly the keys"),
    "an overhead": (lambda: constants(call_overhead=FAST.call_overhead | {"unfused": -1}), "call_overhead[unfused]"),
    "another machine": (lambda: constants(device_type="tpu"), "device_type must be cpu, got 'tpu'"),
    "many digits": (lambda: constants(link_bandwidth=0).replace(": 0,", ": " + "9" * 5000 + ","), ""),
    "default": (lambda: constants(source=model.DEFAULT), "source must be tuned, got 'default'"),
    "a GPU's": (lambda: content(constants=asdict(replace(DEFAULTS["cuda"], source=model.TUNED))), "device_type must"),
}


@pytest.mark.parametrize("name", BAD_CONTENT)
def test_a_file_that_says_nonsense_is_ignored(name: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = BAD_CONTENT[name]
    file = tuned.write(FAST, tuned.key(CPU, 2))
    file.write_text(make())
    for _ in range(2):
        assert tuned.read(tuned.key(CPU, 2)) is None
    [record] = caplog.records  # once
    assert record.getMessage().startswith(f"tuned numbers in {file} are ignored: ")
    assert reason in record.getMessage()
    file.write_text(content())
    assert tuned.read(tuned.key(CPU, 2)) == FAST


def symlink(file: Path) -> None:
    real = file.rename(file.with_suffix(".real"))
    file.symlink_to(real)


def directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


BAD_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "symlink": (symlink, "symbolic link"),
    "group can write": (lambda file: file.chmod(0o660), "only its owner may be able to write it, got mode 660"),
    "others can write": (lambda file: file.chmod(0o602), "only its owner may be able to write it, got mode 602"),
    "of another user": (lambda file: os.chown(file, 12345, -1), "it must be owned by user 0, got 12345"),
    "directory": (directory, "irectory"),
    "pipe": (pipe, "it must be a regular file"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_others_may_have_written_is_ignored(
    name: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if name == "of another user" and not ROOT:
        pytest.skip("only root can give files away")
    change, reason = BAD_FILES[name]
    file = tuned.write(FAST, tuned.key(CPU, 2))
    assert tuned.read(tuned.key(CPU, 2)) == FAST
    change(file)
    assert tuned.read(tuned.key(CPU, 2)) is None
    [record] = caplog.records
    assert f"tuned numbers in {file} are ignored: " in record.getMessage()
    assert reason in record.getMessage()


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tuned.write(FAST, tuned.key(CPU, 2))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        tuned.write(SLOW, tuned.key(CPU, 2))
    assert list(cache.iterdir()) == [file]
    assert tuned.read(tuned.key(CPU, 2)) == FAST


# on several ranks
@contextlib.contextmanager
def own_cache(directory: str) -> Iterator[list[str]]:
    """The cache of a rank of its own, and what is logged."""
    with mock.patch.dict(os.environ, FUSEDCOMM_CACHE_DIR=directory), logged() as messages:
        yield messages


def plan_with(rank: int, directory: str, numbers: list[Constants | str | None]) -> tuple[str, list[str]]:
    """The plan's reason in a new group of ranks whose files have ``numbers[rank]``, and what was logged."""
    mine = numbers[rank]
    with own_cache(f"{directory}/{rank}") as messages:
        if mine is not None:
            file = tuned.write(FAST if isinstance(mine, str) else mine, tuned.key(CPU, dist.get_world_size()))
            if isinstance(mine, str):
                file.write_text(mine)
        group = dist.new_group()
        x, w = torch.empty(4, 8), torch.empty(8, 6)
        plan = fusedcomm.explain("matmul_all_to_all", x, w, 0, 1, group)
        dist.destroy_process_group(group)
    return plan.reason, messages


@pytest.mark.parametrize(
    "numbers, source, warnings",
    [
        ([FAST, FAST], "tuned", [[], []]),
        ([None, None], "default", [[], []]),
        ([FAST, None], "default", [["tuned numbers are not used, for ranks [1] have none"], []]),
        ([FAST, SLOW], "default", [["tuned numbers are not used, for they differ between ranks"], []]),
        (["{", FAST], "default", [["tuned numbers in ", "tuned numbers are not used, for ranks [0] have none"], []]),
    ],
)
def test_tuned_numbers_decide_on_all_ranks_or_on_none(
    ranks: Any, tmp_path: Path, numbers: list[Any], source: str, warnings: list[list[str]]
) -> None:
    results = ranks(2).run(plan_with, str(tmp_path), numbers)
    assert results[0][0] == results[1][0]
    assert results[0][0].endswith(f", {source} numbers")
    for (_, messages), expected in zip(results, warnings, strict=True):
        assert len(messages) == len(expected), messages
        assert all(message.startswith(text) for message, text in zip(messages, expected, strict=True)), messages


def share(rank: int, directories: list[str]) -> str:
    with own_cache(directories[rank]):
        assert dist.group.WORLD is not None
        try:
            tune.write_for_all(FAST, tuned.key(CPU, 2), dist.group.WORLD)
        except OSError as error:
            return str(error)
        return "" if tuned.read(tuned.key(CPU, 2)) == FAST else "not there"


def test_all_ranks_write_and_verify(ranks: Any, tmp_path: Path) -> None:
    """Ranks on several hosts may share no folder; ranks that share one write the same."""
    shared, other, no_directory = (str(tmp_path / name) for name in ("shared", "other", "file"))
    Path(no_directory).write_text("")
    assert ranks(2).run(share, [shared, shared]) == ["", ""]
    assert ranks(2).run(share, [shared, other]) == ["", ""]
    assert len(list(Path(other).iterdir())) == 1
    results = ranks(2).run(share, [shared, no_directory])
    assert len(set(results)) == 1
    assert results[0].startswith("rank 1 cannot write ")


def read_nothing(rank: int, directory: str) -> str:
    with own_cache(directory), mock.patch.object(tuned, "read", lambda *key: None if rank else FAST):
        assert dist.group.WORLD is not None
        with pytest.raises(OSError) as caught:
            tune.write_for_all(FAST, tuned.key(CPU, 2), dist.group.WORLD)
        return str(caught.value)


def test_a_file_that_cannot_be_read_again_is_an_error_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(read_nothing, str(tmp_path)) == [f"ranks [1] do not read what they wrote to {tmp_path}"] * 2


def plan_across(rank: int, directory: str) -> list[fusedcomm.Plan]:
    """Plans of a group inside a host and of one across two."""
    found = []
    with own_cache(directory):
        tuned.write(FAST, tuned.key(CPU, 2))
        for host in ("same", f"host {rank}"):
            with settings(HOST_ID=host):
                group = dist.new_group()
                x, w = torch.empty(1024, 1024), torch.empty(1024, 1024)
                found.append(fusedcomm.explain("matmul_all_to_all", x, w, 0, 1, group))
                dist.destroy_process_group(group)
    return found


def test_a_group_across_hosts_plans_by_data_sheets(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2).run(plan_across, str(tmp_path))
    inside, across = results[0]
    assert results[1] == results[0]
    assert inside.algorithm == "chunked" and inside.reason.endswith("tuned numbers")
    constants = model.across_hosts(DEFAULTS["cpu"], Reach(INTER, 2, 1, 1))
    call = model.usual_call("all_to_all", 1024 * 512, 2, "cpu")
    unfused = model.estimate(*call, "float32", constants)["unfused"]
    assert across.algorithm == "unfused" and f"; estimated {unfused * 1e3:.3g} ms, pipelined" in across.reason
    assert across.reason.endswith(", default numbers")


def test_a_user_without_a_home_has_no_tuned_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a container a user may be in no passwd; no op may fail for that."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FUSEDCOMM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert tuned.read(tuned.key(CPU, 2)) is None
    with pytest.raises(OSError, match="this user has no home: set FUSEDCOMM_CACHE_DIR"):
        tuned.write(FAST, tuned.key(CPU, 2))
    for option in ("--show", "--reset"):
        assert main(["tune", option, "--device", "cpu"]) == 1
        assert capsys.readouterr().err == "fusedcomm tune: ~: this user has no home: set FUSEDCOMM_CACHE_DIR\n"


# `fusedcomm tune`, which writes the file: what it prints and reports.
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


def tune_without_workspace(rank: int, directory: str, ever: bool) -> tuple[int, str, str]:
    ours = members.member(resolve(None)[1], CPU)
    before, why = ours.topology, "rank 1 has no memory to give"
    if ever:
        ours.unavailable = why
    else:
        ours.topology = replace(before, no_workspace=why)
    try:
        return tune_tiny(rank, directory)
    finally:
        ours.topology, ours.unavailable = before, None


@pytest.mark.parametrize("ever", [True, False])
def test_where_nothing_can_be_measured_nothing_is_written(ranks: Any, cache: Path, ever: bool) -> None:
    first, second = ranks(2).run(tune_without_workspace, str(cache), ever)
    text = "what calls can run here cannot be measured: rank 1 has no memory to give"
    assert first == (1, "", f"fusedcomm tune: {text}\n")
    assert second[1:] == ("", "")
    assert not list(cache.iterdir())


def test_what_a_busy_machine_measures_is_not_kept(ranks: Any, cache: Path) -> None:
    first, second = ranks(2).run(tune_tiny, str(cache), most_noise=-1)
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
