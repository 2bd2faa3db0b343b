"""``fusedcomm bench``: the ops on this machine, over sizes. Columns: docs/benchmark.md."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from fusedcomm.bench import bench_moe, bench_plain, common, decode, overhead, table, trace
from fusedcomm.bench.measure import (
    ALGORITHMS,
    DTYPES,
    OpRow,
    Options,
    measure_op,
    rank_data,
    rank_facts,
    size_of,
    variants,
)
from fusedcomm.bench.op_bench import AUTO, BASELINE, MATMULS, PROGRAMS
from fusedcomm.bench.scaled_bench import BENCHES, RECIPES
from fusedcomm.bench.timing import METHOD, ValuesDiffer
from fusedcomm.launch import console, world
from fusedcomm.launch.console import positive
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError
from fusedcomm.ops.whole_group import MatmulSize

ROUND_S = 60  # for one round of a size, at most
GPU_SCALE = 4  # times larger is every side of the default sizes
OURS = "fusedcomm"
_OTHERS: dict[str, tuple[Any, str, str]] = {  # by name: module, what it measures, an example of options
    "overhead": (overhead, "what a call costs, hot and cold, on CPU ranks", "--op matmul_all_to_all --pass forward"),
    "plain": (bench_plain, "the collectives without a matmul beside the backend's own", "--op all_reduce"),
    "moe": (bench_moe, "moe_dispatch and moe_combine beside all_to_all_single and sorts", "--tokens 2048"),
    "decode": (decode, "matmul, all_reduce, residual and RMSNorm from one row on", "--rows 1 16 --hidden 4096"),
}
EXIT_CODES = "Exit code: 0, 1 for wrong values or a rank that failed, 2 for wrong arguments."


@dataclass
class BenchResults:
    """Rank 0's results of the whole run."""

    rows: list[OpRow] = field(default_factory=list)
    traces: dict[str, trace.Trace] = field(default_factory=dict)  # by op
    facts: dict[str, Any] = field(default_factory=dict)  # known to the ranks alone


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the ops, over sizes",
        description="Measures ops of fusedcomm beside what users have today, on GPUs or on CPU "
        "ranks of one thread. Checks all values first, then prints times of the slowest rank side by side. "
        f"fusedcomm bench WHAT --help has the options. {EXIT_CODES}",
        epilog="example: fusedcomm bench ops --json result.json",
    )
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    arguments = _op_arguments()
    for name in (*PROGRAMS, "ops"):
        text = "all five ops" if name == "ops" else f"against {PROGRAMS[name].baseline_text}"
        describe = {"help": text, "description": f"Measures {name}, {text}, and prints a table. {EXIT_CODES}"}
        example = f"example: fusedcomm bench {name} -b 1M -e 64M --dtype bfloat16"
        what.add_parser(name, **describe, epilog=example, parents=[arguments])
    for name, (module, text, options) in _OTHERS.items():
        describe = {"help": text, "description": f"Measures {text}, and prints tables. {EXIT_CODES}"}
        module.add_arguments(what.add_parser(name, **describe, epilog=f"example: fusedcomm bench {name} {options}"))
    parser.set_defaults(run=run)


def _op_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    sizes = parser.add_argument_group("sizes in bytes (64K, 1M, 1G), as nccl-tests has them")
    text = "smallest size exchanged (default: sizes that the command chooses)"
    sizes.add_argument("-b", "--minbytes", type=console.size_in_bytes, metavar="BYTES", help=text)
    text = "largest size exchanged (default: the smallest)"
    sizes.add_argument("-e", "--maxbytes", type=console.size_in_bytes, metavar="BYTES", help=text)
    text = "from size to size (default: 2)"
    sizes.add_argument("-f", "--stepfactor", type=_factor, default=2.0, metavar="F", help=text)
    common.add_arguments(parser, rounds=9)
    add = parser.add_argument
    add("--warmup", "-w", type=positive, default=2, metavar="N", help="rounds before them (default: 2)")
    add("--check", action="store_true", help="check every measured call too (default: before timing)")
    add("--graph", action="store_true", help="replay CUDA graphs, on GPUs only (default: call the ops)")
    text = "x is [ROWS, K], w is [K, N]; can be repeated (default: four corners of few and many rows, K and N)"
    add("--shape", nargs=3, type=positive, metavar=("ROWS", "K", "N"), action="append", help=text)
    add("-K", type=positive, help="K of sizes given in bytes (default: 1024, or 4096 where K is exchanged)")
    add("-N", type=positive, help="N of sizes given in bytes (default: 4096, or 1024 where K is exchanged)")
    add("--batch", type=positive, default=0, metavar="B", help="x is [B, rows / B, K] (default: 0, x is [rows, K])")
    text = "what is measured (default: forward)"
    add("--pass", dest="direction", nargs="+", choices=tuple(MATMULS), default=["forward"], help=text)
    text = "on float8 values, of these recipes (default: both); --dtype is then the result's"
    add("--scaled", nargs="*", choices=RECIPES, help=text)
    text = "how the ops run (default: auto, the planner's choice)"
    add("--algorithm", nargs="+", choices=ALGORITHMS, default=[AUTO], help=text)
    add("--trace", metavar="FILE", help="also write a trace of all ranks for Perfetto: the last size of each op")
    return parser


