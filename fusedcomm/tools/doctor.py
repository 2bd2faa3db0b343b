"""``fusedcomm doctor``: this machine's versions and GPUs, their faults, and the algorithms that will be used."""

import argparse
import os
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.text import Text

from fusedcomm import env
from fusedcomm.env import environment
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.memory.redact import redact
from fusedcomm.tools import doctor_gpus, doctor_host, doctor_ranks
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, LEVELS, OK, WARNING, Finding, told_once
from fusedcomm.tools.doctor_gpus import Gpu, Machine, Pair
from fusedcomm.tools.doctor_ranks import CheckRanks, GroupAnswer

CPU_S, GPU_S = 20.0, 90.0  # limits of a check; on GPUs CUDA starts and Triton compiles
MAX_GPU_RANKS = 8
STYLES = {OK: "green", ABSENT: "dim", WARNING: "yellow", ERROR: "bold red"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine and its settings; say which algorithms will be used, or why not",
        description="Looks at versions, GPUs and settings, tries in processes of its own what fusedcomm needs, and "
        "asks the planner which algorithms it will use; under torchrun, for its ranks. Says what to do about findings. "
        "Exit code: 0 if all that is there is usable (no GPU is no error), 1 if not, 2 for wrong arguments.",
        epilog="example: fusedcomm doctor --quick --json doctor.json",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="try nothing: only look, and ask the planner (default: try too)"
    )
    parser.add_argument(
        "--no-redact",
        action="store_true",
        help="show names of hosts and users, addresses, ids of GPUs and values (default: hidden)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if problem := world.bare_srun() or console.not_writable(args, "json"):
        return console.fail("doctor", problem, code=2)
    theirs = _ask_torchrun() if world.under_torchrun() else None
    if not world.is_rank_0():
        return 0  # rank 0's exit code is torchrun's
    found = diagnose(args.quick, theirs)
    report = found.as_json() if args.no_redact else redact(found.as_json())
    _print(report, args.quick)
    if args.json:
        console.write_json(args.json, report)
    return report["exit_code"]


def _ask_torchrun() -> GroupAnswer | Exception | None:
    """Answers of torchrun's ranks, about GPUs too if each has one, or the error; None in ranks other than 0."""
    try:
        with world.ranks("cpu", 0, GPU_S) as call:  # by gloo: a rank does not know yet whether the others have GPUs
            return call(doctor_ranks.ask, ["cpu", "cuda"])
    except Exception as error:  # a rank that did not come, a wrong setting: the doctor says so
        return error


@dataclass
class DoctorReport:
    versions: dict[str, str | None]
    environment: dict[str, str]
    gpus: list[Gpu]
    pairs: list[Pair]
    findings: list[Finding] = field(default_factory=list)
    uuids: list[str] = field(default_factory=list)  # the GPUs of torch
    groups: list[GroupAnswer] = field(default_factory=list)  # the groups that were asked for verdicts

    def heard(self, answer: GroupAnswer | Exception) -> None:
        if isinstance(answer, GroupAnswer):
            self.groups.append(answer)
        else:
            text = f"unknown: the ranks could not be asked: {doctor_ranks.brief(answer)}"
            advice = "no op on a group works until this does"
            self.findings.append(Finding("algorithms", "group", ERROR, text, advice))

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"exit_code": int(any(finding.level == ERROR for finding in self.findings))}


def diagnose(quick: bool, theirs: GroupAnswer | Exception | None) -> DoctorReport:
    """``theirs``: the answer of torchrun's ranks about their group, or their failure; None without torchrun.

    ``quick`` leaves the functional checks out.
    """
    machine, num_gpus = doctor_gpus.survey(), torch.cuda.device_count()
    versions = doctor_host.versions(machine.driver, machine.cuda_driver)
    report = DoctorReport(versions, environment(), machine.gpus, machine.pairs)
    report.findings += doctor_host.find_versions(versions, num_gpus) + doctor_host.find_settings(num_gpus)
    report.findings += doctor_host.sees_no_gpu(num_gpus, len(machine.gpus))
    if theirs is not None:
        report.heard(theirs)
    if isinstance(theirs, GroupAnswer):
        report.findings += doctor_ranks.find_differences(theirs)
    with closing(CheckRanks(2)) as ranks:
        _look_at_ranks(report, ranks, "cpu", CPU_S, quick, theirs is not None)
    if num_gpus:
        _look_at_gpus(report, num_gpus, quick, theirs is not None)
    judged = any(verdict.device == "cuda" for each in report.groups for verdict in each.verdicts)
    if not judged and (num_gpus < 2 or theirs is not None):
        text = f"not used: torch sees {num_gpus} GPU(s); two ranks or more need one of their own each"
        report.findings.append(Finding("algorithms", "cuda", ABSENT, text))
    _judge(report, machine, num_gpus)
    return report


