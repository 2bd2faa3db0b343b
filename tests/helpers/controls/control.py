"""One protection, how to switch it off, and a test that fails then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("fusedcomm", "kernels", "bench", "tests")
LIMIT_S = 240  # a protection against hangs that is off makes a hang


@dataclass(frozen=True)
class Control:
    file: str
    on: str  # this text stands once in the file
    off: str
    test: str

    @property
    def is_native(self) -> bool:
        return self.file.endswith((".h", ".cpp"))

    def run(self, sources: Sources) -> str | None:
        """The reason why this is no control, None if its test has failed as a test and not in another way."""
        with sources.changed(self.file, self.on, self.off):
            sources.build(self.is_native)
            code, printed = run_tests(sources.folder, self.test)
        if code == 1 and "ImportError" not in printed:
            return None
        return f"{self.test} must fail without {self.on!r}, got exit code {code}:\n{printed[-2000:]}"


class Sources:
    """A copy of the sources for one control after another. A build compiles what has changed since the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._built_changed = False
        copy_sources(folder)

    @contextmanager
    def changed(self, file: str, old: str, new: str) -> Iterator[None]:
        path = self.folder / file
        text = path.read_text()
        path.write_text(text.replace(old, new))
        try:
            yield
        finally:
            path.write_text(text)

    def build(self, native_changed: bool) -> None:
        if not (native_changed or self._built_changed):
            return
        self._built_changed = native_changed
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", "temp"]
        tools = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}  # ninja
        subprocess.run(command, cwd=self.folder, env=tools, check=True, capture_output=True)


def copy_sources(folder: Path) -> None:
    for each in ROOT.iterdir():
        if each.name in COPIED:
            shutil.copytree(each, folder / each.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif each.name not in (".git", "build"):
            (folder / each.name).symlink_to(each)


def run_tests(folder: Path, *tests: str) -> tuple[int | None, str]:
    """pytest's exit code and what it printed; no code if it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        env.pop(name, None)
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S * len(tests)
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error)
    return done.returncode, done.stdout
