"""The parts of `make nightly`.

    python -m tests.nightly [PART ...] [--night N] [--json FILE]

runs the named parts, or all but ``cuda`` and ``torch``. Long parts take several nights, some of their tests in each.
Each part has a log beside FILE, and two lines of JSON in it: one when it begins and one when it ends, so that an
aborted night leaves what it has found.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from fusedcomm.launch.provenance import run_facts
from tests.helpers.negative_controls import TESTS as CONTROLS

ROOT = Path(__file__).parents[1]
JSON_FILE = ROOT / "build/nightly.jsonl"
PYTEST = (sys.executable, "-m", "pytest", "-v", "-n", "2", "--max-worker-restart", "0")
NIGHTLY = (*PYTEST, "-m", "nightly")
FAULTS = "tests/tools/test_fault_matrix.py"
SOAK, SANITIZERS = "tests/tools/test_soak.py", "tests/memory/test_sanitizers.py"
SOAK_CALLS = ("--device", "cpu", "--ranks", "4", "--seconds", "420")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
KILLED_AFTER_S = 10  # of an interrupt that pytest turns into a summary

Command = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    limit_s: int
    commands: tuple[Command, ...]
    nights: int = 1


def pytest_part(limit_s: int, *paths: str, without: Sequence[str] = (), nights: int = 1) -> Part:
    return Part(limit_s, ((*NIGHTLY, *paths, *(f"--ignore={path}" for path in without)),), nights)


PARTS = {
    "calls": pytest_part(720, *(f"tests/{each}" for each in ("ops", "nn", "parallel", "plan", "run"))),
    "graphs": pytest_part(720, "tests/compile", "tests/redistribution"),
    "launches": pytest_part(660, "tests/kernels", nights=3),
    "ranks": pytest_part(360, "tests/memory", "tests/protocol", "tests/symm_mem", without=[SANITIZERS]),
    "faults": pytest_part(520, FAULTS, nights=3),
    "controls": pytest_part(440, *CONTROLS, nights=12),  # native ones compile, 45 s each
    "commands": pytest_part(620, "tests/tools", "tests/package", without=[FAULTS, *CONTROLS, SOAK], nights=2),
    "soak": Part(560, ((*NIGHTLY, SOAK), (sys.executable, "-m", "tests.soak", *SOAK_CALLS))),
    "sanitizers": pytest_part(420, SANITIZERS, nights=2),
    "models": Part(980, (("make", "models"), (*PYTEST, "tests/models"))),
    "cuda": Part(5400, (("make", "host-cost"),)),  # torch's own CUDA code without a GPU
    "torch": Part(3600, (("make", "test-torch"),)),  # TORCH=2.15.0 in the environment
}
ALONE = ("cuda", "torch")  # download gigabytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.nightly", description="The parts of `make nightly`.")
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"all but {', '.join(ALONE)}, or of {', '.join(PARTS)}"
    )
    parser.add_argument("--night", type=int, default=date.today().toordinal(), help="default: the day's number")
    parser.add_argument("--json", type=Path, default=JSON_FILE, help="lines are added to this file")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"PART must be one of {', '.join(PARTS)}, got {', '.join(unknown)}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [
        run(name, args.json, args.night) for name in args.parts or [name for name in PARTS if name not in ALONE]
    ]
    return int(any(outcome != "passed" for outcome in outcomes))


def run(name: str, json_file: Path, night: int) -> str:
    part, log = PARTS[name], json_file.with_name(f"nightly-{name}.log")
    option = (f"--night={night % part.nights}/{part.nights}",) * (part.nights > 1)
    write(json_file, {**run_facts(), "part": " ".join((name, *option)), "outcome": "began"})
    start = time.monotonic()
    with log.open("w") as out:
        outcome = "passed"
        for command in part.commands:
            if outcome == "passed":
                outcome = outcome_of((*command, *option), out, start + part.limit_s)
    text = log.read_text()
    found: dict[str, Any] = {"part": name, "outcome": outcome, "seconds": round(time.monotonic() - start)}
    found |= {kind: int(count) for count, kind in COUNTS.findall(text.rpartition("\n=")[2])}
    found["failures"] = sorted({line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))})
    write(json_file, found)
    return outcome


def outcome_of(command: Command, out: Any, end: float) -> str:
    process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return "passed" if process.wait(max(0.0, end - time.monotonic())) == 0 else "failed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(KILLED_AFTER_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return "out of time"


def write(json_file: Path, line: dict[str, Any]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    with json_file.open("a") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
