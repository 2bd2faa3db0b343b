"""``fusedcomm tune``: measures the numbers that the planner estimates with, and keeps them for the user's programs."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.bench import tune
from fusedcomm.bench.estimates import CROSSOVER_K_N, crossovers
from fusedcomm.bench.fits import Unreliable
from fusedcomm.bench.timing import ValuesDiffer
from fusedcomm.cost import tuned
from fusedcomm.cost.model import DEFAULT, DEFAULTS, Constants
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.runtime import members
from fusedcomm.runtime.group import resolve
from fusedcomm.runtime.group_member import WorkspaceUnavailable, on_device

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
    """What rank 0 reports. ``failed`` says why no numbers are kept; ``constants`` is None where none came out."""

    failed: str = ""
    device: str = ""
    file: str = ""
    seconds: float = 0.0
    constants: Constants | None = None
    points: tuple[tune.Point, ...] = ()
    samples: tuple[tune.Sample, ...] = ()
    noise: float | None = None
    num_hosts: int = 0  # as `tuned.key` has it


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure this machine, so that the planner chooses by its numbers",
        description="Measures matmuls, links and collectives, which takes a minute, and keeps the numbers in the "
        "user's cache directory: they decide by which algorithm calls run, in programs that are started later with "
        "as many ranks, and on as many hosts where torchrun has started these on several. Prints them beside the "
        "default ones. Other programs must not run meanwhile: what a busy machine measures is not kept. Exit code: 0, "
        "1 if nothing was kept, 2 for wrong arguments.",
        epilog="example: fusedcomm tune && fusedcomm tune --show",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="measure fewer sizes and rounds (default: all)")
    what.add_argument(
        "--show", action="store_true", help="measure nothing: print the numbers in use and where they come from"
    )
    what.add_argument(
        "--reset",
        action="store_true",
        help="measure nothing: remove the measured numbers, so that default ones are used",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    console.add_rank_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device_type = args.device or world.default_device_type()
    world_size = world.world_size_of(args.world_size, device_type)
    if problem := _wrong_arguments(args, device_type, world_size):
        return console.fail("tune", problem, code=2)
    if args.show or args.reset:
        return _stored(args, device_type, world_size) if os.environ.get("LOCAL_RANK", "0") == "0" else 0
    if world.is_rank_0() and (problem := _cannot_keep()):
        return console.fail("tune", problem)
    try:
        with world.ranks(device_type, world_size, TIMEOUT_S) as call:
            result = call(_measure, device_type, args.quick)
    except (ValuesDiffer, RankError) as error:
        return console.fail("tune", world.message(error))
    if result is None:
        return 0
    if args.json and result.constants:
        console.write_json(args.json, report(result, device_type, world_size, args.quick))
    if result.failed:
        return console.fail("tune", result.failed)
    _print(result, world_size)
    return 0


def _wrong_arguments(args: argparse.Namespace, device_type: str, world_size: int) -> str | None:
    if problem := world.cannot_start(device_type, world_size, args.oversubscribe):
        return problem
    if world_size < 2:
        return f"--world-size must be at least 2, for one rank exchanges nothing, got {world_size}"
    if world.is_rank_0() and (problem := console.not_writable(args.json)):
        return f"--json {problem}"
    return None


def _cannot_keep() -> str | None:
    """Why what will be measured could not be written, found out before the work."""
    try:
        tuned.make_directory()
    except OSError as error:
        return f"cannot write {error.filename}: {error.strerror}; set FUSEDCOMM_CACHE_DIR to a directory of yours"
    return None


def _stored(args: argparse.Namespace, device_type: str, world_size: int) -> int:
    """Do what --show or --reset says, without ranks; on every host of a torchrun."""
    num_hosts = _torchruns_hosts()
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    out = console.stdout()
    with _threads_of_a_rank(device_type):
        try:
            file = tuned.path_of(tuned.key(device, world_size, num_hosts))
            removed = args.reset and tuned.remove(device, world_size, num_hosts)
        except OSError as error:
            return console.fail("tune", f"{error.filename}: {error.strerror}")
        if args.reset:
            out.print(f"{'removed' if removed else 'there was no'} {file}", soft_wrap=True)
            return 0
        constants = tuned.read(device, world_size, num_hosts)
    where = f"tuned numbers of {file}" if constants else f"default numbers: nothing usable in {file}"
    used = constants or DEFAULTS[device_type]
    out.print(f"{world_size} ranks, {device_type}: {where}", soft_wrap=True)
    console.show(_table(used, DEFAULTS[device_type]), out)
    if args.json:
        console.write_json(
            args.json,
            report(TuneResult(constants=used, file=file.name, num_hosts=num_hosts), device_type, world_size, False),
        )
    return 0


def _torchruns_hosts() -> int:
    """The hosts of a world that torchrun has started on several, as `tuned.key` counts them; else 0."""
    num_hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    return num_hosts if num_hosts > 1 else 0


@contextlib.contextmanager
def _threads_of_a_rank(device_type: str) -> Iterator[None]:
    """Inside, torch has as many threads as a rank: one on a CPU. The numbers are kept by that count."""
    before = torch.get_num_threads()
    if device_type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(rank: int, device_type: str, quick: bool) -> TuneResult:
    device = world.rank_device(device_type)
    ours = members.member(resolve(None)[1], device)
    start = time.perf_counter()
    try:
        if ours.unavailable is not None:
            raise WorkspaceUnavailable(ours.unavailable)
        with (
            console.progress(rank == 0, tune.NUM_PARTS, "measuring", "measured") as on_done,
            on_device(device),
        ):
            found = tune.tune(ours, quick, on_done)
    except WorkspaceUnavailable as reason:
        return TuneResult(failed=f"what calls can run here cannot be measured: {reason}")
    except Unreliable as reason:
        return TuneResult(failed=f"{reason}. {NOT_KEPT}")
    assert dist.group.WORLD is not None
    num_hosts, failed = tune.num_hosts_of(ours), ""
    key = tuned.key(device, ours.group_size, num_hosts)
    try:
        file = tuned.path_of(key)
        if why := tune.misfit(found.samples):
            failed = f"{why}; the noise was {found.noise:.0%}. {MISFIT}"
        else:
            file = tune.write_for_all(found.constants, device, dist.group.WORLD, num_hosts)
    except OSError as error:
        return TuneResult(failed=str(error))
    seconds = time.perf_counter() - start
    facts = (found.constants, found.points, found.samples, found.noise)
    return TuneResult(failed, key["device"], str(file), seconds, *facts, num_hosts)


def report(result: TuneResult, device_type: str, world_size: int, quick: bool) -> dict[str, Any]:
    """The JSON. Its units are seconds, bytes per second and FLOP per second."""
    assert result.constants is not None
    return {
        **run_facts(),
        "device": result.device,
        "device_type": device_type,
        "world_size": world_size,
        "hosts_without_workspace": result.num_hosts,
        "quick": quick,
        "seconds": result.seconds,
        "noise": result.noise,
        "file": Path(result.file).name,
        "digest": result.constants.digest,
        "constants": result.constants.to_json(),
        "points": [asdict(point) for point in result.points],
        "crossovers": [asdict(each) for each in crossovers(result.constants, world_size, result.num_hosts > 0)],
        "samples": [asdict(sample) for sample in result.samples],
        "right": sum(map(right, result.samples)),
    }


def right(sample: tune.Sample) -> bool:
    """Whether the estimates say which algorithm was the fastest."""
    return sample.chosen == min(sample.measured, key=sample.measured.__getitem__)


def _print(result: TuneResult, world_size: int) -> None:
    assert result.constants is not None
    out = console.stdout()
    hosts = f" on {result.num_hosts} hosts" if result.num_hosts > 1 else ""
    out.print(f"{world_size} ranks{hosts} ({result.device}), measured in {result.seconds:.0f} s", markup=False)
    console.show(_table(result.constants, DEFAULTS[result.constants.device_type]), out)
    out.print(f"noise: one matmul, measured again and again among the rest, differed by {result.noise:.0%}")
    good = sum(map(right, result.samples))
    out.print(f"of {len(result.samples)} small calls measured, the estimates name the fastest algorithm in {good}")
    k, n = CROSSOVER_K_N
    out.print(f"fastest by the estimates at K={k}, N={n}:")
    for op, lines in itertools.groupby(
        crossovers(result.constants, world_size, result.num_hosts > 0), lambda each: (each.op, each.dtype)
    ):
        out.print(f"  {' '.join(op)}: " + ", ".join(f"{each.algorithm} from {each.rows} rows" for each in lines))
    out.print(f"written to {result.file}", soft_wrap=True)
    like = (" and hosts" if hosts else "") + (" of one thread" if result.constants.device_type == "cpu" else "")
    out.print(f"programs started from now on with as many ranks{like} use them; fusedcomm tune --reset removes them")


def _table(constants: Constants, default: Constants) -> Table:
    before = dict(_flat(default))

    def column(head: str, about: str, values: Mapping[str, float]) -> Column:
        return Column(head, about, lambda name: f"{values[name] / _unit(name)[0]:.4g}")

    columns = [Column("number", "what the planner's estimates are made of", str, left=True)]
    if constants.source != DEFAULT:
        columns.append(column(constants.source, "measured on this machine, in use", dict(_flat(constants))))
    columns.append(column("default", "in use where nothing was measured", before))
    columns.append(Column("unit", "the unit of the numbers in the line", lambda name: _unit(name)[1], left=True))
    return Table(columns, list(before))


def _unit(name: str) -> tuple[float, str]:
    return next((each for suffix, each in UNITS.items() if suffix in name), (1, ""))


def _flat(constants: Constants) -> Iterator[tuple[str, float]]:
    for name, value in list(constants.to_json().items())[2:]:
        if isinstance(value, Mapping):
            yield from ((f"{name} {key}", each) for key, each in value.items())
        else:
            yield name, value
