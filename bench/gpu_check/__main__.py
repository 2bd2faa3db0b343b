"""The command: it runs the parts, prints each result as it comes, and sums up."""

import argparse
import datetime
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fusedcomm.bench.gpu_check
from fusedcomm.bench.gpu_check import results as committed
from fusedcomm.bench.gpu_check import speeds
from fusedcomm.bench.gpu_check.check_parts import HALVES, PARTS, asked, budget_s
from fusedcomm.bench.gpu_check.driver import PartResult, run_parts

LISTED = "failed", "skipped", "not_run"  # cases
MOST_SPOKEN = 300  # characters of a result that the terminal shows; the file has all of it


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    parts = asked(args.only, args.device)
    seconds = args.seconds or budget_s(parts, args.device)
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    with open(args.json or "/dev/null", "w") as file:

        def write(line: dict[str, Any]) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()
            if (text := spoken(line)) is not None:
                print(text, flush=True)

        given = sys.argv[1:] if argv is None else argv
        named = [Path(each).name if Path(each) == args.json else each for each in given]
        command = shlex.join(["python", "-m", "fusedcomm.bench.gpu_check", *named])
        run = {"command": command, "date": now, "device": args.device, "budget_s": seconds}
        write({"run": run})
        with tempfile.TemporaryDirectory() as cache:  # proofs are this run's own
            os.environ["FUSEDCOMM_CACHE_DIR"] = cache
            results = run_parts(parts, args.device, seconds, write)
        recorded = committed.record(results, run)
        write({"summary": summary(results, recorded)})
    if args.json:
        args.json.with_name(committed.file_name(recorded)).write_text(committed.text(recorded))
    return 0 if all(result.status == "passed" for result in results) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m fusedcomm.bench.gpu_check", description=fusedcomm.bench.gpu_check.__doc__, formatter_class=about
    )
    names = [*HALVES, *(part.name for part in PARTS)]
    written = "write lines of JSON to FILE as they come, and beside it what is to be committed to bench/results"
    parser.add_argument("--json", metavar="FILE", type=Path, help=written)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", metavar="PART", nargs="+", choices=names, default=[*HALVES], help=", ".join(names))
    parser.add_argument("--seconds", type=float, help="for all parts (default: 380 for each half)")
    args = parser.parse_args(argv)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    return args


def spoken(line: dict[str, Any]) -> str | None:
    """The visible part of a line."""
    if "summary" in line:
        return _closing(line["summary"])
    if "case" in line:
        if line.get("skipped"):
            what = f"skipped: {line['skipped']}"
        else:
            what = f"ok {json.dumps(line.get('found'))[:MOST_SPOKEN]}" if line["ok"] else f"FAILED {line.get('error')}"
        return f"  {line['part']}: {line['case']}: {what}"
    if "part" in line:
        return "\n".join([f"{line['part']}: {line['status']} after {line['seconds']} s", *line["problems"]])
    return None


def summary(results: Sequence[PartResult], recorded: dict[str, Any]) -> dict[str, Any]:
    """The run's findings, with the GPU, its driver, versions, commit and command."""
    return {
        "command": recorded["run"]["command"],
        "machine": recorded["machine"],
        "parts": recorded["parts"],
        **{each: [f"{result.part}/{name}" for result in results for name in getattr(result, each)] for each in LISTED},
        "speeds": speeds.lines(committed.found_in(recorded["cases"])),
        "compared": committed.compared(recorded),
    }


def _closing(found: dict[str, Any]) -> str:
    lines = ["", *(f"{part:16s}{status}" for part, status in found["parts"].items())]
    for name in LISTED:
        lines += [f"{name.replace('_', ' ')}: {', '.join(found[name])}"] if found[name] else []
    return "\n".join([*lines, "", *found["speeds"], "", *found["compared"]])


if __name__ == "__main__":
    sys.exit(main())
