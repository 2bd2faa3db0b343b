"""What an installed fusedcomm is: cheap to import, complete, of one version, and usable without its native part."""

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import fusedcomm
from fusedcomm import tools

ROOT = Path(__file__).parents[2]
NO_COMPILER = "/nonexistent/c++"


def python(code: str, *flags: str, **env: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    result = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120, cwd="/")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_costs_little_on_top_of_torch() -> None:
    clock = "time.process_time()"  # wall-clock time would be longer on a busy machine
    code = f"import time, torch; t = {clock}; import fusedcomm; print({clock} - t)"
    assert any(float(python(code)) < 0.4 for _ in range(5))


def test_import_leaves_triton_dtensor_and_nvml_alone() -> None:
    code = "import sys, torch; a = set(sys.modules); import fusedcomm; print(*set(sys.modules) - a)"
    imported = python(code).split()
    assert "fusedcomm.plan.planner" in imported
    late = ("triton", "torch.distributed.tensor", "pynvml", "rich", "fusedcomm.kernels")
    plain = {f"fusedcomm.kernels{name}" for name in ("", ".triton", ".triton.bundles", ".native_part")}
    native = {f"fusedcomm.kernels.cpu{name}" for name in ("", ".native", ".sources")}
    assert not [m for m in imported if m.startswith(late) and m not in plain | native]


def test_dir_shows_the_public_names_only() -> None:
    assert [name for name in dir(fusedcomm) if not name.startswith("__")] == sorted(fusedcomm.__all__)
    assert {"__all__", "__doc__", "__file__", "__version__"} <= set(dir(fusedcomm))
    assert not [name for name in fusedcomm.__all__ if not hasattr(fusedcomm, name)]
    assert fusedcomm.memory.members.close is fusedcomm.close  # submodules stay reachable


