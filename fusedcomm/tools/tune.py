"""``fusedcomm tune``: measures the numbers that the planner estimates with, and keeps them for the user's programs."""

import argparse
import os
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fusedcomm.bench import tune
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.memory import members
from fusedcomm.memory.group import process_group, resolve
from fusedcomm.memory.group_member import WorkspaceUnavailable, on_device
from fusedcomm.plan.cost import tuned
from fusedcomm.plan.cost.model import DEFAULTS, TUNED, Constants

TIMEOUT_S = 600
NOT_KEPT = (
    "This machine did other things while it was measured: nothing is kept. End what else runs here, or give the ranks "
    "CPUs of their own (taskset), and try again"
)
MISFIT = (
    "The cost model does not fit this machine: nothing is kept, and default numbers stay in use. --json has what was "
    "measured: please report it"
)
UNITS = {"flops": (1e9, "GFLOP/s"), "bandwidth": (1e9, "GB/s"), "overhead": (1e-6, "us"), "latency": (1e-6, "us")}


@dataclass(frozen=True)
class TuneResult:
    """The report of rank 0. ``failed`` says why no numbers are kept; ``found`` is None where none came out."""

    failed: str = ""
    found: tune.Tuned | None = None
    key: dict[str, Any] = field(default_factory=dict)  # of the file
    seconds: float = 0.0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure this machine, so that the planner chooses by its numbers",
        description="Measures matmuls, links and collectives, which takes a minute, and keeps the numbers in the "
        "user's cache directory: they decide by which algorithm calls run, in programs that are started later with "
        "as many ranks. Prints them beside the default ones. Ranks must share memory, as on one host. Other programs "
        "must not run meanwhile: what a busy machine measures is not kept. Exit code: 0, 1 if nothing was kept, 2 for "
        "wrong arguments.",
        epilog="example: fusedcomm tune && fusedcomm tune --show",
    )
    what = parser.add_mutually_exclusive_group()
    for name, about in (
        ("--quick", "measure fewer sizes and rounds (default: all)"),
        ("--show", "measure nothing: print the numbers in use and where they come from"),
        ("--reset", "measure nothing: remove the measured numbers, so that default ones are used"),
    ):
        what.add_argument(name, action="store_true", help=about)
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    console.add_rank_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device_type, world_size, problem = world.asked_for(args)
    if world_size < 2:
        problem = problem or f"--world-size must be at least 2, for one rank exchanges nothing, got {world_size}"
    if problem := problem or console.not_writable(args, "json"):
        return console.fail("tune", problem, code=2)
    if args.show or args.reset:
        return _stored(args, device_type, world_size) if os.environ.get("LOCAL_RANK", "0") == "0" else 0
    try:
        if world.is_rank_0():
            tuned.make_directory()  # before the work
        with world.ranks(device_type, world_size, TIMEOUT_S) as call:
            result = call(_measure, device_type, args.quick)
    except OSError as error:
        why = f"cannot write {error.filename}: {error.strerror}; set FUSEDCOMM_CACHE_DIR to a directory of yours"
        return console.fail("tune", why)
    except (ValuesDiffer, RankError) as error:
        return console.fail("tune", world.message(error))
    if result is None:
        return 0
    if args.json and result.found:
        console.write_json(args.json, report(result, args.quick))
    if result.failed:
        return console.fail("tune", result.failed)
    _print(result)
    return 0


def _stored(args: argparse.Namespace, device_type: str, world_size: int) -> int:
    """Do what --show or --reset says, without ranks; on every host of a torchrun."""
    out, key = console.stdout(), tuned.key(torch.device("cuda:0" if device_type == "cuda" else "cpu"), world_size)
    if device_type == "cpu":
        key["threads"] = 1  # a rank's
    try:
        file = tuned.path_of(key)
        if args.reset:
            text = "removed" if file.exists() else "there was no"
            file.unlink(missing_ok=True)
            out.print(f"{text} {file}", soft_wrap=True)
            return 0
        constants = tuned.read(key)
    except OSError as error:
        return console.fail("tune", f"{error.filename}: {error.strerror}")
    where = f"tuned numbers of {file}" if constants else f"default numbers: nothing usable in {file}"
    out.print(f"{world_size} ranks, {device_type}: {where}", soft_wrap=True)
    used = constants or DEFAULTS[device_type]
    console.show(_table(used), out)
    if args.json:
        console.write_json(args.json, report(TuneResult("", tune.Tuned(used), key), False))
    return 0


def _measure(rank: int, device_type: str, quick: bool) -> TuneResult:
    device, start = world.rank_device(device_type), time.perf_counter()
    ours = members.member(resolve(None)[1], device)
    try:
        if ours.no_workspace is not None:
            raise WorkspaceUnavailable(ours.no_workspace)
        progress = console.progress(rank == 0, len(tune.PARTS), "measuring", "measured")
        with progress as on_done, on_device(device):
            found = tune.tune(ours, quick, on_done)
    except WorkspaceUnavailable as reason:
        return TuneResult(f"what calls can run here cannot be measured: {reason}")
    except tune.Unreliable as reason:
        return TuneResult(f"{reason}. {NOT_KEPT}")
    result = TuneResult("", found, tuned.key(device, ours.group_size), time.perf_counter() - start)
    if why := tune.misfit(found.samples):
        return replace(result, failed=f"{why}; the noise was {found.noise:.0%}. {MISFIT}")
    try:
        tune.write_for_all(found.constants, result.key, process_group(None))
    except OSError as error:
        return replace(result, failed=str(error))
    return result


def report(result: TuneResult, quick: bool) -> dict[str, Any]:
    """The JSON. Its units are seconds, bytes per second and FLOP per second."""
    assert result.found is not None
    return {
        **run_facts(),
        **{name: result.key[name] for name in ("device", "device_type", "world_size")},
        "quick": quick,
        "seconds": result.seconds,
        "file": tuned.path_of(result.key).name,
        "digest": result.found.constants.digest,
        **asdict(result.found),
    }


def _print(result: TuneResult) -> None:
    found, key, out = result.found, result.key, console.stdout()
    assert found is not None
    out.print(f"{key['world_size']} ranks ({key['device']}), measured in {result.seconds:.0f} s", markup=False)
    console.show(_table(found.constants), out)
    out.print(f"noise: one matmul, measured again and again among the rest, differed by {found.noise:.0%}")
    right = sum(each.loss == 0 for each in found.samples)
    out.print(f"of {len(found.samples)} small calls measured, the estimates name the fastest algorithm in {right}")
    out.print(f"written to {tuned.path_of(key)}", soft_wrap=True)
    like = " of one thread" if found.constants.on_cpu else ""
    out.print(f"programs started from now on with as many ranks{like} use them; fusedcomm tune --reset removes them")


def _table(constants: Constants) -> Table:
    used, default = _flat(constants), _flat(DEFAULTS[constants.device_type])
    unit = {name: next((each for part, each in UNITS.items() if part in name), (1, "")) for name in default}
    columns = [Column("number", "what the planner's estimates are made of", str, left=True)]
    if constants.source == TUNED:
        about = "measured on this machine, in use"
        columns.append(Column(TUNED, about, lambda name: f"{used[name] / unit[name][0]:.4g}"))
    about = "in use where nothing was measured"
    columns.append(Column("default", about, lambda name: f"{default[name] / unit[name][0]:.4g}"))
    columns.append(Column("unit", "the unit of the numbers in the line", lambda name: unit[name][1], left=True))
    return Table(columns, list(default))


def _flat(constants: Constants) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in list(asdict(constants).items())[2:]:
        found |= {f"{name} {key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found
