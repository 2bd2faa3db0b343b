"""``fusedcomm cache``: compiled kernels in Triton's cache, and this machine's tuned numbers."""

import argparse
import itertools
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fusedcomm.kernels
from fusedcomm import env, files
from fusedcomm.bench.measure import DTYPES
from fusedcomm.bench.op_bench import PROGRAMS
from fusedcomm.launch import console
from fusedcomm.plan.cost import tuned

NUM_SMS = {80: 108, 90: 132, 100: 148}  # of A100, H100 and H200, B200


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "cache",
        help="show, warm or clear compiled kernels and tuned numbers",
        description="The first call of a kind compiles kernels into Triton's cache (TRITON_CACHE_DIR); fusedcomm tune "
        "writes numbers into FUSEDCOMM_CACHE_DIR. Exit code: 0, 1 for a failure, 2 for wrong arguments.",
        epilog="example: fusedcomm cache show",
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    what.add_parser("show", help="where they are, and how many", epilog="example: fusedcomm cache show")
    text = "compile the kernels of the five ops by fused, also for nn.Linear and where no GPU is; no others"
    warm = what.add_parser("warm", help=text, epilog="example: fusedcomm cache warm --shape 4096 4096 8192 --arch 90")
    warm.add_argument("--op", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), help="default: all five")
    shape = "the local matmul, [M, K] @ [K, N]; can be repeated"
    warm.add_argument(
        "--shape", nargs=3, type=console.positive, metavar=("M", "K", "N"), action="append", required=True, help=shape
    )
    warm.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    warm.add_argument("--world-size", type=console.positive, default=8, metavar="N", help="ranks (default: 8)")
    warm.add_argument("--arch", type=int, choices=NUM_SMS, help="compute capability times 10 (default: the GPU's here)")
    clear = what.add_parser("clear", help="remove them", epilog="example: fusedcomm cache clear --only kernels")
    clear.add_argument("--only", choices=("kernels", "numbers"), help="default: both")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        return {"show": _show, "warm": _warm, "clear": _clear}[args.what](args)
    except OSError as error:
        return console.fail("cache", f"{error.filename}: {error.strerror}")


def kernels() -> dict[Path, str]:
    """The folders of Triton's cache with a kernel of this package, whatever its version, and the kernel's name."""
    from triton import knobs

    sources = (Path(fusedcomm.kernels.__path__[0]) / "triton").glob("*.py")
    names = {name for file in sources for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
    found = [file for file in Path(knobs.cache.dir).glob("*/*.ttir") if file.stem in names]
    return {file.parent: file.stem for file in found if b"kernels/triton/" in file.read_bytes()}


def numbers() -> list[Path]:
    return sorted(env.cache_dir().glob("tuned-*.json"))


def _show(args: argparse.Namespace) -> int:
    from triton import knobs

    folders = kernels()
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    print(f"kernels: {len(folders)} compiled of {len(set(folders.values()))}, {size >> 10} KiB, in {knobs.cache.dir}")
    print(f"numbers: {len(numbers())} files, in {env.cache_dir()}")
    for file in numbers():
        try:
            key = json.loads(files.read_own(file, tuned.MAX_BYTES))["key"]
            text = f"{key['world_size']} ranks, {key['device']}, torch {key['torch']}, Triton {key['triton']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            text = f"not readable: {error}"
        print(f"  {file.name}: {text}")
    return 0


def _warm(args: argparse.Namespace) -> int:
    from triton import knobs

    from fusedcomm.bench.gpu_check import compile_kernels
    from fusedcomm.bench.gpu_check.gpu_calls import GpuCall, GpuCase

    if os.environ.get("TRITON_INTERPRET") == "1":
        return console.fail("cache", "TRITON_INTERPRET=1 compiles nothing: unset it", code=2)
    if args.arch:
        target = compile_kernels.Target(args.arch, args.arch, NUM_SMS[args.arch])
    elif torch.cuda.is_available():
        target = compile_kernels.target_of(torch.device("cuda"))
    else:
        return console.fail("cache", "no GPU is here: name its architecture, as in --arch 90", code=2)
    if uneven := [size for shape in args.shape for size in shape if size % args.world_size]:
        return console.fail("cache", f"sizes must be multiples of --world-size, got {uneven[0]}", code=2)
    before = len(kernels())
    for op, (m, k, n), linear in itertools.product(args.op, args.shape, (False, True)):
        rows = m * args.world_size if op == "all_to_all_matmul" else m
        dims = {"gather_dim": int(op == "all_to_all_matmul"), "scatter_dim": int(op == "matmul_all_to_all")}
        case = GpuCase(op, "warm", (rows, k), (n,), **dims, bias=linear, transposed=linear)
        call = GpuCall(args.world_size, DTYPES[args.dtype], case)
        compile_kernels.compile_job(partial(call.group, compile_kernels.META, shares_gpu=False), target)
    print(f"sm_{target.arch}: {len(kernels()) - before} kernels compiled, into {knobs.cache.dir}")
    return 0


def _clear(args: argparse.Namespace) -> int:
    folders = {} if args.only == "numbers" else kernels()
    removed = [] if args.only == "kernels" else numbers()
    for folder in folders:
        shutil.rmtree(folder)
    for file in removed:
        file.unlink()
    print(f"removed: {len(folders)} kernels, {len(removed)} files of numbers")
    return 0
