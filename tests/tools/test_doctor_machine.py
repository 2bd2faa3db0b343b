"""What the doctor reads: GPUs, settings, limits, the cache directory. Each planted fault is found, and no other."""

from __future__ import annotations

import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusedcomm import env
from fusedcomm.doctor import cache, facts, gpus, pci, settings
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from fusedcomm.machine import RELEVANT
from tests.helpers.doctor_machines import UUID, Nvml, NvmlError

ROOT = Path(__file__).parents[2]


def found(nvml: Nvml) -> dict[str, str]:
    """The level and text of findings, by name."""
    return {each.name: f"{each.level}: {each.text}" for each in gpus.find(gpus.survey(nvml))}


def test_good_gpus_have_one_good_finding_and_all_facts() -> None:
    machine = gpus.survey(Nvml())
    assert [(each.level, each.text) for each in gpus.find(machine)] == [(OK, "2 x NVIDIA H200, all reach all")]
    assert (machine.driver, machine.cuda_driver) == ("580.65.06", "13.0")
    gpu = machine.gpus[1]
    assert (gpu.mig, gpu.ecc, gpu.persistence, gpu.compute_mode) == (False, True, True, "default")
    assert (gpu.sm_clock, gpu.max_sm_clock, gpu.memory_bytes) == (345, 1980, 141 << 30)
    assert gpu.links == [True] * 18
    assert (gpu.fabric, gpu.fabric_status, gpu.clique) == ("completed", 0, 7)
    assert [(pair.a, pair.b, pair.path, pair.missing) for pair in machine.pairs] == [
        (0, 1, "NV18", []),
        (1, 0, "NV18", []),
    ]


BAD_GPUS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"mig": 1}, "GPU 1", ERROR, "MIG is on"),
    ({"links_down": {(1, 3)}}, "GPU 1", WARNING, r"17 NVLinks are up, other GPUs have 18 \(down: 3\)"),
    ({"p2p": {(0, 1, 2): 5}}, "GPUs 0 -> 1", ERROR, r"nvlink: not supported \(SYS\)"),
    ({"compute_mode": 2}, "GPU 0", ERROR, "prohibited"),
    ({"fabric_status": 999}, "GPU 1", ERROR, "fabric has failed: status 999"),
    ({"refused": {0: NvmlError("GPU is lost", 15)}, "num_gpus": 3}, "GPU 0", ERROR, "cannot be asked: GPU is lost"),
    ({"slowed": 64}, "GPU 0", WARNING, "slowed down now: temperature"),
    ({"init": NvmlError("Driver Not Loaded")}, "NVML", ABSENT, "no GPU, no driver .*Driver Not Loaded"),
    ({"num_gpus": 0}, "GPUs", ABSENT, "no GPU"),
]


@pytest.mark.parametrize("machine, name, level, text", BAD_GPUS, ids=str)
def test_a_fault_of_a_gpu_is_found(machine: dict[str, Any], name: str, level: str, text: str) -> None:
    assert re.search(f"^{level}: .*{text}", found(Nvml(**machine))[name])


def test_gpus_without_nvlink_are_absent_by_design() -> None:
    pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
    bare = Nvml(num_gpus=8, num_links=0, p2p={(*pair, cap): 5 for pair in pairs for cap in (1, 2)})
    (finding,) = gpus.find(gpus.survey(bare))
    assert (finding.level, finding.text) == (ABSENT, "8 x NVIDIA H200 without NVLink: they run unfused")
    one_pair = Nvml(num_links=0, p2p={(0, 1, 2): 5})  # the other pair has NVLink
    assert found(one_pair)["GPUs 0 -> 1"].startswith(ERROR)
    disabled = Nvml(num_links=0, p2p={(0, 1, 2): 4, (1, 0, 2): 4})  # a disabled NVLink can be repaired
    assert found(disabled)["GPUs 0 -> 1"].startswith(ERROR)


def test_gpus_that_torch_does_not_see_are_not_judged() -> None:
    bad = gpus.survey(Nvml(num_gpus=3, links_down={(2, 3)}, p2p={(0, 2, 2): 5}))
    uuids = [UUID.removeprefix("GPU-") + str(index) for index in range(3)]

    def levels(visible: set[str] | None) -> dict[str, str]:
        return {each.name: each.level for each in gpus.find(gpus.of(bad, visible))}

    assert levels(set(uuids[:2])) == {"GPUs": OK}
    assert levels(set()) == {"GPUs": ABSENT}
    assert levels(set(uuids)) == levels(None) == {"GPU 2": WARNING, "GPUs 0 -> 2": ERROR}
    part = gpus.of(gpus.survey(Nvml(mig=1)), {"0badcafe-0000-5000-8000-00000000000a"})  # torch sees parts of MIG GPUs
    assert len(part.gpus) == 2