def run(args: argparse.Namespace) -> int:
    if args.what in _OTHERS:
        return _OTHERS[args.what][0].run(args)  # type: ignore[no-any-return]
    device_type, world_size, problem = world.asked_for(args)
    if problem := problem or _wrong_arguments(args, device_type, world_size):
        return console.fail("bench", problem, code=2)
    given = {name: getattr(args, name) for name in ("rounds", "warmup", "check", "graph")}
    options = Options(device_type, **given, algorithms=tuple(args.algorithm))
    results, code = BenchResults(), 0
    try:
        with world.ranks(device_type, world_size, ROUND_S * (args.rounds + args.warmup), trace.QUIET) as call:
            _measure_all(args, options, call, results)
    except (ValuesDiffer, RankError) as error:
        code = console.fail("bench", world.message(error))
    if world.is_rank_0() and results.rows:  # also after a failure, with the sizes before it
        _write(args, options, results)
    return code


def _wrong_arguments(args: argparse.Namespace, device_type: str, world_size: int) -> str | None:
    """The fault of the arguments, or None; else it would come up in the ranks, or after all is measured."""
    if args.graph and device_type == "cpu":
        return "--graph replays CUDA graphs: it needs --device cuda, got cpu"
    if args.graph and "backward" in args.direction:
        return "--graph captures a forward, alone or with its backward: got --pass backward"
    if args.scaled is not None and args.direction != ["forward"]:
        return f"--scaled ops have no gradients: got --pass {' '.join(args.direction)}"
    if args.maxbytes and args.maxbytes < (args.minbytes or args.maxbytes + 1):
        return f"--maxbytes must be at least --minbytes, got {args.minbytes} to {args.maxbytes}"
    if problem := _too_small(args, common.dtypes_of(args), world_size):
        return problem
    if args.shape and args.minbytes:
        return "--shape and --minbytes both say the sizes: give one of them"
    return console.not_writable(args, "json", "trace")


def _too_small(args: argparse.Namespace, dtypes: Sequence[str], world_size: int) -> str | None:
    """Why the first size is too small to be exchanged, for instance "3" where "3M" was meant, or None."""
    for op, dtype in itertools.product(_ops(args), dtypes if args.minbytes else ()):
        bench = BENCHES[op]
        smallest = bench.divisible(size_of(op, 1, *_k_n(args, op), args.batch, dtype), world_size)
        if args.minbytes < (least := bench.exchanged_bytes(smallest, DTYPES[dtype])):
            got = f"got {args.minbytes}; K, M and G stand for 1024 bytes and so on"
            return f"--minbytes must be at least {least}, the smallest size of {op} in {dtype} here, {got}"
    return None


def _measure_all(args: argparse.Namespace, options: Options, call: world.CallRanks, results: BenchResults) -> None:
    here, out = world.is_rank_0(), console.stdout()
    tables: list[console.Table] = []
    dtypes = common.dtypes_of(args)
    for op in _ops(args):
        rows: list[OpRow] = []
        for each in _calls(args, op, dtypes, options):
            found = call(*each) or []
            rows += found
            results.rows += found  # at once: later calls can fail
        if args.trace:
            *_, (_, _, size, dtype, direction, _) = _calls(args, op, dtypes, options)
            traced = call(record_op, op, size, dtype, direction, options)
            results.traces |= {op: traced} if here else {}
        if here:
            tables.append(table.table(rows, op))
            console.show(tables[-1], out)
    results.facts = call(rank_facts, options.device_type) or {}
    if here:
        _print_end(out, tables, results.rows, options)


