"""A stock CUDA build of torch in a folder, without CUDA: the libraries that it needs are pretended. Standard library
only, as torch cannot be imported before this is done.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("pretended_cuda.c"), ROOT / "tests/helpers/fake_libcuda.c"
FOLDER = "HOST_COST_FOLDER"  # the environment variable that tells processes of it
NATIVE = "fusedcomm.kernels.cpu.native"
PROGRAMS = {  # by name: the Debian package that has it
    "cc": "gcc",
    "c++": "g++",
    "readelf": "binutils",
    "valgrind": "valgrind",
}
_PINNED = re.compile(r"(torch|triton|setuptools|numpy)==")  # in constraints.txt, for another torch
_OF_CUDA = re.compile(r"nvidia-|cuda-")
_NVIDIAS = re.compile(r"lib(cu|nv|nccl)")


def missing() -> list[str]:
    """Debian packages of programs and headers that are not installed."""
    found = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    header: dict[str, Any] = {"input": "#include <valgrind/callgrind.h>", "check": False}
    if "gcc" not in found and _run("cc", "-E", "-xc", "-", **header) == "failed":
        found.add("valgrind")
    return sorted(found)


def made(folder: Path, torch: str) -> dict[str, str]:
    """The environment of processes in which ``torch`` and this checkout run on pretended GPUs."""
    environment = _installed(folder, torch)
    _linked(folder)
    environment |= {
        FOLDER: str(folder),
        "LD_PRELOAD": str(folder / "lib/libcuda.so.1"),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FUSEDCOMM_CACHE_DIR": str(folder / "cache"),
        "PYTHONHASHSEED": "0",  # dicts of strings take as many steps in every run
        "PYTHONPATH": str(ROOT),
    }
    _compiled(folder, environment)
    return environment


def python(folder: Path) -> str:
    return str(folder / "venv/bin/python")


def native_file(folder: Path) -> Path | None:
    """The native part for the folder's torch, if it could be built."""
    return next(folder.glob("native/fusedcomm/kernels/cpu/native.*.so"), None)


def _installed(folder: Path, torch: str) -> dict[str, str]:
    """torch, what it needs but CUDA's libraries, and CUDA's headers. Returns the environment, without settings."""
    unset = ("FUSEDCOMM_", "TRITON_", "PYTORCH_", "TORCH", "CUDA_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    environment["PATH"] = f"{folder / 'venv/bin'}:{environment['PATH']}"
    if (folder / "installed").exists():
        return environment
    print(f"installing torch {torch} into {folder}: it downloads 0.8 GB", flush=True)
    _run(sys.executable, "-m", "venv", "--clear", folder / "venv")
    pins = folder / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if not _PINNED.match(line)))
    pip = (python(folder), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", pins)
    _run(*pip, "--no-deps", f"torch=={torch}")
    packages = _packages(folder)
    (metadata,) = packages.glob("torch-*.dist-info/METADATA")
    needed = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    _run(*pip, *(each for each in needed if not _OF_CUDA.match(each)), "setuptools>=77", "numpy", "rich", "ninja")
    cuda = next((found[1] for each in needed if (found := re.match(r"cuda-toolkit.*==(\d+\.\d+)", each))), None)
    if cuda is None:
        sys.exit(f"torch {torch} must be a CUDA build here, but needs no CUDA")
    _run(*pip, "--no-deps", "--target", folder / "headers", f"nvidia-cuda-runtime=={cuda}.*")
    # Extension modules, torch's among them, are bound as they are called: most of CUDA is never called.
    (packages / "lazy.pth").write_text("import os, sys; sys.setdlopenflags(os.RTLD_LAZY)\n")
    (folder / "installed").touch()
    return environment


def _linked(folder: Path) -> None:
    """folder/lib: the pretended libcuda.so.1, and empty libraries in place of the others that torch was linked with."""
    packages = _packages(folder)
    (folder / "lib").mkdir(exist_ok=True)
    for name, versions in _needed(packages / "torch/lib").items():
        script = folder / "lib/versions"
        script.write_text("".join(f"{version} {{ }};\n" for version in sorted(versions)))
        options = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={script}"] if versions else [])]
        _run("cc", "-shared", "-nostdlib", "-xc", "/dev/null", *options, "-o", folder / "lib" / name)
    (runtime,) = folder.glob("headers/nvidia/cu*/include")
    includes = [f"-I{each}" for each in (runtime, packages / "triton/backends/nvidia/include")]
    options = ["-w", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *includes]
    _run("cc", *options, "-o", folder / "lib/libcuda.so.1", *SOURCES, "-ldl")


def _packages(folder: Path) -> Path:
    (found,) = folder.glob("venv/lib/*/site-packages")
    return found


def _needed(libraries: Path) -> dict[str, set[str]]:
    """NVIDIA's libraries that these were linked with, and the versions of symbols that they want of each."""
    needed: dict[str, set[str]] = {}
    for library in libraries.glob("*.so*"):
        wanted = ""
        for line in _run("readelf", "--dynamic", "--version-info", "--wide", library).splitlines():
            if found := re.search(r"\(NEEDED\).*\[(.*)\]|Version: 1  File: (\S+)", line):
                wanted = found[1] or found[2]
                needed.setdefault(wanted, set())
            elif wanted and (found := re.search(r"  Name: (\S+)", line)):
                needed[wanted].add(found[1])
    return {name: versions for name, versions in needed.items() if _NVIDIAS.match(name)}


def _compiled(folder: Path, environment: dict[str, str]) -> None:
    digest = runpy.run_path(str(ROOT / "kernels/cpu/sources.py"))["digest"]()
    stamp = folder / "native/digest"
    if stamp.exists() and stamp.read_text() == digest:
        return
    print("compiling the native part for it: minutes", flush=True)
    shutil.rmtree(folder / "native", ignore_errors=True)
    options = f"--build-lib={folder / 'native'}", f"--build-temp={folder / 'objects'}"
    _run(python(folder), "setup.py", "--quiet", "build_ext", *options, env=environment)
    if native_file(folder) is None:
        print("it could not be built, so calls are measured without it", flush=True)
    else:
        stamp.write_text(digest)


def _run(*command: str | Path, check: bool = True, **options: Any) -> str:
    """Standard output; of a command that may fail (``check``), "failed" if it has. Errors are shown if they matter: pip
    would tell that torch has no CUDA libraries.
    """
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, **options)
    if check and done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return "failed" if done.returncode else done.stdout
