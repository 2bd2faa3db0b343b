"""The ``fusedcomm`` command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import fusedcomm


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 with a message on stderr (2 for wrong arguments); of `explain` the script's."""
    # Here, not above: what they import is not needed to import the package
    from fusedcomm.cli import bench, demo, doctor, explain, faults, postmortem, selftest, tune

    parser = argparse.ArgumentParser(prog="fusedcomm", description="Matmuls fused with collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedcomm {fusedcomm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (bench, demo, doctor, explain, faults, postmortem, selftest, tune):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    return args.run(args)
