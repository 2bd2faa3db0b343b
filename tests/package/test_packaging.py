"""What an installed fusedcomm is: cheap to import, complete, and usable without its native part."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python(code: str, *flags: str, **env: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_costs_little_on_top_of_torch() -> None:
    clock = "time.perf_counter()"
    code = f"import time, torch; t = {clock}; import fusedcomm; print({clock} - t)"
    assert any(float(python(code)) < 0.3 for _ in range(3))


def test_import_leaves_triton_dtensor_and_nvml_alone() -> None:
    code = "import sys, torch; a = set(sys.modules); import fusedcomm; print(*set(sys.modules) - a)"
    imported = python(code).split()
    assert "fusedcomm.algorithms.planner" in imported
    late = ("triton", "torch.distributed.tensor", "pynvml", "rich", "fusedcomm.kernels")
    assert not [m for m in imported if m.startswith(late)]


def test_kernels_are_imported_as_part_of_fusedcomm() -> None:
    """From the repository root a plain ``import kernels`` works too, but not once installed."""
    folders = ("fusedcomm", "kernels", "tests", "bench")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not [name for name in names if name.partition(".")[0] == "kernels"], path


def test_every_package_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [*(ROOT / "fusedcomm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in files}
    packages = {folder.replace("/", ".") for folder in folders}
    packages = {f"fusedcomm.{p}" if p.startswith("kernels") else p for p in packages}
    assert sorted(packages) == listed


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
def test_without_a_compiler_the_native_part_is_left_out_and_the_rest_works(tmp_path: Path) -> None:
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    for folder in ("fusedcomm", "kernels"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
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
        names = archive.namelist()
        archive.extractall(installed)
    assert not [name for name in names if name.endswith((".so", ".cpp"))]
    assert {"fusedcomm/py.typed", "fusedcomm/kernels/triton/push_matmul.py"} <= set(names)

    script = tmp_path / "run.py"
    script.write_text(RUN_WHEEL)
    # -S: a .pth file would add the checkout, if that is installed as editable
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    result = subprocess.run(
        [sys.executable, "-S", str(script)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[True, True]"
    assert result.stderr.count("runs unfused") == 2, result.stderr  # once a rank
