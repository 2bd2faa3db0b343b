"""The process of a part: its cases, one after the other, each reported before the next begins.

A part is a module of this folder with ``cases(device, *arguments)``, a dict of functions by name. It also runs by
itself: ``python -m fusedcomm.bench.gpu_check.child programs``. It reports lines of JSON:

    {"cases": [name, ...]}                                                      once
    {"begun": name}                                                             before each case
    {"case": name, "ok": true, "seconds": 1.2, "compiled": 0, "found": ...}     after it; or "skipped" with the reason
    {"case": name, "ok": false, "error": ..., "traceback": ..., "poisoned": whether the CUDA context is lost}
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from fusedcomm.launch.ranks import end_with_parent

Cases = dict[str, Callable[[], Any]]

TIMEOUT_S = 10  # bound of every wait between ranks
MOST_TRACEBACK = 4000  # characters
COMPILED = ("compile_kernels",)  # without a GPU too, where the kernels of others run in Triton's interpreter


class Skipped(Exception):
    """The case cannot run here; its text says why."""


def main() -> None:
    """Run the cases of a part that follow ``--after``, and end this process: with 1 if one of them failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="+", help="its module, and what that takes")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--after", metavar="CASE", help="begin behind this case")
    parser.add_argument("--report", type=int, metavar="FD", help="the driver's pipe (default: stdout)")
    args = parser.parse_args()
    if args.report is not None:
        end_with_parent(os.getppid())
        os.set_inheritable(args.report, False)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # with a GPU's memory mapped, a core file takes minutes
    name, *arguments = args.part
    set_environment(args.device == "cpu" and name not in COMPILED)
    part, device = importlib.import_module(f"fusedcomm.bench.gpu_check.{name}"), torch.device(args.device)
    with open(sys.stdout.fileno() if args.report is None else args.report, "w", closefd=False) as file:

        def report(line: dict[str, Any]) -> None:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()

        passed = run(part.cases(device, *arguments), args.after, device, report)
    sys.exit(0 if passed else 1)


def set_environment(interpret: bool) -> None:
    """Settings that must precede CUDA's start and the kernels' definitions."""
    os.environ.pop("TRITON_INTERPRET", None)
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ["FUSEDCOMM_TIMEOUT_S"] = str(TIMEOUT_S)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # a hardware queue for each stream
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")  # several ranks on one GPU


def run(cases: Cases, after: str | None, device: torch.device, report: Callable[[dict[str, Any]], None]) -> bool:
    """Run the cases behind ``after``; whether all passed. A lost context ends the run, as nothing works after it."""
    names = list(cases)
    report({"cases": names})
    compiled = _compilations()
    passed = True
    for name in names if after is None else names[names.index(after) + 1 :]:
        report({"begun": name})
        before = len(compiled)
        result = outcome(cases[name], device)
        report({"case": name, **result, "compiled": len(compiled) - before})
        passed = passed and result["ok"]
        if result.get("poisoned"):
            return False
    return passed


def outcome(case: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    start = time.monotonic()

    def seconds() -> float:
        return round(time.monotonic() - start, 2)

    try:
        found = case()
        _synchronize(device)
        return {"ok": True, "seconds": seconds(), "found": found}
    except Skipped as reason:
        return {"ok": True, "seconds": seconds(), "skipped": str(reason)}
    except Exception as error:
        return {
            "ok": False,
            "seconds": seconds(),
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc()[-MOST_TRACEBACK:],
            "poisoned": _is_poisoned(device),
        }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _is_poisoned(device: torch.device) -> bool:
    """Whether the context is lost: an illegal address, say, comes back from every later call."""
    try:
        _synchronize(device)
    except Exception:
        return True
    return False


def _compilations() -> list[str]:
    """The kernels that this process compiles from now on, because no cache had them."""
    compiled: list[str] = []

    def listen(**facts: Any) -> None:
        if not facts["cache_hit"]:
            compiled.append(str(facts["src"]))

    with contextlib.suppress(ImportError):
        from triton import knobs

        knobs.compilation.listener = listen
    return compiled


if __name__ == "__main__":
    from fusedcomm.bench.gpu_check import child  # not this copy of it, whose Skipped no part raises

    child.main()
