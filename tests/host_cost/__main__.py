"""`make host-cost`: sets up torch and pretended GPUs below build/, checks the work on streams, and counts instructions.

    python tests/host_cost [--ranks R ...] [--torch VERSION] [--json FILE]

A script of the standard library alone: the Python that runs it needs no torch. A stock CUDA build of torch runs its own
CUDA code and Triton its own launchers, down to a pretended runtime, cuBLAS and driver that do nothing. Counted are
Python, torch, Triton and this package; a real driver's part comes on top. Two runs of one commit differ by at most
0.4 %. Microseconds are the least of many, and only a hint.
"""

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).with_name("pretended_cuda.c"), ROOT / "tests/helpers/fake_libcuda.c"
PROGRAMS = {"cc": "gcc", "c++": "g++", "readelf": "binutils", "valgrind": "valgrind"}  # and Debian's package of each
CALLS = 10  # of each row, as calls.py makes them
TORCH = "2.11.0"
MM, BACKWARD = "torch.mm", ", forward and backward"
MOST = {  # by row: bound of its cost, as a multiple of torch.mm
    "fused matmul_all_to_all, torch.ops": 3,
    "fused matmul_all_to_all, public": 5,
    "fused matmul_all_to_all, public, inputs require grad": 6,
    "fused matmul_all_to_all, public, forward and backward": 2,
    "fused all_gather_matmul, torch.ops": 5,
    "chunked matmul_all_to_all, torch.ops": 8,
}
_PINNED = re.compile(r"(torch|triton|setuptools|numpy)==")  # in constraints.txt, for another torch
_OF_CUDA = re.compile(r"nvidia-|cuda-")
_NVIDIAS = re.compile(r"lib(cu|nv|nccl)")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests/host_cost", description="Instructions of each call.")
    parser.add_argument("--torch", default=TORCH, help="a release whose wheel is a CUDA build (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if absent := missing():
        print(f"make host-cost needs Debian's packages {', '.join(absent)}: apt-get install {' '.join(absent)}")
        return 1
    folder = ROOT / f"build/host-cost-{sys.version_info[0]}.{sys.version_info[1]}-torch-{args.torch}"
    folder.mkdir(parents=True, exist_ok=True)
    environment = made(folder, args.torch)
    runs = {ranks: run(folder, environment, ranks) for ranks in args.ranks}
    command = shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]])
    report = next(iter(runs.values()))["facts"] | {"command": command, "calls": CALLS}
    report["rows"] = [row for ranks, each in runs.items() for row in rows(ranks, each["instructions"], each["us"])]
    report["traces"] = {str(ranks): each["traces"] for ranks, each in runs.items()}
    print_table(report["rows"])
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    cases = [(ranks, case) for ranks, each in runs.items() for case in each["traces"]]
    wrong = [f"R = {ranks}, {case['case']}: {text}" for ranks, case in cases for text in case["wrong"]]
    print(*wrong, f"what streams are given: {len(wrong)} defects in {len(cases)} cases", sep="\n")
    return int(bool(wrong))


def run(folder: Path, environment: dict[str, str], ranks: int) -> dict[str, Any]:
    """Without callgrind first, which fills Triton's cache: nothing is compiled under it."""
    program = (python(folder), "-m", "tests.host_cost.calls", str(ranks))
    print(f"{ranks} ranks: the streams and the clock, then callgrind: minutes", flush=True)
    subprocess.run([*program, str(folder / "found.json")], cwd=ROOT, env=environment, check=True)
    for left in folder.glob("callgrind.*"):
        left.unlink()
    # The instructions of all threads are one sum: autograd has one for each device.
    options = ("--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'callgrind'}")
    counted = ("valgrind", *options, *program, str(folder / "counted.json"), "count")
    subprocess.run(counted, cwd=ROOT, env=environment, check=True)
    facts = json.loads((folder / "found.json").read_text())
    found = {"us": facts.pop("us"), "traces": facts.pop("traces"), "facts": facts}
    return found | {"instructions": instructions(folder)}


def instructions(folder: Path) -> dict[str, int]:
    """Instructions of one call, by row: callgrind writes a file for each."""
    found = {}
    for file in folder.glob("callgrind.*"):
        text = file.read_text()
        name = re.search(r"^desc: Trigger: Client Request: (.*)", text, re.M)
        if name and (total := re.search(r"^totals: (\d+)", text, re.M)):
            found[name[1]] = int(total[1]) // CALLS
    return found


def rows(ranks: int, counts: dict[str, int], us: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {
            "ranks": ranks,
            "name": name,
            "instructions": counts[name],
            "over_mm": round(counts[name] / counts[MM + BACKWARD if name.endswith(BACKWARD) else MM], 2),
            "most": MOST.get(name),
            "us": us[name],
        }
        for name in us
    ]


def print_table(found: Sequence[dict[str, Any]]) -> None:
    print(f"{'instructions of a call':58s}{'R':>3s}{'thousands':>11s}{'torch.mm':>10s}{'at most':>9s}{'us':>8s}")
    for row in found:
        most = "" if row["most"] is None else f"{row['most']}{'' if row['over_mm'] <= row['most'] else ' (no)'}"
        figures = f"{row['ranks']:3d}{row['instructions'] / 1e3:11.1f}{row['over_mm']:10.2f}{most:>9s}{row['us']:8.1f}"
        print(f"{row['name']:58s}{figures}")
    print("torch.mm: multiples of it; with a backward of its own forward and backward")


def missing() -> list[str]:
    """Debian packages of programs and headers that are not installed."""
    found = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    header: dict[str, Any] = {"input": "#include <valgrind/callgrind.h>", "check": False}
    if "gcc" not in found and _run("cc", "-E", "-xc", "-", **header) == "failed":
        found.add("valgrind")
    return sorted(found)


def made(folder: Path, torch: str) -> dict[str, str]:
    """The environment that makes ``torch`` and this checkout run on pretended GPUs."""
    environment = _installed(folder, torch)
    _linked(folder)
    environment |= {
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


def _installed(folder: Path, torch: str) -> dict[str, str]:
    """Install torch, its needs without CUDA's libraries, and CUDA's headers. Returns the environment."""
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
    shutil.copy(Path(__file__).with_name("its_native_part.py"), packages)
    (packages / "lazy.pth").write_text("import os, sys, its_native_part; sys.setdlopenflags(os.RTLD_LAZY)\n")
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
    if not any(folder.glob("native/fusedcomm/kernels/cpu/native.*.so")):
        print("it could not be built, so calls are measured without it", flush=True)
    else:
        stamp.write_text(digest)


def _run(*command: str | Path, check: bool = True, **options: Any) -> str:
    """Standard output; of a command that may fail (``check``), "failed" if it has. Errors are shown only if they end
    this: pip would tell that torch has no CUDA libraries.
    """
    done = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True, **options)
    if check and done.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return "failed" if done.returncode else done.stdout


if __name__ == "__main__":
    sys.exit(main())
