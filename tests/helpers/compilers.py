"""Processes that compile the Triton kernels, one for each architecture and version of Triton.

It is a minute's work of one core each. It begins with the test session, and gives way to all else that the machine
does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TRITON_36 = Path(sys.prefix) / "triton-3.6"
NICENESS = "10"
COMPILE = """
import sys
from pathlib import Path
from fusedcomm.testing import compile_only

compile_only.ARCHITECTURES = (int(sys.argv[2]),)
compile_only.main(Path(sys.argv[1]))
"""


class Target(NamedTuple):
    triton: str  # "installed" or "3.6"
    arch: int

    def __str__(self) -> str:
        return f"{self.triton}-sm_{self.arch}"

    def is_there(self) -> bool:
        return self.triton == "installed" or TRITON_36.is_dir()


TARGETS = [Target("installed", 80), Target("installed", 100), Target("3.6", 90)]
OTHERS = [Target("installed", 90), Target("3.6", 80), Target("3.6", 100)]


class Compiler:
    """Writes PTX and cubins into ``folder``, and what it found, a line of JSON for each kernel."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder = folder
        self.out, self.err = folder / "out", folder / "err"
        env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
        env.pop("TRITON_INTERPRET", None)
        if target.triton == "3.6":
            env["PYTHONPATH"] = os.pathsep.join([str(TRITON_36), env.get("PYTHONPATH", "")])
        command = ["nice", "-n", NICENESS, sys.executable, "-c", COMPILE, str(folder), str(target.arch)]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=err)

    def result(self, timeout_s: float) -> list[dict[str, Any]]:
        assert self.process.wait(timeout_s) == 0, self.err.read_text()
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


Compilers = dict[Target, Compiler]


def start(session: pytest.Session, factory: pytest.TempPathFactory) -> Compilers:
    """Start the compilers of all targets that the selected tests ask for."""
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    asked = {each["target"] for each in params if isinstance(each.get("target"), Target)}
    return {target: Compiler(factory.mktemp(str(target)), target) for target in asked if target.is_there()}
