"""Processes that compile the Triton kernels, one for each architecture and version of Triton.

It is one or two minutes' work of one core each, so one runs at a time: the next one beside the tests of the one before.
One worker of pytest-xdist has all files that need compiled kernels (tests/conftest.py).
"""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TRITON_36 = Path(sys.prefix) / "triton-3.6"
COMPILE = """
import sys
from pathlib import Path
from tests.helpers import compile_only

compile_only.ARCHITECTURES = (int(sys.argv[2]),)
compile_only.main(Path(sys.argv[1]))
"""

USED_BY = {f"tests/kernels/test_{each}.py" for each in ("compile_only", "launch_path", "ptx_order")}


class Target(NamedTuple):
    triton: str  # "installed" or "3.6"
    arch: int

    def __str__(self) -> str:
        return f"{self.triton}-sm_{self.arch}"

    def is_there(self) -> bool:
        return self.triton == "installed" or TRITON_36.is_dir()

    def env(self, folder: Path) -> dict[str, str]:
        """Environment of a process that keeps its kernels in ``folder``: a target is compiled once a session."""
        env = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
        env.pop("TRITON_INTERPRET", None)
        if self.triton == "3.6":
            env["PYTHONPATH"] = os.pathsep.join([str(TRITON_36), env.get("PYTHONPATH", "")])
        return env


# In CI both versions are there once, with tensor maps and without; sm_100 takes five minutes of a core, at night.
# `make test` compiles for none.
TARGETS = [Target("3.6", 80), Target("installed", 90)]
OTHERS = [target for each in product(("installed", "3.6"), (80, 90, 100)) if (target := Target(*each)) not in TARGETS]


class Compiler:
    """Writes PTX and cubins into ``folder``, and what it found, a line of JSON for each kernel."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.out, self.err = folder / "out", folder / "err"
        command = [sys.executable, "-c", COMPILE, str(folder), str(target.arch)]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(command, env=target.env(folder), stdout=out, stderr=err)

    def result(self, timeout_s: float) -> list[dict[str, Any]]:
        assert self.process.wait(timeout_s) == 0, self.err.read_text()
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Compilers:
    def __init__(self, session: pytest.Session, factory: pytest.TempPathFactory) -> None:
        params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
        asked = dict.fromkeys(each["target"] for each in params if isinstance(each.get("target"), Target))
        self._asked = [target for target in asked if target.is_there()]
        self._factory = factory
        self._folders: dict[Target, Path] = {}
        self._started: dict[Target, Compiler] = {}

    def folder(self, target: Target) -> Path:
        if target not in self._folders:
            self._folders[target] = self._factory.mktemp(str(target))
        return self._folders[target]

    def result(self, target: Target, timeout_s: float) -> list[dict[str, Any]]:
        self._start(target)
        found = self._started[target].result(timeout_s)
        for following in [each for each in self._asked if each not in self._started][:1]:
            self._start(following)
        return found

    def _start(self, target: Target) -> None:
        if target not in self._started:
            self._started[target] = Compiler(self.folder(target), target)

    def close(self) -> None:
        for compiler in self._started.values():
            compiler.close()
