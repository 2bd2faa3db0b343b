"""The ``fusedcomm`` command."""

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

import fusedcomm

OVERVIEW = """\
fusedcomm computes a matmul and the collective before or after it (all_to_all, all_gather,
reduce_scatter, all_reduce) as one PyTorch op, so that data travel while the matmul runs.
These commands check, measure and explain it on this machine.

They start one process (rank) per GPU, or 2 on CPU where there are fewer than 2 GPUs; started
by torchrun (torchrun --nproc-per-node 8 -m fusedcomm COMMAND) they run in its ranks."""
FIRST_STEPS = """\
first steps:
  fusedcomm doctor      Does this machine have what is needed?
  fusedcomm selftest    Are the results right here?
  fusedcomm demo        What is gained on one example?

fusedcomm COMMAND --help explains a command, its options and its exit codes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0, or 1 with a message on stderr (2 for wrong arguments); for `explain` the script's."""
    # These imports stand here because the package does not need these modules
    from fusedcomm.launch import world
    from fusedcomm.tools import bench, cache, demo, doctor, explain, postmortem, selftest, tune

    parser = argparse.ArgumentParser(
        prog="fusedcomm",
        description=OVERVIEW,
        epilog=FIRST_STEPS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"fusedcomm {fusedcomm.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND")
    for command in (doctor, selftest, demo, bench, tune, cache, explain, postmortem):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    with contextlib.nullcontext() if world.under_torchrun() else _exit_by_sigterm():
        return args.run(args)


@contextlib.contextmanager
def _exit_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that it first ends its ranks, also ones that are starting.

    Only the main thread may set a handler: a command that runs in another one leaves SIGTERM alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)  # None: set by C code
