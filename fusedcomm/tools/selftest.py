"""``fusedcomm selftest``: whether an installed fusedcomm keeps its promises on this machine."""

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from fusedcomm.errors import PeerError
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.tools.selftest_checks import CHECKS, CheckResult, run_check

TIMEOUT_S = 300  # for one check, which ends by itself long before, with a finding
STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="check results, time-outs, errors and fallbacks here, in under a minute",
        description="Checks what fusedcomm promises, in ranks that it starts or in those of torchrun: results and "
        "gradients of every op, time-outs, errors and fallbacks. No rank is killed. Prints a table with a line per "
        "check. Exit code: 0 if nothing failed, 1 if something did, 2 for wrong arguments.",
        epilog="example: fusedcomm selftest --device cpu",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    console.add_rank_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device_type, world_size, problem = world.asked_for(args)
    if problem := problem or console.not_writable(args, "json"):
        return console.fail("selftest", problem, code=2)
    start = time.monotonic()
    try:
        results = _run_checks(device_type, world_size)
    except (RankError, PeerError) as error:  # before the first check: ranks did not start
        return console.fail("selftest", str(error))
    if not world.is_rank_0():
        return 0  # rank 0's exit code is torchrun's
    failed = [result.name for result in results if result.status == "failed"]
    skipped, seconds = sum(result.status == "skipped" for result in results), time.monotonic() - start
    out, verdict = console.stdout(), f"FAILED: {', '.join(failed)}" if failed else "nothing failed"
    console.show(table(results), out)
    out.print(f"{verdict}, {skipped} skipped; {world_size} ranks ({device_type}), {seconds:.0f} s")
    if args.json:
        found = {"world_size": world_size, "device": device_type, "passed": not failed, "seconds": seconds}
        console.write_json(args.json, {**run_facts(), **found, "checks": list(map(asdict, results))})
    return 1 if failed else 0


def _run_checks(device_type: str, world_size: int) -> list[CheckResult]:
    """Rank 0's results; [] in other ranks of torchrun. A check that ends its ranks is the last one to run."""
    results: list[CheckResult] = []
    with (
        world.ranks(device_type, world_size, TIMEOUT_S) as call,
        console.progress(world.is_rank_0(), len(CHECKS), "starting", "check") as on_check,
    ):
        for name, (proves, _) in CHECKS.items():
            try:
                result = call(_in_rank, name, device_type)
            except (RankError, PeerError) as error:
                results.append(CheckResult(name, proves, "failed", str(error)))
                break
            results += [] if result is None else [result]
            on_check(len(results))
    left = list(CHECKS.items())[len(results) :] if world.is_rank_0() else []
    return results + [CheckResult(name, proves, "skipped", "its ranks had ended") for name, (proves, _) in left]


def _in_rank(rank: int, name: str, device_type: str) -> CheckResult:
    log = logging.getLogger("fusedcomm")
    level = log.level
    log.setLevel(logging.ERROR)  # fallbacks are part of the checks
    try:
        return run_check(name, world.rank_device(device_type))
    finally:
        log.setLevel(level)


def table(checks: Sequence[CheckResult]) -> Table:
    columns = (
        Column("check", "its name", lambda each: each.name, left=True),
        Column("result", "skipped: cannot run here", lambda row: Text(row.status, style=STYLES[row.status]), left=True),
        Column("proves", "what holds if it passes", lambda each: each.proves, left=True, folds=20),
        Column("found", "or why it failed, or did not run", lambda each: each.found, left=True, folds=20),
    )
    return Table(columns, checks)
