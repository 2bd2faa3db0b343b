"""Settings that break things: environment variables and the system's limits, each with what to do."""

from __future__ import annotations

import difflib
import os
import re
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fusedcomm import env
from fusedcomm.doctor.findings import ERROR, OK, WARNING, Finding

GIB, MIB = 1 << 30, 1 << 20
INTERFACES = Path("/sys/class/net")
INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h


@dataclass(frozen=True)
class Rule:
    """A variable and its bad values. An error in ``level`` is a warning on a machine with fewer than two GPUs."""

    name: str
    bad: Callable[[str], bool]
    level: str
    text: str
    advice: str


def _on(value: str) -> bool:
    return value.lower() not in ("", "0", "false", "no", "off")


def _fewer_than_8(value: str) -> bool:
    return value.isdigit() and int(value) < 8


def _no_interface_of_nccl(value: str) -> bool:
    """NCCL takes prefixes of names, whole names behind ``=``, and, behind ``^``, all but these."""
    if value.startswith("^"):
        return False
    wanted = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    matches = str.__eq__ if value.startswith("=") else str.startswith
    return not any(matches(name, each) for name in _interfaces() for each in wanted)


def _no_interface_of_gloo(value: str) -> bool:
    return not set(value.split(",")) <= set(_interfaces())


def _interfaces() -> list[str]:
    return [path.name for path in INTERFACES.glob("*")]


RULES = (
    *(
        Rule(
            name,
            lambda value: bool(re.search(r"expandable_segments:\s*true", value, re.IGNORECASE)),
            WARNING,
            "memory in expandable segments cannot be handed to other processes in the old way (CUDA IPC)",
            "fusedcomm's own memory is not from there; unset it where other libraries fail",
        )
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    ),
    Rule(
        "CUDA_LAUNCH_BLOCKING",
        _on,
        ERROR,
        "every launch waits for its kernel: nothing overlaps, and a wait for a peer holds up what the peer waits for",
        "unset it",
    ),
    Rule(
        "CUDA_MODULE_LOADING",
        lambda value: value.upper() == "EAGER",
        WARNING,
        "all kernels of all libraries are loaded at the start, which takes time and memory",
        "unset it: fusedcomm loads its kernels before any of them waits",
    ),
    Rule(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _fewer_than_8,
        WARNING,
        "streams share few hardware queues: a kernel that waits for peers holds up the pushes behind it",
        "unset it, or set 8 or more; Megatron asks for 1",
    ),
    Rule(
        "FUSEDCOMM_PROVE",
        lambda value: value == "0",
        WARNING,
        "GPUs use algorithms that have not been compared with the reference on them",
        "unset it",
    ),
    Rule("NCCL_P2P_DISABLE", lambda value: value == "1", ERROR, "forbids peer memory: GPUs run unfused", "unset it"),
    Rule(
        "NCCL_CUMEM_ENABLE",
        lambda value: value == "0",
        WARNING,
        "NCCL cannot share memory that other processes can map: its own collectives, so unfused, are slower",
        "unset it",
    ),
    Rule(
        "NCCL_WIN_ENABLE",
        lambda value: value == "0",
        WARNING,
        "no memory can be registered as windows: collectives take SMs, whatever fusedcomm.nccl_options() asks for",
        "unset it",
    ),
    Rule(
        "NCCL_IB_DISABLE",
        lambda value: value == "1",
        WARNING,
        "groups across hosts go through TCP sockets, and not through InfiniBand or RoCE",
        "unset it where there are such adapters",
    ),
    Rule(
        "NCCL_NET",
        lambda value: value.lower() == "socket",
        WARNING,
        "groups across hosts go through TCP sockets, and not through InfiniBand or RoCE",
        "unset it where there are such adapters",
    ),
    Rule(
        "NCCL_NET_GDR_LEVEL",
        lambda value: value.upper() in ("0", "LOC"),
        WARNING,
        "no adapter may reach GPU memory: what GPUs send to other hosts is copied to the host first",
        "unset it",
    ),
    Rule(
        "NCCL_SOCKET_IFNAME",
        _no_interface_of_nccl,
        ERROR,
        "names no network interface of this host: NCCL does not start",
        "name one of /sys/class/net, or unset it",
    ),
    Rule(
        "GLOO_SOCKET_IFNAME",
        _no_interface_of_gloo,
        ERROR,
        "names a network interface that this host does not have: gloo does not start",
        "name some of /sys/class/net, or unset it",
    ),
    Rule(
        "TORCH_NCCL_BLOCKING_WAIT",
        _on,
        WARNING,
        "the host waits for each collective: `pipelined` prepares no next piece meanwhile",
        "unset it",
    ),
    Rule(
        "TORCH_DISTRIBUTED_DEBUG",
        lambda value: value.upper() == "DETAIL",
        WARNING,
        "torch compares every collective over the ranks before it starts: `unfused` and `pipelined` are slow",
        "unset it but to debug",
    ),
    Rule(
        "TORCH_SYMMMEM",
        lambda value: value.upper() not in ("", "CUDA"),
        ERROR,
        "fusedcomm needs torch's CUDA backend of symmetric memory",
        "unset it",
    ),
    Rule("TORCH_SYMM_MEM_DISABLE_MULTICAST", _on, OK, "no harm: fusedcomm uses no multicast", ""),
    Rule(
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES",
        _on,
        WARNING,
        "ranks may share a GPU, where one that waits can starve the one that it waits for; for tests",
        "unset it, give each rank a GPU",
    ),
    Rule("TRITON_INTERPRET", _on, ERROR, "kernels run in Triton's interpreter, for tests", "unset it"),
    Rule(
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
        lambda value: value not in ("", "100"),
        ERROR,
        "fewer SMs than the GPU says: kernels that wait may not all be resident",
        "unset it",
    ),
    Rule(
        "FUSEDCOMM_ALGORITHM",
        bool,
        WARNING,
        "every op runs by this algorithm where it can; the planner is not asked",
        "unset it",
    ),
    Rule(
        "FUSEDCOMM_CHECK", _on, WARNING, "every call waits for all ranks to compare it first: for debugging", "unset it"
    ),
    Rule("FUSEDCOMM_HOST_ID", bool, WARNING, "says which ranks share memory, true or not; for tests", "unset it"),
)


