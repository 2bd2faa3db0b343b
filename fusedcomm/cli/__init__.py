"""The ``fusedcomm`` command."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence

import fusedcomm


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 with a message on stderr (2 for wrong arguments); of `explain` the script's."""
    # Here, not above: what they import is not needed to import the package
    from fusedcomm.cli import bench, demo, doctor, explain, faults, postmortem, selftest, tune
    from fusedcomm.launch import world

    parser = argparse.ArgumentParser(prog="fusedcomm", description="Matmuls fused with collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedcomm {fusedcomm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (bench, demo, doctor, explain, faults, postmortem, selftest, tune):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    with contextlib.nullcontext() if world.under_torchrun() else _exit_by_sigterm():
        return args.run(args)


@contextlib.contextmanager
def _exit_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as an exception does, so that it first ends its ranks, those that are starting too."""

    def exit(signum: int, frame: object) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
