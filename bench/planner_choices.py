"""Does the planner pick the faster algorithm? Every one that can run, forced and interleaved, beside its choice.

    fusedcomm tune && python -m fusedcomm.bench.planner_choices [--quick] [--json FILE]

The shapes of the benches of the five ops, forward and decode, on 2 CPU ranks of one thread or, under torchrun, on GPUs.
Where fewer than nine of ten rounds agree on the fastest, four times as many rounds are measured anew and decide.

A choice is right if it is within 3 % of the fastest, as medians of one run differ by that much. The strict share, which
counts only choices that are the fastest, is printed too, and both for the default numbers. The goals are 90 % right,
and no choice that takes more than 1.15 times as long as the fastest.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist

from fusedcomm.algorithms import planner
from fusedcomm.bench.common import DTYPES, ms, tabulated
from fusedcomm.bench.estimates import exchange_of
from fusedcomm.bench.op_bench import OpBench, OpData
from fusedcomm.bench.op_programs import PROGRAMS
from fusedcomm.bench.ops import ALGORITHMS, DECODE_CALLS, SHAPE_COLUMNS, TIMEOUT_S, sizes_of
from fusedcomm.bench.timing import ValuesDiffer, check_values, measure_rounds
from fusedcomm.cost.model import DEFAULT, DEFAULTS, estimate
from fusedcomm.geometry.exchange import Exchange
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.runtime import members
from fusedcomm.runtime.group import resolve

EQUAL = 1.03
RIGHT, WORST = 0.9, 1.15
AGREED, MORE_ROUNDS = 0.9, 4


@dataclass(frozen=True)
class ChoiceRow:
    """One call: seconds by algorithm, measured and estimated; choices with the numbers in use and the default ones."""

    op: str
    rows: int
    k: int
    n: int
    dtype: str
    decode: bool
    numbers: str
    measured: dict[str, float]
    estimated: dict[str, float]
    choice: str
    default_choice: str

    def behind(self, choice: str) -> float:
        """Time of ``choice`` over that of the fastest."""
        return self.measured[choice] / min(self.measured.values())


def columns_of(names: Sequence[str]) -> list[Column]:
    """The columns of a table of what the algorithms ``names`` took."""

    def times(name: str) -> tuple[Column, Column]:
        measured = Column(f"{name}\nms", "measured", lambda row: ms(row.measured[name]), drop=1)
        return measured, Column(
            f"{name}\nestimate ms", "the planner's estimate", lambda row: ms(row.estimated[name]), drop=2
        )

    return [
        Column("op", "fusedcomm.<op>", lambda row: row.op, left=True),
        *SHAPE_COLUMNS,
        *itertools.chain.from_iterable(map(times, names)),
        Column("choice", "the planner's", lambda row: row.choice, left=True),
        Column(
            "choice /\nfastest",
            "time of the choice / that of the fastest; 1 is right",
            lambda row: f"{row.behind(row.choice):.2f}",
        ),
    ]


@dataclass(frozen=True)
class ChoiceSummary:
    """How good the choices with one set of numbers are."""

    numbers: str
    right: float  # the share of choices within EQUAL
    strict: float
    worst: float

    @staticmethod
    def of(numbers: str, behind: Sequence[float]) -> ChoiceSummary:
        right = statistics.fmean(ratio <= EQUAL for ratio in behind)
        return ChoiceSummary(numbers, right, statistics.fmean(ratio == 1 for ratio in behind), max(behind))

    @property
    def met(self) -> bool:
        return self.right >= RIGHT and self.worst <= WORST

    def __str__(self) -> str:
        goals = f"(goals {RIGHT:.0%} and {WORST}: {'' if self.met else 'not '}met)"
        return (
            f"{self.numbers:8s} numbers: right {self.right:.0%}, strictly {self.strict:.0%}, "
            f"at worst {self.worst:.2f} times the fastest {goals}"
        )


# In every rank


def measure_row(
    rank: int, bench: OpBench, size: MatmulSize, dtype: str, decode: bool, device_type: str, rounds: int
) -> ChoiceRow:
    device, num_ranks = world.rank_device(device_type), dist.get_world_size()
    if decode and bench.cut == "rows":
        size = replace(size, rows=size.rows * num_ranks)
    size = bench.divisible(size, num_ranks)
    data = OpData(bench, size, DTYPES[dtype], device)
    ours = members.member(resolve(None)[1], device)
    names = [name for name in ALGORITHMS[device_type] if name != "fused" or ours.topology.no_fused is None]
    check_values({name: data.forced(name) for name in names}, data.check)
    data.randomize()
    calls = DECODE_CALLS if decode else 1
    times = _decided({name: _repeated(data, name, calls) for name in names}, device, rounds)
    exchange = exchange_of(bench.op, size, num_ranks)
    name = planner.dtype_name(DTYPES[dtype], device_type == "cuda" and ours.topology.tf32)
    used = ours.topology.constants or DEFAULTS[device_type]
    estimates = estimate(bench.op, exchange, name, used)
    return ChoiceRow(
        *(bench.op, size.rows, size.k, size.n, dtype, decode, used.source),
        measured={name: seconds / calls for name, seconds in times.items()},
        estimated={name: estimates[name] for name in names},
        choice=data.plan().algorithm,
        default_choice=_default_plan(bench.op, exchange, dtype, ours),
    )


def _decided(variants: dict[str, Callable[[], None]], device: torch.device, rounds: int) -> dict[str, float]:
    """Medians, over more rounds where few do not settle which is the smallest; alike on all ranks."""
    seconds = measure_rounds(variants, device, rounds=rounds, warmup=2)
    table = torch.stack(list(seconds.values()))  # [variant, round]
    fastest = table.median(1).values.argmin()
    if float((table.argmin(0) == fastest).double().mean()) < AGREED:
        seconds = measure_rounds(variants, device, rounds=MORE_ROUNDS * rounds)
    return {name: float(each.median()) for name, each in seconds.items()}


def _repeated(data: OpData, algorithm: str, calls: int) -> Callable[[], None]:
    variant = data.forced(algorithm)

    def repeated() -> None:
        for _ in range(calls):
            variant()

    return repeated


def _default_plan(op: str, exchange: Exchange, dtype: str, ours: members.Member) -> str:
    untuned = replace(ours, topology=replace(ours.topology, constants=None))
    return planner.plan(op, exchange, DTYPES[dtype], untuned).algorithm


# In the process that prints


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    device_type = world.default_device_type()
    cases = [
        (decode, op, dtype, size)
        for decode, op, dtype in itertools.product((False, True), args.op, args.dtype)
        for size in sizes_of(PROGRAMS[op], "decode" if decode else "forward", args)
    ]
    rows: list[ChoiceRow] = []
    try:
        with (
            world.ranks(device_type, world.default_world_size(device_type), TIMEOUT_S) as call,
            tabulated(columns_of(ALGORITHMS[device_type]), rows, len(cases)) as add,
        ):
            for decode, op, dtype, size in cases:
                row = call(measure_row, PROGRAMS[op], size, dtype, decode, device_type, args.rounds)
                if world.is_rank_0():
                    add(row)
    except (ValuesDiffer, RankError) as error:
        print(f"planner_choices: {error}", file=sys.stderr)
        return 1
    if not world.is_rank_0():
        return 0
    found = summaries(rows)
    print(*found, sep="\n")
    if args.json:
        facts = {"rounds": args.rounds, "rows": [asdict(row) for row in rows], "summaries": [asdict(s) for s in found]}
        console.write_json(args.json, run_facts() | facts)
    return 0


def summaries(rows: Sequence[ChoiceRow]) -> list[ChoiceSummary]:
    numbers = rows[0].numbers
    found = [ChoiceSummary.of(numbers, [row.behind(row.choice) for row in rows])]
    if numbers != DEFAULT:
        found.append(ChoiceSummary.of(DEFAULT, [row.behind(row.default_choice) for row in rows]))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fusedcomm.bench.planner_choices", description="Values are checked first.")
    parser.add_argument("--quick", action="store_true", help="four shapes in place of all, of each op, dtype and mode")
    parser.add_argument("--op", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--shape", nargs=3, type=int, metavar=("ROWS", "K", "N"), action="append", help="these instead")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(batch=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