def find(num_gpus: int) -> list[Finding]:
    """What is wrong with the environment variables."""
    wrong = _of_fusedcomm()
    findings = [
        Finding("settings", rule.name, _level(rule.level, num_gpus), rule.text, rule.advice)
        for rule in RULES
        if rule.name in os.environ and rule.bad(os.environ[rule.name])
        if rule.name not in {finding.name for finding in wrong}
    ]
    return findings + wrong or [
        Finding("settings", "environment", OK, "no variable is set that breaks or slows things")
    ]


def _of_fusedcomm() -> list[Finding]:
    """Variables of fusedcomm with a wrong name or value. An unknown one's value may be a secret: it is not told."""
    findings = []
    for name in sorted(name for name in os.environ if name.startswith("FUSEDCOMM_")):
        if name in env.SETTINGS:
            try:
                env.SETTINGS[name]()
            except ValueError as error:
                findings.append(
                    Finding("settings", name, ERROR, str(error), "correct it or unset it: until then every op fails")
                )
        else:
            near = difflib.get_close_matches(name, env.SETTINGS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(env.SETTINGS))}"
            findings.append(Finding("settings", name, WARNING, "no setting of fusedcomm: ignored", advice))
    return findings


def find_limits(num_gpus: int, kernel: str, proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> list[Finding]:
    """What is wrong with what the system allows."""
    findings = []
    if _numbers(kernel) < (5, 6):
        text = f"Linux must be 5.6 or newer for torch's symmetric memory on GPUs (pidfd_getfd), got {kernel}"
        findings.append(Finding("system", "kernel", _level(ERROR, num_gpus), text, "a newer kernel"))
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < 1024:
        text = f"{files} open files per process"
        findings.append(Finding("system", "ulimit -n", WARNING, text, "ulimit -n 65536: each peer takes some"))
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if num_gpus >= 2 and 0 <= locked < 64 * MIB:
        text = f"{locked // 1024} KiB of memory may be locked; NCCL over InfiniBand needs more"
        findings.append(Finding("system", "ulimit -l", WARNING, text, "ulimit -l unlimited"))
    findings += _shm(num_gpus, shm) + _namespaces(num_gpus, proc)
    return findings or [
        Finding("system", "limits", OK, "the kernel and the limits of open files and shared memory suffice")
    ]


def _shm(num_gpus: int, shm: Path) -> list[Finding]:
    try:
        total = shutil.disk_usage(shm).total
    except OSError:
        total = 0
    if num_gpus < 2 or total >= GIB:
        return []
    text = f"/dev/shm has {total // MIB} MiB: fusedcomm does not use it, NCCL, so unfused, does"
    return [Finding("system", "/dev/shm", WARNING, text, "docker run --shm-size=8g, or --ipc=host")]


def _namespaces(num_gpus: int, proc: Path) -> list[Finding]:
    findings = []
    try:
        own = os.readlink(proc / "self/ns/pid") != INITIAL_PID_NAMESPACE
    except OSError:
        own = False
    if own:
        text = "this process has a PID namespace of its own, as in a container"
        findings.append(
            Finding("system", "PID namespace", OK, text, "ranks share memory with ranks of the same one only")
        )
    try:
        ptrace = int((proc / "sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        ptrace = 0
    if ptrace >= 2 and num_gpus >= 2:
        text = f"ptrace_scope is {ptrace}: a process may not take memory from another that allows it"
        findings.append(Finding("system", "ptrace_scope", WARNING, text, "0 or 1, if the rendezvous fails"))
    return findings


def _level(level: str, num_gpus: int) -> str:
    return WARNING if level == ERROR and num_gpus < 2 else level


def _numbers(release: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", release)
    return tuple(map(int, match.groups())) if match else (99,)
