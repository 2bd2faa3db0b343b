"""``fusedcomm doctor`` as a user sees it: checks that are bounded, verdicts of the planner, exit codes, redaction."""

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.env import RELEVANT
from fusedcomm.launch.ranks import RankError, RankFailure, RankPool
from fusedcomm.ops import dispatch
from fusedcomm.tools import doctor as command
from fusedcomm.tools import doctor_gpus, doctor_host, doctor_ranks, main
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING
from fusedcomm.tools.doctor_ranks import AlgorithmVerdict, GroupAnswer, find_differences, find_verdicts
from tests.helpers.doctor_machines import UUID, canned, fake_nvml, rank_facts, shared

Ranks = Callable[[int], RankPool]
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "doctor.json").read_text())


def doctor(rank: int, file: Path, *args: str, **env: str) -> tuple[int, str]:
    out = io.StringIO()
    with mock.patch.dict(os.environ, env), contextlib.redirect_stdout(out):
        code = main(["doctor", "--json", str(file), *args])
    return code, " ".join(out.getvalue().split())


def levels(file: Path) -> dict[str, dict[str, str]]:
    found, sections = json.loads(file.read_text()), dict[str, dict[str, str]]()
    jsonschema.validate(found, SCHEMA)
    for each in found["findings"]:
        sections.setdefault(each["section"], {})[each["name"]] = each["level"]
    return sections