def _look_at_ranks(
    report: DoctorReport, ranks: CheckRanks, device_type: str, limit_s: float, quick: bool, asked: bool
) -> None:
    """Hear the planner's verdicts in these ranks, unless torchrun's were asked, and try the algorithms that can run."""
    if not asked:
        try:
            report.heard(ranks.run(limit_s, doctor_ranks.ask, [device_type]))
        except Exception as error:  # the doctor survives any failure of the ranks
            report.heard(error)
    if quick:
        return
    verdicts = [verdict for each in report.groups for verdict in each.verdicts if verdict.device == device_type]
    can_run = [verdict.algorithm for verdict in verdicts if verdict.can_run]
    for algorithm in can_run:
        advice = f"do not use it here: FUSEDCOMM_ALGORITHM must not be {algorithm}; please report this"
        if algorithm in env.WITH_WORKSPACE:
            advice = f"see the findings above, and ptrace_scope, which must be 0 or 1; else {advice}"
        name = f"{device_type} {algorithm}"
        report.findings.append(ranks.check(name, advice, limit_s, doctor_ranks.op_values, device_type, algorithm))


def _look_at_gpus(report: DoctorReport, num_gpus: int, quick: bool, asked: bool) -> None:
    with closing(CheckRanks(1)) as alone:
        try:
            report.uuids = alone.run(GPU_S, doctor_ranks.uuids)
        except Exception as error:  # the doctor survives any failure of the rank
            advice = "python -c 'import torch; torch.cuda.init()' must work first"
            report.findings.append(Finding("checks", "cuda devices", ERROR, doctor_ranks.brief(error), advice))
        if report.uuids and num_gpus >= 2 and not quick:
            advice = "IOMMU or ACS? NCCL_P2P_DISABLE=1 makes everything go through the host"
            report.findings.append(alone.check("cuda peer copies", advice, GPU_S, doctor_ranks.peer_copies))
    if num_gpus > 1:
        with closing(CheckRanks(min(num_gpus, MAX_GPU_RANKS), world.BACKENDS["cuda"])) as ranks:
            _look_at_ranks(report, ranks, "cuda", GPU_S, quick, asked)


def _judge(report: DoctorReport, machine: Machine, num_gpus: int) -> None:
    """Comes at the end, with torch's GPUs known: the others do not matter."""
    seen = {uuid for each in report.groups for rank in each.ranks for uuid in rank["gpus"]} | set(report.uuids)
    hidden = num_gpus == 0 and "CUDA_VISIBLE_DEVICES" in os.environ
    ours = doctor_gpus.of(machine, seen if seen or hidden else None)
    report.findings += doctor_gpus.find(ours)
    primary = "cpu" if num_gpus < 2 else None if doctor_gpus.no_nvlink(ours) else "cuda"
    for each in report.groups:
        report.findings += doctor_ranks.find_verdicts(each, primary)


def _print(report: dict[str, Any], quick: bool) -> None:
    out = console.stdout()
    out.print(", ".join(f"{name} {version}" for name, version in report["versions"].items() if version), markup=False)
    findings = told_once(Finding(**each) for each in report["findings"])
    columns = (
        Column("area", "a part of the machine, or of fusedcomm", lambda row: row.section, left=True),
        Column("state", ", ".join(LEVELS), lambda row: Text(row.level, style=STYLES[row.level]), left=True),
        Column("what", "what was looked at", lambda row: row.name, left=True),
        Column("found", "what was seen; behind ->: what to do about it", _found, left=True, folds=24),
    )
    console.show(Table(columns, findings), out)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    out.print("; ".join(f"{level}: {LEVELS[level]}" for level in LEVELS if counts[level]))
    if quick:
        out.print("nothing was tried (--quick)")
    errors, warnings = (f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in (ERROR, WARNING))
    out.print(f"{errors}, {warnings}: exit code {report['exit_code']}")


def _found(finding: Finding) -> Text:
    text = Text(finding.text)
    if finding.advice and finding.level != OK:
        text.append(f"\n-> {finding.advice}", style="italic")
    return text