def test_what_a_driver_does_not_know_is_unknown_and_no_fault() -> None:
    questions = {name for name in dir(Nvml) if name.startswith("nvmlDeviceGet")}
    questions -= {"nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", "nvmlDeviceGetUUID"}
    machine = gpus.survey(Nvml(unknown=questions - {"nvmlDeviceGetP2PStatus"}))
    assert [each.level for each in gpus.find(machine)] == [OK]
    gpu = machine.gpus[0]
    assert (gpu.mig, gpu.serial, gpu.sm_clock, gpu.fabric, gpu.links) == (None, None, None, None, [])
    assert "GPUs 0 -> 1" in found(Nvml(unknown=questions))  # access that is unproven is no access


def test_nvml_that_is_not_installed_or_does_not_fit_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "DRIVER_TRACES", (str(tmp_path / "none"),))
    assert [each.level for each in gpus.find(gpus.survey())] == [ABSENT]
    monkeypatch.setattr(gpus, "DRIVER_TRACES", (str(tmp_path),))
    (finding,) = gpus.find(gpus.survey())
    assert finding.level == ERROR and "ModuleNotFoundError" in finding.text and finding.advice


def test_gpus_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    (finding,) = facts.sees_no_gpu(0, 2)
    assert finding.level == ERROR and "for CPUs" in finding.advice
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert facts.sees_no_gpu(0, 2)[0].level == ERROR
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert facts.sees_no_gpu(0, 2)[0].level == OK
    assert not facts.sees_no_gpu(2, 2)


BAD_SETTINGS = [
    ("PYTORCH_CUDA_ALLOC_CONF", "backend:native,expandable_segments:True", WARNING),
    ("CUDA_LAUNCH_BLOCKING", "1", ERROR),
    ("CUDA_DEVICE_MAX_CONNECTIONS", "1", WARNING),
    ("NCCL_P2P_DISABLE", "1", ERROR),
    ("NCCL_CUMEM_ENABLE", "0", WARNING),
    ("NCCL_NET", "Socket", WARNING),
    ("NCCL_SOCKET_IFNAME", "=l,none7", ERROR),
    ("TORCH_SYMMMEM", "NVSHMEM", ERROR),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", OK),
    ("TRITON_INTERPRET", "1", ERROR),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50", ERROR),
    ("FUSEDCOMM_ALGORITHM", "unfused", WARNING),
    ("FUSEDCOMM_ALGORITHM", "quick", ERROR),
    ("FUSEDCOMM_TIMEOUT_S", "soon", ERROR),
    ("FUSEDCOMM_TIMEOUT", "5", WARNING),
]


GOOD_SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "CUDA_LAUNCH_BLOCKING": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_P2P_DISABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_NET": "IB",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_SYMMMEM": "CUDA",
    "TRITON_INTERPRET": "0",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100",
    "FUSEDCOMM_TIMEOUT_S": "5",
    "FUSEDCOMM_WORKSPACE_BYTES": "1e9",
    "FUSEDCOMM_CACHE_DIR": "/nowhere",
}


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if RELEVANT.fullmatch(name):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("name, value, level", BAD_SETTINGS)
@pytest.mark.usefixtures("no_settings")
def test_a_setting_that_breaks_things_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str
) -> None:
    monkeypatch.setenv(name, value)
    findings = {each.level: each for each in settings.find(num_gpus=2)}
    assert all(each.name == name for each in findings.values())
    assert level in findings
    assert findings[level].advice or level == OK
    if findings[level].text.startswith("FUSEDCOMM"):
        return  # a wrong value is wrong without GPUs too
    alone = {each.level for each in settings.find(num_gpus=0)}
    assert ERROR not in alone and alone


@pytest.mark.usefixtures("no_settings")
def test_good_settings_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD_SETTINGS.items():
        monkeypatch.setenv(name, value)
    assert [(each.name, each.level) for each in settings.find(num_gpus=2)] == [("environment", OK)]


@pytest.mark.usefixtures("no_settings")
def test_a_misspelt_variable_gets_a_suggestion_and_its_value_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEDCOMM_WORKSPACE_BYTE", "hunter2")
    (finding,) = settings.find(num_gpus=0)
    assert finding.advice == "did you mean FUSEDCOMM_WORKSPACE_BYTES?"
    assert "hunter2" not in f"{finding}"


