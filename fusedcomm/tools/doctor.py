"""``fusedcomm doctor``: this machine's versions and GPUs, their faults, and the algorithms that will be used."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.memory.redact import redact
from fusedcomm.tools import doctor_ranks
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, LEVELS, OK, WARNING, Finding, told_once
from fusedcomm.tools.doctor_ranks import GroupAnswer
from fusedcomm.tools.doctor_report import GPU_S, diagnose

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
    if problem := console.not_writable(args, "json"):
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


def _print(report: dict[str, Any], quick: bool) -> None:
    out = console.stdout()
    out.print(", ".join(f"{name} {version}" for name, version in report["versions"].items() if version), markup=False)
    findings = told_once(Finding(**each) for each in report["findings"])
    console.show(findings_table(findings), out)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    out.print("; ".join(f"{level}: {LEVELS[level]}" for level in LEVELS if counts[level]))
    if quick:
        out.print("nothing was tried (--quick)")
    errors, warnings = (f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in (ERROR, WARNING))
    out.print(f"{errors}, {warnings}: exit code {report['exit_code']}")


def findings_table(findings: Sequence[Finding]) -> Table:
    columns = (
        Column("area", "a part of the machine, or of fusedcomm", lambda row: row.section, left=True),
        Column("state", ", ".join(LEVELS), lambda row: Text(row.level, style=STYLES[row.level]), left=True),
        Column("what", "what was looked at", lambda row: row.name, left=True),
        Column("found", "what was seen; behind ->: what to do about it", _found, left=True, folds=24),
    )
    return Table(columns, findings)


def _found(finding: Finding) -> Text:
    text = Text(finding.text)
    if finding.advice and finding.level != OK:
        text.append(f"\n-> {finding.advice}", style="italic")
    return text