def test_the_command_tells_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tools.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fusedcomm {fusedcomm.__version__}\n")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a fresh clone that an installation reads."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("fusedcomm", "kernels", "bench"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "kernels")  # a checkout may have a link to kernels/
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for file in ("pyproject.toml", "setup.py", "build_backend.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    return source


def pip(command: str, *arguments: str, flags: tuple[str, ...] = (), cxx: str = NO_COMPILER) -> str:
    """What ``pip install --no-build-isolation .``, or ``pip wheel``, prints without a network."""
    options = ("--verbose", "--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check")
    result = subprocess.run(
        [sys.executable, "-m", "pip", *flags, command, *options, *arguments],
        env=os.environ | ({"CXX": cxx} if cxx else {}),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the wheel that a machine without a C++ compiler builds."""
    wheels, installed = (tmp_path_factory.mktemp(name) for name in ("wheels", "installed"))
    pip("wheel", "--wheel-dir", str(wheels), str(source))
    (wheel,) = wheels.iterdir()
    assert wheel.name == f"fusedcomm-{fusedcomm.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return installed


def run_installed(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in that folder, without the checkout, which a .pth file of an editable install would add: -S."""
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
    paths = [path for folder in ("fusedcomm", "kernels", "bench") for path in (ROOT / folder).rglob("*.py")]
    files = [path.relative_to(ROOT).as_posix() for path in paths]
    return {file if file.startswith("fusedcomm/") else f"fusedcomm/{file}" for file in files}


IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    print(importlib.import_module(name).__file__)
"""


@pytest.mark.thorough
def test_every_module_is_in_the_wheel_and_imports_there(installed: Path) -> None:
    files = {path.relative_to(installed).as_posix() for path in installed.rglob("*")}
    assert {file for file in files if file.endswith(".py")} == module_files()
    assert "fusedcomm/py.typed" in files
    assert not [file for file in files if file.endswith((".so", ".cpp", ".h"))]
    names = sorted(file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in module_files())
    imported = run_installed(installed, "-c", IMPORT_ALL, *names).stdout.splitlines()
    assert {Path(file).relative_to(installed).as_posix() for file in imported} == module_files()


def test_a_source_distribution_has_all_that_a_build_reads(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"import build_backend; build_backend.build_sdist({str(tmp_path)!r})"]
    subprocess.run(command, cwd=source, env=os.environ | {"CXX": NO_COMPILER}, check=True, capture_output=True)
    (file,) = tmp_path.iterdir()
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kinds = (".py", ".cpp", ".h")
    paths = [path for folder in ("fusedcomm", "kernels", "bench") for path in (source / folder).rglob("*.*")]
    read = {path.relative_to(source).as_posix() for path in paths if path.suffix in kinds}
    assert read | {"build_backend.py", "setup.py", "pyproject.toml"} <= names


def test_the_metadata_of_the_wheel(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert (metadata["Name"], metadata["Version"]) == ("fusedcomm", fusedcomm.__version__)
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert set(metadata.get_all("Provides-Extra", [])) == {"dev", "models"}
    requires = {each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each}
    names = {re.split(r"\W", each.replace("-", "_"))[0] for each in requires}
    assert names == {"torch", "triton", "numpy", "nvidia_ml_py", "rich"}
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert (folder / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    versions = {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)}
    assert versions == {each for each in metadata.get_all("Classifier", []) if ":: 3." in each}


SETUPTOOLS = "fusedcomm needs setuptools >= 77 to be built, got none: pip install 'setuptools>=77'\n"


def test_a_build_says_in_one_line_which_setuptools_it_needs(tmp_path: Path) -> None:
    (tmp_path / "setuptools.py").write_text("raise ModuleNotFoundError")  # Python 3.12 puts none into a venv
    command = [sys.executable, "-c", "import build_backend"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (1, SETUPTOOLS)
    assert 'requires = ["setuptools>=77"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.thorough
def test_a_native_part_built_for_another_torch_is_refused_with_both_versions() -> None:
    """It would load: the sizes of classes and the order of their virtual functions are all that differs."""
    release = torch.__version__.rpartition(".")[0]
    versions = ["2.99.1+cpu", f"{release}.99+cu130"]  # a patch release changes neither
    found = "import torch; torch.__version__ = {!r}; from fusedcomm.memory import topology; print(topology.no_native())"
    refused, loaded = (python(found.format(version)).strip() for version in versions)
    how = "pip install --no-build-isolation with torch and a C++ compiler builds it"
    assert re.sub(rf"torch {release}\.\d+,", "torch ...,", refused) == (
        f"the native part of fusedcomm cannot be loaded (built for torch ..., got 2.99.1+cpu); {how}"
    )
    assert loaded == "None"


def test_a_native_part_built_from_other_sources_is_not_used() -> None:
    """It may lack what Python asks of it: a checkout that has moved on runs unfused until it is built again."""
    changed = (
        "import sys, types; digest = types.SimpleNamespace(digest=lambda: 'another'); "
        "sys.modules['fusedcomm.kernels.cpu.sources'] = digest; "
        "from fusedcomm.memory import topology; print(topology.no_native())"
    )
    assert "(built from other sources than the checkout has now); pip install" in python(changed)


MULTIPLY = """
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


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", ["", NO_COMPILER], ids=["compiler", "no compiler"])
def test_installed_into_a_venv_it_runs_and_says_once_that_there_is_no_native_part(
    source: Path, compiler: str, tmp_path: Path
) -> None:
    there = tmp_path / "venv"
    venv.create(there)
    (purelib,) = there.glob("lib/python*/site-packages")
    (purelib / "torch.pth").write_text(sysconfig.get_path("purelib"))  # torch and setuptools, but not the checkout
    printed = pip("install", str(source), flags=("--python", str(there / "bin/python")), cxx=compiler)
    assert printed.count("native is left out, ops on CPU will run unfused: no C++ compiler") == bool(compiler)
    script = tmp_path / "run.py"
    script.write_text(MULTIPLY)
    command = [str(there / "bin/python"), str(script)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.stdout.strip() == str([bool(compiler)] * 2), result.stderr
    assert result.stderr.count("runs unfused") == 2 * bool(compiler), result.stderr  # once a rank
