"""``fusedcomm postmortem``: the ranks of a hung or failed run that are behind, their ops and their waits."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from fusedcomm.launch import console
from fusedcomm.launch.console import Column, Table
from fusedcomm.tools import dump_verdicts
from fusedcomm.tools.doctor_findings import ranks_text
from fusedcomm.tools.dump_verdicts import Postmortem, RecordedCall


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "postmortem",
        help="say which rank of a hung or failed run is behind, in which op, waiting for what",
        description="Reads what ranks have written into FUSEDCOMM_DUMP_DIR, when a call failed or on SIGUSR1. "
        "Prints each rank's last call, and a verdict: who is behind, and who waits for whom. "
        "Exit code: 0 if there is a verdict, 1 if there is no dump, 2 for wrong arguments.",
        epilog="example: fusedcomm postmortem dumps",
    )
    parser.add_argument("dir", metavar="DIR", help="where the files rank0.json, rank1.json, ... are")
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if problem := console.not_writable(args, "json"):
        return console.fail("postmortem", problem, code=2)
    try:
        dumps, problems = dump_verdicts.read(Path(args.dir))
    except OSError as error:
        return console.fail("postmortem", f"{args.dir}: {error.strerror}")
    for problem in problems:
        console.fail("postmortem", f"not read: {problem}")
    if not dumps:
        text = f"{args.dir}: no dump is there. Ranks need FUSEDCOMM_DUMP_DIR, before they start"
        return console.fail("postmortem", text)
    report = dump_verdicts.judge(dumps)
    _print(report)
    if args.json:
        console.write_json(args.json, {**dataclasses.asdict(report), "problems": problems})
    return 0


def _print(report: Postmortem) -> None:
    newest = max(dump.time for dump in report.dumps)
    reasons: dict[str, list[int]] = {}
    for dump in report.dumps:
        earlier = f", {newest - dump.time:.0f} s before the last" if newest - dump.time >= 1 else ""
        reasons.setdefault(f"{dump.why.partition(':')[0]}{earlier}", []).append(dump.rank)
    reasons |= {"no dump": report.silent} if report.silent else {}
    out = console.stdout()
    out.print("why ranks have written their dumps:")
    for why, ranks in reasons.items():
        out.print(f"{ranks_text(ranks)}: {why}", markup=False)
    console.show(table(report), out)
    out.print("\n".join(["verdict:", *report.verdicts]), markup=False)


def table(report: Postmortem) -> Table:
    rows = [
        (group.name if i == 0 else "", rank, group.last.get(rank))
        for group in report.groups
        for i, rank in enumerate(group.ranks)
    ]
    columns = (
        Column("group", "its name; the lines below are its other ranks", lambda row: row[0], left=True),
        Column("rank", "its number in the job", lambda row: str(row[1])),
        Column("last call", "-: none was recorded", lambda row: str(row[2] or "-"), left=True, folds=24),
        Column("runs", "the algorithm of the last call", lambda row: (row[2] and row[2].algorithm) or "", left=True),
        Column("is", "where the call was when the dump was written", lambda row: _state(row[2]), left=True, folds=12),
        Column("since\ns", "how long it was there", lambda row: f"{row[2].seconds:.1f}" if row[2] else ""),
    )
    return Table(columns, rows)


def _state(call: RecordedCall | None) -> str:
    if call is None:
        return ""
    return call.state if call.waiting_for is None else f"waiting for rank {call.waiting_for}"
