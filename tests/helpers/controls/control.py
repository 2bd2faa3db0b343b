"""One protection, how to switch it off, and a test that fails then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("fusedcomm", "kernels", "tests")
LIMIT_S = 240  # a protection against hangs that is off makes a hang


@dataclass(frozen=True)
class Control:
    file: str
    on: str  # this text stands once in the file
    off: str
    test: str

    def run(self) -> str | None:
        """Why this is no control, or None if the test has failed, and failed as a test and not in another way."""
        with tempfile.TemporaryDirectory(prefix="fusedcomm-control-") as folder:
            copy_sources(Path(folder))
            source = Path(folder, self.file)
            source.write_text(source.read_text().replace(self.on, self.off))
            if source.suffix in (".h", ".cpp"):
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", "temp"]
                subprocess.run(build, cwd=folder, check=True, capture_output=True)
            code, printed = run_tests(Path(folder), self.test)
        if code == 1 and "ImportError" not in printed:
            return None
        return f"{self.test} must fail without {self.on!r}, got exit code {code}:\n{printed[-2000:]}"


def copy_sources(folder: Path) -> None:
    for each in ROOT.iterdir():
        if each.name in COPIED:
            shutil.copytree(each, folder / each.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif each.name not in (".git", "build"):
            (folder / each.name).symlink_to(each)
    kernels = folder / "fusedcomm" / "kernels"
    kernels.unlink(missing_ok=True)  # some checkouts have one
    kernels.symlink_to(folder / "kernels")  # as package_dir maps it


def run_tests(folder: Path, *tests: str) -> tuple[int | None, str]:
    """pytest's exit code and what it printed; no code if it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S * len(tests)
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error)
    return done.returncode, done.stdout
