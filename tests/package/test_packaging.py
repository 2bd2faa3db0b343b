"""What an installed fusedcomm is: cheap to import, complete, of one version, and usable without its native part."""

import ast
import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import fusedcomm

ROOT = Path(__file__).parents[2]


def python(code: str, *flags: str, **env: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_costs_little_on_top_of_torch() -> None:
    clock = "time.process_time()"  # wall-clock time would be longer on a busy machine
    code = f"import time, torch; t = {clock}; import fusedcomm; print({clock} - t)"
    assert any(float(python(code)) < 0.3 for _ in range(3))


def test_import_leaves_triton_dtensor_and_nvml_alone() -> None:
    code = "import sys, torch; a = set(sys.modules); import fusedcomm; print(*set(sys.modules) - a)"
    imported = python(code).split()
    assert "fusedcomm.algorithms.planner" in imported
    late = ("triton", "torch.distributed.tensor", "pynvml", "rich", "fusedcomm.kernels")
    assert not [m for m in imported if m.startswith(late)]


def test_kernels_are_imported_as_part_of_fusedcomm() -> None:
    """A plain ``import kernels`` works from the repository root too, but not once fusedcomm is installed."""
    folders = ("fusedcomm", "kernels", "tests", "benchmarks", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [name for name in names if name.partition(".")[0] == "kernels"], path


def test_dir_shows_the_public_names_only() -> None:
    assert [name for name in dir(fusedcomm) if not name.startswith("__")] == sorted(fusedcomm.__all__)
    assert {"__all__", "__doc__", "__file__", "__version__"} <= set(dir(fusedcomm))
    assert not [name for name in fusedcomm.__all__ if not hasattr(fusedcomm, name)]
    assert fusedcomm.runtime.members.close is fusedcomm.close  # submodules stay reachable


def test_the_command_tells_the_version() -> None:
    command = [sys.executable, "-m", "fusedcomm", "--version"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout == f"fusedcomm {fusedcomm.__version__}\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the wheel that a machine without a C++ compiler builds."""
    source, wheels, installed = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "installed"))
    for folder in ("fusedcomm", "kernels"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "kernels")  # a checkout may have a link to kernels/
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    options = ("--quiet", "--no-build-isolation", "--no-deps", "--no-index")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(wheels), str(source)],
        env=os.environ | {"CXX": "/nonexistent/c++"},
        check=True,
        timeout=120,
    )
    (wheel,) = wheels.iterdir()
    assert "none-any" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return installed


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in that folder, without the checkout: -S, as a .pth file would add the checkout of an editable
    install.
    """
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    result = subprocess.run(
        [sys.executable, "-S", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=installed,
    )
    assert result.returncode == 0, result.stderr
    return result


def module_files() -> set[str]:
    """Every Python file of the checkout that a wheel must have, by its name there."""
    paths = [*(ROOT / "fusedcomm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    return {f"fusedcomm/{file}" if file.startswith("kernels/") else file for file in files}


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


def test_every_module_is_in_the_wheel_and_imports_there(installed: Path) -> None:
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert {file for file in files if file.endswith(".py")} == module_files()
    assert "fusedcomm/py.typed" in files
    assert not [file for file in files if file.endswith((".so", ".cpp", ".h"))]
    names = sorted(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in module_files())
    imported = run_installed(installed, "-c", IMPORT_ALL, *names).stdout.splitlines()
    assert {Path(file).relative_to(installed).as_posix() for file in imported} == module_files()


def test_the_metadata_of_the_wheel(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert metadata["Version"] == fusedcomm.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    classifiers = metadata.get_all("Classifier", [])
    assert not [each for each in classifiers if each.startswith("License ::")]  # a license expression must stand alone
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)}
    assert versions == {each for each in classifiers if ":: 3." in each}


RUN_WHEEL = """
import importlib.util, logging, torch, fusedcomm
from fusedcomm.testing import run_ranks

def multiply(rank):
    x = torch.full((4, 8), rank + 1.0)
    for _ in range(2):
        y = fusedcomm.matmul_all_to_all(x, torch.ones(8, 6), 0, 1)
    assert y.shape == (8, 3) and y[:4].eq(8).all() and y[4:].eq(16).all()
    return importlib.util.find_spec("fusedcomm.kernels.cpu.native") is None

if __name__ == "__main__":
    print(run_ranks(multiply, 2))
"""


@pytest.mark.thorough
def test_without_a_compiler_the_native_part_is_left_out_and_the_rest_works(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(RUN_WHEEL)
    result = run_installed(installed, str(script))
    assert result.stdout.strip() == "[True, True]"
    assert result.stderr.count("runs unfused") == 2, result.stderr  # once a rank
