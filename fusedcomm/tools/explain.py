"""``fusedcomm explain``: a script under the passes of `fusedcomm.compile`, and the outcome for its collectives."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch.distributed as dist

from fusedcomm.launch import console, world
from fusedcomm.launch.ranks import end_with_parent

if TYPE_CHECKING:
    from fusedcomm.compile.reports import CollectiveReport, CompileReport


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="run a script; say which of its compiled collectives are fused, or why not",
        description="Runs a script that calls torch.compile, with fusedcomm.compile.enable() before it, in ranks that "
        "it starts or in those of torchrun. Prints a table of what became of every collective in the script's graphs. "
        "Exit code: the script's, or 2 for wrong arguments.",
        epilog="example: fusedcomm explain --nproc 2 train.py --steps 3",
    )
    parser.add_argument(
        "--nproc", type=console.positive, metavar="N", help="ranks to start (default: a GPU each, or 2)"
    )
    console.add_oversubscribe(parser)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)  # for the ranks that this command starts
    parser.add_argument("--json", metavar="FILE", help="also write all fields of every line to FILE, as JSON")
    parser.add_argument("script", metavar="script.py", help="the script to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if world.is_rank_0() and (problem := _wrong_arguments(args)):
        return console.fail("explain", problem, code=2)
    if not world.under_torchrun():
        return _start_ranks(args)
    if args.parent is not None:
        end_with_parent(args.parent)
    json_file = Path(args.json).absolute() if args.json else None  # the script may change the directory
    with _enabled() as reports, _printed(reports, json_file) if world.is_rank_0() else contextlib.nullcontext():
        _run_script(args.script, args.script_args)
    return 0


def _num_ranks(args: argparse.Namespace) -> int:
    return world.world_size_of(args.nproc, world.default_device_type())


def _wrong_arguments(args: argparse.Namespace) -> str | None:
    if problem := world.bare_srun():
        return problem
    if not (world.under_torchrun() or args.oversubscribe):
        problem = world.too_many("--nproc", _num_ranks(args), 2, device_type=world.default_device_type())
        if problem:
            return problem
    for name, mode in ((args.script, "r"), (args.json, "a")):
        try:
            if name:
                open(name, mode).close()
        except OSError as error:
            return f"{name}: {error.strerror}"
    return None


def _start_ranks(args: argparse.Namespace) -> int:
    """Run this command in every rank of torchrun. Returns the exit code of the rank that failed first, or 0."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set this too, but say so at length
    options = ["--standalone", f"--nproc-per-node={_num_ranks(args)}", "--module", "fusedcomm", "explain"]
    options += ["--parent", str(os.getpid()), *(["--json", args.json] if args.json else [])]
    try:
        torchrun.run(torchrun.parse_args([*options, args.script, *args.script_args]))
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


@contextlib.contextmanager
def _enabled() -> Iterator[list[CompileReport]]:
    """Inside, every compiled graph goes through the passes. Yields their reports."""
    # These imports stand here because Inductor takes seconds to import
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    import fusedcomm.compile
    from fusedcomm.compile.reports import keep_reports

    # A graph from these caches would not go through the passes. Caches of generated code stay on: they save minutes.
    inductor_config.fx_graph_cache = inductor_config.fx_graph_remote_cache = False
    functorch_config.enable_autograd_cache = functorch_config.enable_remote_autograd_cache = False
    reports = keep_reports()
    fusedcomm.compile.enable()
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_after_plans(*args: Any, **kwargs: Any) -> None:
        for line in _lines(reports):
            if line.call is not None:
                line.call.plan()  # the plan is remembered; it cannot be found out once the group is destroyed
        destroy(*args, **kwargs)

    with mock.patch.object(dist, "destroy_process_group", destroy_after_plans):
        yield reports


@contextlib.contextmanager
def _printed(reports: list[CompileReport], json_file: Path | None) -> Iterator[None]:
    """Print the table of all reports at the end, however the script ends."""
    from fusedcomm.compile.reports import CompileReport

    # torchrun ends all ranks when one has failed
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that the table is printed whole
        lines = _lines(reports)
        sys.stdout.flush()
        nothing = "no graph with a collective was compiled: there is nothing to fuse"
        console.show(CompileReport(lines) if lines else nothing)
        if json_file is not None:
            console.write_json(str(json_file), [_fields(line) for line in lines])


def _run_script(script: str, args: list[str]) -> None:
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _lines(reports: list[CompileReport]) -> list[CollectiveReport]:
    return [line for report in reports for line in report.collectives]


def _fields(line: CollectiveReport) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(line) if field.name != "call"]
    return {**{name: getattr(line, name) for name in names}, "plan": line.plan}