def test_every_variable_of_fusedcomm_is_known() -> None:
    files = [path for folder in ("fusedcomm", "kernels") for path in (ROOT / folder).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".h", ".cpp")]
    read = {name for text in texts for name in re.findall(r"\"(FUSEDCOMM_[A-Z]+(?:_[A-Z]+)*)\"", text)}
    assert read - {"FUSEDCOMM_CPU"} == set(env.SETTINGS)  # this one is the name of fusedcomm's symmetric memory


def test_limits_of_the_system_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532999]")
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("3\n")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=64 << 20))
    findings = settings.find_limits(2, "5.4.0-generic", proc=tmp_path)
    levels = {each.name: each.level for each in findings}
    assert levels == {
        "kernel": ERROR,
        "ulimit -n": WARNING,
        "ulimit -l": WARNING,
        "/dev/shm": WARNING,
        "PID namespace": OK,
        "ptrace_scope": WARNING,
    }
    assert all(each.advice for each in findings)
    on_cpu = {each.name: each.level for each in settings.find_limits(0, "5.4.0", proc=tmp_path)}
    assert on_cpu == {"kernel": WARNING, "ulimit -n": WARNING, "PID namespace": OK}


def test_good_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=8 << 30))
    assert [(each.name, each.level) for each in settings.find_limits(2, "6.8.0-45", proc=tmp_path)] == [("limits", OK)]


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def finding() -> Finding:
        (each,) = cache.find(cache.survey())
        return each

    folder = tmp_path / "cache"
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(folder))
    assert finding().level == OK and "made when it is needed" in finding().text
    folder.mkdir(mode=0o700)
    assert (finding().level, finding().text) == (OK, str(folder))
    folder.chmod(0o777)
    assert finding().level == WARNING and "can be written by others (mode 0777)" in finding().text
    folder.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        patch.setattr("os.getuid", lambda: 12345)
        assert "cannot be written, belongs to another user" in finding().text
    with monkeypatch.context() as patch:
        patch.setattr(cache, "file_system", lambda path: "nfs4")
        assert "is on nfs4" in finding().text
    folder.rmdir()
    folder.write_text("")
    assert "is no directory" in finding().text
    with monkeypatch.context() as patch:
        patch.delenv("FUSEDCOMM_CACHE_DIR")
        patch.delenv("XDG_CACHE_HOME", raising=False)
        patch.setattr(Path, "home", Path("~unknown user").expanduser)
        assert finding().level == WARNING and "no home directory" in finding().text


def config_space(control: int) -> bytes:
    """A bridge with two extended capabilities, the second ACS."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x140 << 20 | 0x0001).to_bytes(4, "little")
    config[0x140:0x144] = pci.ACS.to_bytes(4, "little")
    config[0x146:0x148] = control.to_bytes(2, "little")
    return bytes(config)


def test_acs_and_iommu_hints(tmp_path: Path) -> None:
    assert pci.acs_redirects(config_space(0b11101)) is True
    assert pci.acs_redirects(config_space(0b00001)) is False
    assert pci.acs_redirects(config_space(0)[:256]) is None  # what users other than root can read
    for name, kind, control in (("a", "0x060400", 0b11101), ("b", "0x060400", 0), ("c", "0x030200", 0b11101)):
        device = tmp_path / "bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "class").write_text(kind + "\n")
        (device / "config").write_bytes(config_space(control))
    (tmp_path / "class/iommu/dmar0").mkdir(parents=True)
    seen = pci.survey(tmp_path)
    assert seen == {"iommu": True, "pci_bridges": 2, "acs_bridges": 1}
    assert [(each.name, each.level) for each in pci.find(seen, 2)] == [("ACS", WARNING), ("IOMMU", OK)]
    assert pci.find(seen, 1) == []


def test_versions_outside_of_the_range_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = facts.versions(None, None)
    assert {each.level for each in facts.version_findings(versions, 2)} <= {OK, WARNING}
    old = {each.name: each for each in facts.version_findings({**versions, "torch": "2.10.1", "triton": None}, 2)}
    assert re.fullmatch(r"torch must be [<>=.,\d]+, got 2\.10\.1", old["torch"].text)
    assert old["triton"].level == WARNING and old["triton"].text.endswith("everything on a GPU runs unfused")
    assert facts.version_findings({**versions, "triton": None}, 0)[0].level == ABSENT
    new = facts.version_findings({**versions, "torch": "2.16.0.dev1"}, 2)
    assert new[0].name == "torch"
    monkeypatch.setattr("fusedcomm.runtime.topology.no_native", lambda: "cannot be loaded")
    assert "native part" in {each.name for each in facts.version_findings(versions, 2)}
