"""Facts that the doctor reads of GPUs, settings, versions and ranks. Each planted fault is found, and no other."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fusedcomm import env
from fusedcomm.machine import RELEVANT
from fusedcomm.tools import doctor_gpus, doctor_host
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING
from fusedcomm.tools.doctor_ranks import AlgorithmVerdict, GroupAnswer, find_differences, find_verdicts
from tests.helpers.doctor_machines import UUID, fake_nvml, rank_facts

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
    ("linux", "5.4.0-generic", 2, ERROR),
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


def test_ranks_that_share_no_memory() -> None:
    used = [AlgorithmVerdict("cpu", name, name != "chunked", True, "of a reason") for name in ("pipelined", "chunked")]
    (finding,) = find_differences(GroupAnswer([rank_facts(host=host, boot=host) for host in "aabba"], used))
    assert finding.text.endswith("(ranks 0, 1 and 4; ranks 2 and 3); groups across them run pipelined")
    found = find_differences(GroupAnswer([rank_facts(), rank_facts(host="other")], []))
    assert [(each.name, each.level) for each in found] == [("containers", WARNING), ("hosts", OK)]
    cannot = AlgorithmVerdict("cuda", "chunked", False, False, "rank 1 is on another host than rank 0")
    (finding,) = find_verdicts(GroupAnswer([rank_facts(), rank_facts(boot="other")], [cannot]), "cuda")
    assert finding.level == ABSENT and finding.advice