def _calls(args: argparse.Namespace, op: str, dtypes: Sequence[str], options: Options) -> Iterator[tuple[Any, ...]]:
    """Every rank's call for each size, (function, *arguments)."""
    for dtype, direction in itertools.product(dtypes, args.direction):
        for size in _sizes(args, op, dtype, options.device_type):
            yield measure_op, op, size, dtype, direction, options


def _ops(args: argparse.Namespace) -> Sequence[str]:
    ops = tuple(PROGRAMS) if args.what == "ops" else (args.what,)
    if args.scaled is None:
        return ops
    return [f"scaled_{op}, {recipe}" for op in ops for recipe in args.scaled or RECIPES]


def _k_n(args: argparse.Namespace, op: str) -> tuple[int, int]:
    return (args.K or 4096, args.N or 1024) if BENCHES[op].gathers else (args.K or 1024, args.N or 4096)


def _sizes(args: argparse.Namespace, op: str, dtype: str, device_type: str) -> list[MatmulSize]:
    bench = BENCHES[op]
    if args.shape:
        return [MatmulSize(rows, k, n, args.batch) for rows, k, n in args.shape]
    if sweep := _sweep(args):
        return [size_of(op, num_bytes, *_k_n(args, op), args.batch, dtype) for num_bytes in sweep]
    scale = 1 if device_type == "cpu" else GPU_SCALE
    return [MatmulSize(rows, k, n, args.batch) for rows, k, n in bench.corners(scale)]


def _sweep(args: argparse.Namespace) -> list[int]:
    if args.minbytes is None:
        return []
    sizes, num_bytes = [], float(args.minbytes)
    while num_bytes <= (args.maxbytes or args.minbytes):
        sizes.append(int(num_bytes))
        num_bytes *= args.stepfactor
    return sizes


def record_op(rank: int, op: str, size: MatmulSize, dtype: str, direction: str, options: Options) -> trace.Trace:
    """Trace one call of the baseline and one of the op under the profiler, in every rank."""
    data = rank_data(op, size, dtype, direction, options.device_type)
    every = variants(data, options.algorithms[:1])
    chosen = {BASELINE: every[BASELINE], OURS: every[options.algorithms[0]]}
    for variant in chosen.values():  # the first call of a shape makes memory and loads kernels
        variant()
    return trace.record(chosen, data.device)


def _print_end(out: Console, tables: Sequence[console.Table], rows: Sequence[OpRow], options: Options) -> None:
    if lines := table.summary(rows):
        tables = [*tables, console.Table(table.SUMMARY_COLUMNS, lines, has_legend=False)]
        console.show(tables[-1], out)
    console.show(console.Legend(tables), out)
    on_cpu = "CPU ranks of one thread; only ratios within one run mean anything"
    where = f"{rows[0].group_size} {on_cpu if options.device_type == 'cpu' else 'GPUs'}"
    checked = "of every call" if options.check else "before timing"
    out.print(f"{where}. Values checked {checked}; median of {options.rounds} rounds, slowest rank")
    for plan in {(row.op, row.algorithm): row.plan for row in rows}.values():
        out.print(f"plan of the last size: {plan}", markup=False)


def _write(args: argparse.Namespace, options: Options, results: BenchResults) -> None:
    if args.json:
        console.write_json(args.json, report(args.what, options, results))
    if args.trace:
        console.write_json(args.trace, trace.joined(list(results.traces.values())))


def report(what: str, options: Options, results: BenchResults) -> dict[str, Any]:
    """The JSON: every figure and its conditions. Times in seconds, bandwidths in GB/s."""
    settings = {name: value for name, value in vars(options).items() if name != "algorithms"}
    return run_facts() | {
        "what": what,
        "settings": settings | {"algorithms": list(options.algorithms)},
        **results.facts,
        "timing": METHOD,
        "group_size": results.rows[0].group_size,
        "rows": [table.report(row) for row in results.rows],
        "summary": table.summary(results.rows),
    }


def _factor(text: str) -> float:
    value = float(text)
    if not value > 1:
        raise argparse.ArgumentTypeError(f"must be larger than 1, got {text}")
    return value
