"""The ``fusedcomm`` command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import fusedcomm

COMMANDS = (
    "bench",
    "demo",
    "doctor",
    "explain",
    "faults",
    "postmortem",
    "selftest",
    "tune",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 with a message on stderr (2 for wrong arguments); of `explain` the script's."""
    parser = argparse.ArgumentParser(prog="fusedcomm", description="Matmuls fused with collectives for PyTorch.")
    parser.add_argument("--version", action="version", version=f"fusedcomm {fusedcomm.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:  # here, not above: what they import is not needed to import the package
        importlib.import_module(f"fusedcomm.cli.{name}").add_parser(commands)
    args = parser.parse_args(argv)
    return args.run(args)
