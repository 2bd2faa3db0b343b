"""Random programs until enough calls have been compared, or the time is up; what fails can be replayed.

python -m tests.soak --device cpu --ranks 4 --calls 100000
torchrun --nproc-per-node 8 -m tests.soak --device cuda --seed 1 --seconds 600
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from random import SystemRandom

from fusedcomm.launch import console, world
from fusedcomm.launch.provenance import run_facts
from tests.soak.outcome import SoakOutcome
from tests.soak.random_program import NUM_STEPS
from tests.soak.soak_ranks import SoakRanks, command

RANKS = 4
REPORT_CALLS = 1000


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    size = int(os.environ["WORLD_SIZE"]) if world.under_torchrun() else args.ranks or RANKS
    device_type = args.device or ("cpu" if world.missing_gpus(size) else "cuda")
    if problem := _wrong_arguments(args, device_type, size):
        print(f"tests.soak: {problem}", file=sys.stderr)
        return 2
    ranks = SoakRanks(device_type, size)
    try:
        return _soak(ranks, args) if args.program is None else _replay(ranks, args)
    finally:
        ranks.close()


def _soak(ranks: SoakRanks, args: argparse.Namespace) -> int:
    seed = SystemRandom().randrange(1 << 32) if args.seed is None else args.seed
    start, total, index = time.time(), SoakOutcome(), 0
    _say(f"seed {seed}: {args.calls} calls in {ranks.size} ranks ({ranks.device_type})")
    while total.num_calls < args.calls and not total.late and not total.failures:
        before = total.num_calls
        total.add(ranks.run(seed, index, deadline=start + args.seconds))
        index += 1
        if total.num_calls // REPORT_CALLS > before // REPORT_CALLS:
            _say(f"{index} programs, {total.num_calls} calls, {time.time() - start:.0f} s")
    report = {"seed": seed, "programs": index, "world_size": ranks.size, "device": ranks.device_type}
    report |= {"calls": total.num_calls, "failures": list(map(str, total.failures)), "counts": total.tally}
    if args.json and world.is_rank_0():
        console.write_json(args.json, {**run_facts(), **report, "minutes": round((time.time() - start) / 60, 1)})
    if total.failures:
        return _failed(ranks, seed, index - 1, total)
    _say(f"nothing failed in {total.num_calls} calls, seed {seed}")
    return 0


def _failed(ranks: SoakRanks, seed: int, index: int, outcome: SoakOutcome) -> int:
    """Say what failed, and how it can be had again: a step alone has the inputs that it has among the others."""
    _tell(outcome)
    _say(f"again: {command(ranks.device_type, ranks.size, seed, index)}")
    return 1


def _replay(ranks: SoakRanks, args: argparse.Namespace) -> int:
    outcome = ranks.run(args.seed, args.program, args.steps)
    _tell(outcome)
    _say("failed" if outcome.failures else "nothing failed")
    return bool(outcome.failures)


def _tell(outcome: SoakOutcome) -> None:
    for failure in outcome.failures:
        _say(str(failure))


def _say(text: str) -> None:
    if world.is_rank_0():
        print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=console.positive, default=100_000, help="calls to compare, over all groups")
    seconds = "begin no further program after this time"
    parser.add_argument("--seconds", type=float, default=math.inf, help=seconds)
    parser.add_argument("--seed", type=int, help="of all programs; default: a new one, which is printed")
    parser.add_argument("--ranks", type=console.positive, metavar="N", help=f"ranks to start ({RANKS})")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="GPUs, if there is one for every rank")
    parser.add_argument("--json", metavar="FILE", help="also write what was run and found to FILE")
    parser.add_argument("--program", type=int, metavar="INDEX", help="run only this program of --seed again")
    parser.add_argument("--steps", type=_step_numbers, metavar="N,N,...", help="with --program: only these steps of it")
    return parser


def _wrong_arguments(args: argparse.Namespace, device_type: str, size: int) -> str | None:
    if args.ranks not in (None, size):
        return f"--ranks must be that of torchrun, {size}, got {args.ranks}"
    if size < 2:
        return f"there must be at least 2 ranks, got {size}"
    if device_type == "cuda" and (missing := world.missing_gpus(size)):
        return f"--device cuda: {missing}"
    if args.seed is None and (args.program is not None or world.under_torchrun()):
        return "--seed must be given with --program and under torchrun"
    return console.not_writable(args, "json")


def _step_numbers(text: str) -> list[int]:
    numbers = text.split(",")
    if not all(number.isdecimal() and int(number) < NUM_STEPS for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to {NUM_STEPS - 1} between commas, got {text!r}")
    return list(map(int, numbers))


if __name__ == "__main__":
    sys.exit(main())
