"""The whole of what the doctor finds out, in the order in which it is shown."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusedcomm import env
from fusedcomm.doctor import across_ranks, cache, checks, facts, gpus, network, pci, settings
from fusedcomm.doctor.across_ranks import GroupAnswer
from fusedcomm.doctor.checks import CheckRanks
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding, by_value, exit_code, in_order
from fusedcomm.doctor.gpus import Gpu, Machine, Pair
from fusedcomm.machine import environment

STAGES = 4
CPU_S, GPU_S = 20.0, 90.0  # limits of a check; on GPUs CUDA starts and Triton compiles
MAX_GPU_RANKS = 8


@dataclass
class DoctorReport:
    versions: dict[str, str | None]
    system: dict[str, Any]
    environment: dict[str, str]
    gpus: list[Gpu]
    pairs: list[Pair]
    pci: dict[str, Any]
    network: dict[str, Any]
    cache: dict[str, Any] | None
    findings: list[Finding]
    devices: list[dict[str, Any]] = field(default_factory=list)  # as torch sees them
    groups: list[GroupAnswer] = field(default_factory=list)  # the groups that were asked for verdicts

    def uuids(self) -> set[str] | None:
        """The GPUs that torch, or a rank, sees; None where they are unknown."""
        seen = {uuid for each in self.groups for rank in each.ranks for uuid in rank["gpus"]}
        seen |= {device["uuid"] for device in self.devices}
        hidden = torch.cuda.device_count() == 0 and "CUDA_VISIBLE_DEVICES" in os.environ
        return seen if seen or hidden else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "exit_code": exit_code(self.findings)}


def survey(machine: Machine) -> DoctorReport:
    """A report of what can be read, without touching a GPU or starting a process."""
    num_gpus = torch.cuda.device_count()
    report = DoctorReport(
        facts.versions(machine.driver, machine.cuda_driver),
        facts.system(),
        environment(),
        machine.gpus,
        machine.pairs,
        pci.survey(),
        network.survey(),
        cache.survey(),
        [],
    )
    report.findings += facts.version_findings(report.versions, num_gpus)
    report.findings += settings.find_limits(num_gpus, platform.release())
    report.findings += facts.sees_no_gpu(num_gpus, len(machine.gpus))
    report.findings += pci.find(report.pci, num_gpus)
    report.findings += network.find(report.network, num_gpus, platform.release())
    report.findings += settings.find(num_gpus)
    report.findings += cache.find(report.cache)
    return report


def diagnose(quick: bool, theirs: GroupAnswer | Exception | None, on_stage: Callable[[int], None]) -> DoctorReport:
    """``theirs`` is what torchrun's ranks said of their own group, or what failed there; None without torchrun.

    ``quick`` leaves the functional checks out.
    """
    machine = gpus.survey()
    report = survey(machine)
    on_stage(1)
    num_gpus = torch.cuda.device_count()
    if theirs is not None:
        _heard(report, theirs)
    if isinstance(theirs, GroupAnswer):
        report.findings += across_ranks.find_differences(theirs) + across_ranks.find_hosts(theirs)
    with CheckRanks(2) as ranks:
        if theirs is None:
            _heard(report, _ask(ranks, "cpu", CPU_S))
        on_stage(2)
        if not quick:
            _check_ranks(report, ranks, "cpu", CPU_S)
    on_stage(3)
    if num_gpus == 0:
        report.findings.append(Finding("algorithms", "cuda", ABSENT, "not used: torch sees no GPU"))
    else:
        _look_at_gpus(report, num_gpus, quick, theirs)
    _judge(report, machine, num_gpus)
    report.findings = in_order(report.findings)
    on_stage(4)
    return report


def _look_at_gpus(report: DoctorReport, num_gpus: int, quick: bool, theirs: GroupAnswer | Exception | None) -> None:
    with CheckRanks(1) as alone:
        _look_at_devices(report, alone)
        if not quick and report.devices:
            _check_devices(report, alone, num_gpus)
    judged = any(verdict.device == "cuda" for each in report.groups for verdict in each.verdicts)
    if num_gpus == 1:
        if not judged:
            report.findings.append(_verdict_of_one_gpu(report, theirs))
        return
    if isinstance(theirs, GroupAnswer) and not judged:
        seen = by_value(theirs.gpus_by_rank)
        text = f"not used: each rank needs a GPU of its own, got GPUs of {seen}"
        report.findings.append(
            Finding("algorithms", "cuda", ERROR, text, "start as many ranks on a host as it has GPUs")
        )
    with CheckRanks(min(num_gpus, MAX_GPU_RANKS), "cpu:gloo,cuda:nccl") as ranks:
        if theirs is None:
            _heard(report, _ask(ranks, "cuda", GPU_S))
        if not quick:
            _check_ranks(report, ranks, "cuda", GPU_S)


def _verdict_of_one_gpu(report: DoctorReport, theirs: GroupAnswer | Exception | None) -> Finding:
    """The verdict where torch sees one GPU: it has no peers, or this process does not see them."""
    advice = "show all GPUs to every rank of a host (SLURM: --gpus-per-node, not --gpus-per-task)"
    if isinstance(theirs, GroupAnswer):
        here = theirs.on_host_of_rank_0()
        seen = {uuid for rank in here for uuid in rank["gpus"]}
        if len(here) > 1 and max(len(seen), len(report.gpus)) > 1:
            text = f"not used: each of the {len(here)} ranks on this host sees one GPU"
            return Finding("algorithms", "cuda", ERROR, text, advice)
    if len(report.gpus) > 1:
        text = f"chunked and fused are not used: torch sees one of the machine's {len(report.gpus)} GPUs"
        return Finding("algorithms", "cuda", WARNING, text, advice)
    return Finding("algorithms", "cuda", ABSENT, "chunked and fused are not used: one GPU has no peers")


def _ask(ranks: CheckRanks, device_type: str, limit_s: float) -> GroupAnswer | Exception:
    try:
        return ranks.run(limit_s, across_ranks.ask, [device_type])
    except Exception as error:  # whatever happens to the ranks, the doctor goes on
        return error


def _heard(report: DoctorReport, answer: GroupAnswer | Exception) -> None:
    if isinstance(answer, Exception):
        text = f"unknown: the ranks could not be asked: {checks.brief(answer)}"
        report.findings.append(Finding("algorithms", "group", ERROR, text, "no op on a group works until this does"))
        return
    report.groups.append(answer)


def _judge(report: DoctorReport, machine: Machine, num_gpus: int) -> None:
    """This comes at the end, when it is known which GPUs torch sees: the others do not matter."""
    ours = gpus.of(machine, report.uuids())
    report.findings += gpus.find(ours)
    primary = "cpu" if num_gpus < 2 else None if gpus.no_nvlink(ours) else "cuda"
    for each in report.groups:
        report.findings += across_ranks.find_verdicts(each, primary) + across_ranks.find_proofs(each)


def _check_ranks(report: DoctorReport, ranks: CheckRanks, device_type: str, limit_s: float) -> None:
    can_run = [
        verdict.algorithm
        for each in report.groups
        for verdict in each.verdicts
        if verdict.device == device_type and verdict.can_run
    ]
    if not set(env.WITH_WORKSPACE).isdisjoint(can_run):
        advice = "peers' memory does not work here: see the findings above; FUSEDCOMM_ALGORITHM=unfused avoids it"
        name = f"{device_type} symmetric memory"
        report.findings.append(ranks.check(name, advice, limit_s, checks.rendezvous, device_type))
        if device_type == "cuda":
            report.findings.append(ranks.check("cuda atomics", advice, limit_s, checks.atomics, device_type))
    for algorithm in can_run:
        advice = f"do not use it here: FUSEDCOMM_ALGORITHM must not be {algorithm}; please report this"
        name = f"{device_type} {algorithm}"
        report.findings.append(ranks.check(name, advice, limit_s, checks.op_values, device_type, algorithm))


def _look_at_devices(report: DoctorReport, alone: CheckRanks) -> None:
    try:
        report.devices = alone.run(GPU_S, checks.devices)
    except Exception as error:  # whatever happens to the rank, the doctor goes on
        advice = "python -c 'import torch; torch.cuda.init()' must work first"
        report.findings.append(Finding("checks", "cuda devices", ERROR, checks.brief(error), advice))


def _check_devices(report: DoctorReport, alone: CheckRanks, num_gpus: int) -> None:
    for device in report.devices:
        text = f"{device['sms']} SMs: kernels that wait have at most one program on each (not tried)"
        level, advice = OK, ""
        if device["cooperative_launch"] is False:
            level, text = WARNING, f"{text}; no cooperative launch"
            advice = "an old GPU, or MPS: nothing promises that all programs run at once"
        report.findings.append(Finding("checks", f"GPU {device['index']}", level, text, advice))
    if num_gpus >= 2:
        advice = "IOMMU or ACS? NCCL_P2P_DISABLE=1 makes everything go through the host"
        report.findings.append(alone.check("cuda peer copies", advice, GPU_S, checks.peer_copies))
    else:
        advice = "Triton must compile and run here: see its error"
        report.findings.append(alone.check("cuda atomics", advice, GPU_S, checks.atomics_on_one_gpu))