def test_the_command_on_this_machine(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs in ranks with Triton's interpreter, so it runs fusedcomm's kernels too."""
    monkeypatch.setattr(command, "CheckRanks", shared(ranks))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(doctor_gpus, "survey", doctor_gpus.Machine)
    code, out = doctor(0, tmp_path / "x")
    assert code == 0 and not set("\x1b\r") & set(out) and "0 errors" in out and "exit code 0" in out
    found = levels(tmp_path / "x")
    names = ("cpu unfused", "cpu chunked", "cpu fused", "cpu pipelined")
    assert found["checks"] == dict.fromkeys(names, OK)
    assert found["algorithms"]["cpu chunked"] == OK
    assert found["algorithms"]["cuda"] == found["gpus"]["GPUs"] == ABSENT


def hang(rank: int) -> str:
    time.sleep(60)
    return ""


def test_a_check_that_hangs_is_bounded_and_the_next_one_runs() -> None:
    with contextlib.closing(doctor_ranks.CheckRanks(1)) as ranks:
        hung = ranks.check("x", "help", 0.5, hang)
        assert (hung.level, hung.advice) == (ERROR, "help") and "did not answer: no result within 0.5 s" in hung.text
        assert ranks.check("x", "", 30, str).text == "0"


def planted_topology(rank: int, reason: str) -> GroupAnswer:
    """The library's own verdict for a group whose vote said so."""
    ours = dispatch.member

    def member(*call: Any) -> Any:
        real = ours(*call)
        return dataclasses.replace(real, topology=dataclasses.replace(real.topology, no_workspace=reason))

    with mock.patch.object(dispatch, "member", member):
        return doctor_ranks.ask(rank, ["cpu"])


def test_the_verdict_is_the_planners(ranks: Ranks) -> None:
    good = {each.algorithm: each for each in ranks(2).run(doctor_ranks.ask, ["cpu"])[0].verdicts}
    assert good["chunked"].can_run and good["unfused"].can_run and good["chunked"].reason.startswith("used for ")
    bad = ranks(2).run(planted_topology, "rank 1: planted")[0]
    reasons = {each.algorithm: each.reason for each in bad.verdicts}
    assert reasons["chunked"] == reasons["fused"] == "not used: rank 1: planted"
    assert {each.algorithm for each in bad.verdicts if each.used} <= {"unfused", "pipelined"}
    for primary, level in (("cpu", ERROR), ("cuda", WARNING)):
        found = {each.name: each.level for each in doctor_ranks.find_verdicts(bad, primary)}
        assert found == {"cpu unfused": OK, "cpu chunked": level, "cpu fused": ABSENT, "cpu pipelined": OK}


def ask_gpus(rank: int) -> tuple[list[str], GroupAnswer]:
    """Ranks have met by gloo: a planner that wants NCCL needs another group."""
    made: list[str] = []

    def new_group(backend: str, **options: Any) -> Any:
        made.append(backend)
        return dist.group.WORLD

    def explain(op: str, *args: Any) -> fusedcomm.Plan:
        return fusedcomm.Plan(op, "pipelined" if args[-1] is dist.group.WORLD else "unfused", "of a reason")

    with (
        mock.patch.object(doctor_ranks, "_facts", lambda with_gpus: rank_facts(gpu=f"{UUID}{rank}")),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(fusedcomm, "explain", explain),
        mock.patch.object(doctor_ranks, "rank_device"),
        mock.patch("torch.cuda.set_device"),
    ):
        return made, doctor_ranks.ask(rank, ["cuda"])


def test_gpus_are_judged_in_a_group_of_nccl(ranks: Ranks) -> None:
    made, answer = ranks(2).run(ask_gpus)[0]
    assert made == ["cpu:gloo,cuda:nccl"]
    assert [each.algorithm for each in answer.verdicts if each.can_run] == ["pipelined"]


def gpu_group(can_run: bool = True) -> GroupAnswer:
    verdicts = [
        AlgorithmVerdict("cuda", name, can_run, can_run, "of a reason") for name in ("unfused", "chunked", "fused")
    ]
    return GroupAnswer([rank_facts(gpus=[f"{UUID}0", f"{UUID}1"], gpu=f"{UUID}{rank}") for rank in range(2)], verdicts)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose GPUs are fine. What is returned says what its ranks answer, and can be changed."""
    cpu_group = GroupAnswer([rank_facts()] * 2, [AlgorithmVerdict("cpu", "chunked", True, True, "of a reason")])
    answers: dict[str, Any] = dict.fromkeys(("peer_copies", "op_values"), "works")
    answers |= {"ask ['cpu']": cpu_group, "ask ['cuda']": gpu_group(), "uuids": [f"{UUID}0", f"{UUID}1"]}
    machine = doctor_gpus.survey(fake_nvml())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(doctor_gpus, "survey", lambda: machine)
    monkeypatch.setattr(command, "CheckRanks", canned(answers))
    return answers


def test_two_good_gpus(two_gpus: dict[str, Any], tmp_path: Path) -> None:
    assert doctor(0, tmp_path / "x")[0] == 0
    found = levels(tmp_path / "x")
    names = ("peer copies", "unfused", "chunked", "fused")
    assert found["checks"] == dict.fromkeys(["cpu chunked", *(f"cuda {n}" for n in names)], OK)
    assert found["algorithms"] == dict.fromkeys(["cpu chunked", "cuda unfused", "cuda chunked", "cuda fused"], OK)
    assert doctor(0, tmp_path / "x", "--quick")[0] == 0
    assert levels(tmp_path / "x") == {section: each for section, each in found.items() if section != "checks"}


BROKEN: list[tuple[str, Any, tuple[str, str]]] = [
    ("ask ['cuda']", gpu_group(can_run=False), ("algorithms", "cuda chunked")),
    ("ask ['cuda']", OSError("no more processes"), ("algorithms", "group")),
    ("uuids", RankError([RankFailure(0, "did not answer", None, "hung", "")]), ("checks", "cuda devices")),
    ("peer_copies", AssertionError("GPU 0 -> 1: wrong bytes arrived"), ("checks", "cuda peer copies")),
    ("op_values cuda", AssertionError("wrong"), ("checks", "cuda fused")),
]


@pytest.mark.parametrize("answer, value, expected", BROKEN, ids=lambda each: str(each)[:40])
def test_what_does_not_work_on_gpus_is_an_error(
    two_gpus: dict[str, Any], tmp_path: Path, answer: str, value: Any, expected: tuple[str, str]
) -> None:
    two_gpus[answer] = value
    assert doctor(0, tmp_path / "x")[0] == 1
    assert levels(tmp_path / "x")[expected[0]][expected[1]] == ERROR


def come(rank: int, file: Path, last: int) -> tuple[int, str] | None:
    return doctor(rank, file, "--quick", FUSEDCOMM_TIMEOUT_S="0.5", CUDA_VISIBLE_DEVICES="") if rank <= last else None


def test_in_ranks_of_torchrun_rank_0_tells_of_all(ranks: Ranks, tmp_path: Path) -> None:
    (code_0, out_0), (code_1, out_1) = ranks(2).run(come, tmp_path / "x", 1)
    assert (code_0, code_1, out_1) == (0, 0, "") and "2 ranks have the same versions and settings" in out_0
    assert "checks" not in levels(tmp_path / "x")
    code, out = ranks(2).run(come, tmp_path / "x", 0)[0]
    assert code == 1 and "waited 0.5 s for ranks [1], which did not come" in out


SECRETS = {"HOME": "/home/alice", "LOGNAME": "alice", "HOSTNAME": "node17.corp.example", "MASTER_ADDR": "10.11.12.13"}
SECRETS |= {"FUSEDCOMM_TOKEN": "hunter2", "NCCL_SECRET": "hunter3", "FUSEDCOMM_CACHE_DIR": "/home/alice/cache"}
PRIVATE = ("alice", "node17", "corp.example", "10.11.12.13", "fe80::12", "hunter2", "hunter3", UUID[:12])


def test_nothing_private_is_printed_or_written(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node17.corp.example")
    text = (
        f"node17.corp.example:29500 10.11.12.13 [::ffff:10.11.12.13]:29500 addr:10.11.12.13 [fe80::12] addr:fe80::12 "
        f"GPU-{UUID}0 /home/alice/x of alice, at 12:34:56 on 0000:3b:00.0"
    )
    two_gpus["peer_copies"] = RuntimeError(text)
    code, shown = doctor(0, tmp_path / "x", **SECRETS)
    assert code == 1 and levels(tmp_path / "x")
    assert not [word for word in PRIVATE if word in shown + (tmp_path / "x").read_text()]
    assert "12:34:56 on 0000:3b:00.0" in shown  # these are no addresses
    assert "FUSEDCOMM_TOKEN" in shown and "~/cache" in (tmp_path / "x").read_text()
    assert doctor(0, tmp_path / "x", "--no-redact", **SECRETS)[0] == 1
    assert not [word for word in PRIVATE if word not in (tmp_path / "x").read_text()]


def test_exit_codes(two_gpus: dict[str, Any], tmp_path: Path) -> None:
    code, out = doctor(0, tmp_path / "x", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert code == 0 and "1 warning" in out and "unset it" in out
    code, out = doctor(0, tmp_path / "x", "--quick", NCCL_P2P_DISABLE="1")
    assert code == 1 and "exit code 1" in out
    assert doctor(0, tmp_path / "none" / "x")[0] == 2
    with pytest.raises(SystemExit) as stopped:
        doctor(0, tmp_path / "x", "--quicker")
    assert stopped.value.code == 2


# facts of GPUs, settings, versions and ranks: each planted fault is found, and no other
ROOT = Path(__file__).parents[2]
BOTH = ((0, 1), (1, 0))
WITHOUT = {"num_links": 0, "p2p": {(*pair, cap): 5 for pair in BOTH for cap in (1, 2)}}
UNKNOWN = ("DeviceGetMigMode", "DeviceGetNvLinkState", "DeviceGetGpuFabricInfoV")
MACHINES: list[tuple[dict[str, Any], str, str, str]] = [
    ({}, "GPUs", OK, "2 x NVIDIA H200, all reach all by NVLink"),
    ({"unknown": UNKNOWN}, "GPUs", OK, "2 x NVIDIA H200"),  # unknown is no fault
    ({"unknown": ("DeviceGetP2PStatus",)}, "GPUs 0 -> 1", ERROR, "unknown"),  # but access that is unproven is none
    ({"mig": 1}, "GPU 1", ERROR, "MIG is on"),
    ({"p2p": {(0, 1, 2): 5}}, "GPUs 0 -> 1", ERROR, "nvlink: not supported"),
    ({"p2p": {(0, 1, 2): 5}, "num_links": 0}, "GPUs 0 -> 1", ERROR, "nvlink: not supported"),  # the way back has it
    ({"p2p": {(*pair, 2): 4 for pair in BOTH}, "num_links": 0}, "GPUs 0 -> 1", ERROR, "disabled"),  # can be repaired
    ({**WITHOUT, "num_links": 18}, "GPUs 0 -> 1", ERROR, "nvlink: not supported; write: not supported"),
    (WITHOUT, "NVLink", ABSENT, "2 x NVIDIA H200 without NVLink: they run unfused"),
    ({"fabric": (3, 999)}, "GPU 1", ERROR, "NVSwitch fabric .* status 999"),
    ({"refused": ("GPU is lost", 15), "num_gpus": 3}, "GPU 0", ERROR, "cannot be asked: .*GPU is lost"),
    ({"refused": ("of another container", 4), "num_gpus": 3}, "GPUs", OK, "2 x NVIDIA H200"),
    ({"num_gpus": 1, "mig": 1}, "GPU 0", WARNING, "MIG is on"),
    ({"num_gpus": 1}, "GPUs", ABSENT, "it has no peers"),
    ({"num_gpus": 0}, "GPUs", ABSENT, "no GPU"),
]


@pytest.mark.parametrize("machine, name, level, text", MACHINES, ids=str)
def test_what_keeps_gpus_from_their_peers_is_found(machine: dict[str, Any], name: str, level: str, text: str) -> None:
    found = doctor_gpus.find(doctor_gpus.survey(fake_nvml(**machine)))
    (finding,) = [each for each in found if each.name == name]
    assert finding.level == level and re.search(text, finding.text)
    assert finding.advice if level in (WARNING, ERROR) else found == [finding]


def test_gpus_that_torch_does_not_see_are_not_judged() -> None:
    bad = doctor_gpus.survey(fake_nvml(num_gpus=3, p2p={(0, 2, 2): 5}))
    assert (bad.driver, bad.cuda_driver) == ("580.65.06", "13.0")
    for visible, level in (({f"{UUID}0", f"{UUID}1"}, OK), (set(), ABSENT), (None, ERROR)):
        assert [each.level for each in doctor_gpus.find(doctor_gpus.of(bad, visible))] == [level]
    survey = doctor_gpus.survey(fake_nvml(mig=1))
    part = doctor_gpus.of(survey, {"0badcafe-0000-5000-8000-00000000000a"})  # torch sees parts of these
    assert len(part.gpus) == 2


def test_nvml_or_torch_that_does_not_fit_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for trace, level in ((tmp_path / "none", ABSENT), (tmp_path, ERROR)):
        monkeypatch.setattr(doctor_gpus, "DRIVER_TRACES", (str(trace),))
        (finding,) = doctor_gpus.find(doctor_gpus.survey())
        assert finding.level == level and "ModuleNotFoundError" in finding.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert not doctor_host.sees_no_gpu(0, 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert doctor_host.sees_no_gpu(0, 2)[0].level == ERROR and not doctor_host.sees_no_gpu(2, 2)
    monkeypatch.setattr("torch.version.cuda", None)
    assert "for CPUs" in doctor_host.sees_no_gpu(0, 2)[0].advice


# Each: a value that is bad, how bad it is with GPUs and without, and a value that is good
SETTINGS = [
    ("CUDA_LAUNCH_BLOCKING", "1", ERROR, WARNING, "0"),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", WARNING, WARNING, "32"),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", ERROR, WARNING, "100"),
    ("NCCL_P2P_DISABLE", "1", ERROR, WARNING, "0"),
    ("TORCH_SYMMMEM", "NVSHMEM", ERROR, WARNING, "CUDA"),
    ("TRITON_INTERPRET", "1", ERROR, WARNING, "0"),
    ("TMPDIR", "/proc", ERROR, WARNING, "/tmp"),
    ("FUSEDCOMM_ALGORITHM", "unfused", WARNING, WARNING, ""),
    ("FUSEDCOMM_ALGORITHM", "quick", ERROR, ERROR, ""),
    ("FUSEDCOMM_PROVE", "0", WARNING, WARNING, "1"),
    ("FUSEDCOMM_TIMEOUT_S", "soon", ERROR, ERROR, "5"),
    ("FUSEDCOMM_WORKSPACE_BYTE", "hunter2", WARNING, WARNING, None),
    ("FUSEDCOMM_CACHE_DIR", "/proc/nowhere", WARNING, WARNING, "/tmp/nowhere"),
]


@pytest.mark.parametrize("name, bad, with_gpus, alone, good", SETTINGS)
def test_a_setting_that_breaks_things_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, bad: str, with_gpus: str, alone: str, good: str | None
) -> None:
    for each in filter(RELEVANT.fullmatch, dict(os.environ)):
        monkeypatch.delenv(each)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/proc")  # root may write anywhere
    monkeypatch.setenv(name, bad)
    for num_gpus, level in ((2, with_gpus), (0, alone)):
        (finding,) = doctor_host.find_settings(num_gpus)
        assert finding.level == level and finding.advice and "hunter2" not in str(finding)
        assert finding.name == name or name == "FUSEDCOMM_CACHE_DIR"
    if good is not None:
        monkeypatch.setenv(name, good)
        assert [each.level for each in doctor_host.find_settings(2)] == [OK]
    else:
        assert finding.advice == "did you mean FUSEDCOMM_WORKSPACE_BYTES?"


def test_every_variable_of_fusedcomm_is_known() -> None:
    files = [path for folder in ("fusedcomm", "kernels", "bench") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".h", ".cpp")]
    read = {name for text in texts for name in re.findall(r"\"(FUSEDCOMM_[A-Z]+(?:_[A-Z]+)*)\"", text)}
    assert read - {"FUSEDCOMM_CPU"} == set(env.SETTINGS)  # this one is the name of fusedcomm's symmetric memory


VERSIONS = [
    ("torch", "2.10.1", 0, WARNING),
    ("torch", "2.16.0.dev1", 0, WARNING),
    ("triton", None, 2, WARNING),
    ("triton", None, 0, ABSENT),
    ("native part", None, 2, WARNING),
    ("packages", None, 2, OK),
]


@pytest.mark.parametrize("name, changed, num_gpus, level", VERSIONS)
def test_versions_outside_of_the_range_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, changed: str | None, num_gpus: int, level: str
) -> None:
    reason = "cannot be loaded" if name == "native part" else None
    monkeypatch.setattr("fusedcomm.memory.topology.no_native", lambda: reason)
    versions = doctor_host.versions(None, None) | {"triton": "3.9", "torch": "2.13.0", "linux": "6.8"} | {name: changed}
    assert [(each.name, each.level) for each in doctor_host.find_versions(versions, num_gpus)] == [(name, level)]


DIFFERENCES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "ranks", OK),
    ({"versions": {"python": "3.11", "torch": "2.14"}}, "torch", ERROR),
    ({"settings": {"FUSEDCOMM_ALGORITHM": "unfused", "FUSEDCOMM_TIMEOUT_S": None}}, "FUSEDCOMM_ALGORITHM", ERROR),
    ({"settings": {"FUSEDCOMM_ALGORITHM": None, "FUSEDCOMM_TIMEOUT_S": "5"}}, "FUSEDCOMM_TIMEOUT_S", WARNING),
    ({"visible": "1"}, "CUDA_VISIBLE_DEVICES", WARNING),
    ({"host": "other", "boot": "other", "visible": "1"}, "hosts", OK),  # on another host they may differ
    ({"gpu": "uuid 0", "gpus": ["uuid 0"]}, "GPUs", ERROR),  # that of rank 0
    ({"gpu": None, "gpus": ["uuid 1"]}, "GPUs", ERROR),  # SLURM's --gpus-per-task=1
    ({"gpu": None, "gpus": ["uuid 0"]}, "GPUs", ABSENT),  # more ranks than the machine has GPUs
]


@pytest.mark.parametrize("changes, name, level", DIFFERENCES, ids=str)
def test_differences_between_ranks_are_found(changes: dict[str, Any], name: str, level: str) -> None:
    first = rank_facts(gpu="uuid 0", gpus=["uuid 0"]) if "gpu" in changes else rank_facts()
    found = find_differences(GroupAnswer([first, rank_facts(**changes)], []))
    assert [(each.name, each.level) for each in found] == [(name, level)]


def test_a_rank_of_srun_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(doctor_ranks, "uuids", lambda rank: ["a", "b"])
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "3")
    assert doctor_ranks._facts(True)["gpu"] == "b"


def test_ranks_that_share_no_memory() -> None:
    used = [AlgorithmVerdict("cpu", name, name != "chunked", True, "of a reason") for name in ("pipelined", "chunked")]
    (finding,) = find_differences(GroupAnswer([rank_facts(host=host, boot=host) for host in "aabba"], used))
    assert finding.text.endswith("(ranks 0, 1 and 4; ranks 2 and 3); groups across them run pipelined")
    found = find_differences(GroupAnswer([rank_facts(), rank_facts(host="other")], []))
    assert [(each.name, each.level) for each in found] == [("containers", WARNING), ("hosts", OK)]
    cannot = AlgorithmVerdict("cuda", "chunked", False, False, "rank 1 is on another host than rank 0")
    (finding,) = find_verdicts(GroupAnswer([rank_facts(), rank_facts(boot="other")], [cannot]), "cuda")
    assert finding.level == ABSENT and finding.advice
