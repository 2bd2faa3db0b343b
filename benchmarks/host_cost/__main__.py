"""`make host-cost`: sets up what it needs below build/, checks what streams are given, and counts instructions.

A stock CUDA build of torch runs its own CUDA code and Triton its own launchers, down to a pretended runtime, cuBLAS and
driver that do nothing. So what is counted is Python, torch, Triton and this package; a real driver's part comes on top.
Two runs of one commit differ by at most 0.4 %. Microseconds are the least of many, and only a hint.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.host_cost import build

CALLS = 10  # of each row, as calls.py makes them
TORCH = "2.11.0"
MM, BACKWARD = "torch.mm", ", forward and backward"
MOST = {  # by row: what it may cost, as a multiple of torch.mm
    "fused matmul_all_to_all, torch.ops": 3,
    "fused matmul_all_to_all, public": 5,
    "fused matmul_all_to_all, public, inputs require grad": 6,
    "fused matmul_all_to_all, public, forward and backward": 2,
    "fused all_gather_matmul, torch.ops": 5,
    "chunked matmul_all_to_all, torch.ops": 8,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.host_cost", description="Instructions of the host for each call.")
    parser.add_argument("--torch", default=TORCH, help="a release whose wheel is a CUDA build (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if missing := build.missing():
        print(f"make host-cost needs Debian's packages {', '.join(missing)}: apt-get install {' '.join(missing)}")
        return 1
    folder = build.ROOT / f"build/host-cost-{sys.version_info[0]}.{sys.version_info[1]}-torch-{args.torch}"
    folder.mkdir(parents=True, exist_ok=True)
    environment = build.made(folder, args.torch)
    runs = {ranks: run(folder, environment, ranks) for ranks in args.ranks}
    report = next(iter(runs.values()))["facts"] | {"command": command(), "calls": CALLS}
    report["rows"] = [row for ranks, each in runs.items() for row in rows(ranks, each["instructions"], each["us"])]
    report["traces"] = {str(ranks): each["traces"] for ranks, each in runs.items()}
    print_table(report["rows"])
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        f"R = {r}, {each['case']}: {text}"
        for r, run in runs.items()
        for each in run["traces"]
        for text in each["wrong"]
    ]
    for text in wrong:
        print(text)
    print(f"what streams are given: {len(wrong)} defects in {sum(len(each['traces']) for each in runs.values())} cases")
    return int(bool(wrong))


def run(folder: Path, environment: dict[str, str], ranks: int) -> dict[str, Any]:
    """Without callgrind first, which fills Triton's cache: nothing is compiled under it."""
    program = (build.python(folder), "-m", "benchmarks.host_cost.calls", str(ranks))
    print(f"{ranks} ranks: the streams and the clock, then callgrind: minutes", flush=True)
    subprocess.run([*program, str(folder / "found.json")], cwd=build.ROOT, env=environment, check=True)
    for left in folder.glob("callgrind.*"):
        left.unlink()
    # The instructions of all threads are one sum: autograd has one for each device.
    options = ("--quiet", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'callgrind'}")
    counted = ("valgrind", *options, *program, str(folder / "counted.json"), "count")
    subprocess.run(counted, cwd=build.ROOT, env=environment, check=True)
    facts = json.loads((folder / "found.json").read_text())
    found = {"us": facts.pop("us"), "traces": facts.pop("traces"), "facts": facts}
    return found | {"instructions": instructions(folder)}


def instructions(folder: Path) -> dict[str, int]:
    """Instructions of one call, by row: callgrind writes a file for each."""
    found = {}
    for file in folder.glob("callgrind.*"):
        text = file.read_text()
        name, total = (
            re.search(r"^desc: Trigger: Client Request: (.*)", text, re.M),
            re.search(r"^totals: (\d+)", text, re.M),
        )
        if name is not None and total is not None:
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


def command() -> str:
    return shlex.join([os.path.basename(sys.executable), *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
