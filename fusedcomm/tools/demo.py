"""``fusedcomm demo``: a matmul and its all_to_all, as users write them today and fused."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.bench import start_program, trace
from fusedcomm.bench.start_program import ProgramData, ProgramSizes
from fusedcomm.bench.timing import Timing, ValuesDiffer, check_values, measure
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column, Table
from fusedcomm.launch.provenance import run_facts
from fusedcomm.launch.ranks import RankError

DTENSOR, UNFUSED, OURS, ROOF = "DTensor", "matmul + all_to_all", "fusedcomm", "matmul alone (roof)"
NAMES = {  # of the variants of the start program
    DTENSOR: start_program.EAGER,
    UNFUSED: start_program.UNFUSED,
    OURS: start_program.OP,
    ROOF: start_program.ROOF,
}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TIMEOUT_S = 600
HEADS = 16
CPU = "CPU, one thread a rank"


@dataclass(frozen=True)
class DemoResult:
    """Rank 0's report."""

    problem: str
    world_size: int
    device: str
    rounds: int
    plan: str
    algorithm: str
    huge_pages: bool  # asked for by torch's own CPU allocations
    times: dict[str, Timing]  # empty for one rank, which exchanges nothing
    trace: trace.Trace | None = None  # of the program by hand and of fusedcomm's, if asked for


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="measure one example, a matmul and its all_to_all, unfused and fused",
        description="Runs a matmul and the all_to_all of its result as users write it today, by DTensor, and as one "
        "op of fusedcomm. Checks all values first, then prints the times side by side, and what the op is faster by. "
        "Exit code: 0, 1 for wrong values or a rank that failed, 2 for wrong arguments.",
        epilog="example: fusedcomm demo --rounds 15 --trace lanes.json",
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything that was found to FILE, as JSON")
    parser.add_argument("--trace", metavar="FILE", help="also write what every rank does over time, for Perfetto")
    console.add_rank_arguments(parser)
    parser.add_argument(
        "--rounds", type=console.positive, default=5, metavar="N", help="measurements of each variant (default: 5)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="the dtype of the data (default: bfloat16 on GPUs, float32 on CPU)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    device_type, world_size, problem = world.asked_for(args)
    if args.trace and world_size == 1:
        problem = problem or "--trace needs at least 2 ranks, for one exchanges nothing, got 1"
    if problem := problem or console.not_writable(args, "json", "trace"):
        return console.fail("demo", problem, code=2)
    dtype = DTYPES[args.dtype or ("bfloat16" if device_type == "cuda" else "float32")]
    try:
        with world.ranks(device_type, world_size, TIMEOUT_S, trace.QUIET if args.trace else None) as call:
            result = call(_measure, device_type, dtype, args.rounds, bool(args.trace))
    except (ValuesDiffer, RankError) as error:
        return console.fail("demo", world.message(error))
    if result is not None:
        _print(result)
        if args.json:
            console.write_json(args.json, report(result))
        if args.trace:
            console.write_json(args.trace, result.trace)
    return 0


def sizes_of(device: torch.device, world_size: int) -> ProgramSizes:
    """The demo's sizes: (16, 16192, 4096) @ (16, 4096, 8192) per GPU, the batch cut to fit memory.

    They are much smaller on a CPU.
    """
    heads = HEADS if HEADS % world_size == 0 else world_size
    if device.type == "cpu":
        return ProgramSizes(1, 1, 1024, 1024, 256 * heads, heads)
    sizes = ProgramSizes(1, 16, 16192, 4096, 512 * heads, heads)
    free = torch.tensor(torch.cuda.mem_get_info(device)[0], device=device)
    dist.all_reduce(free, dist.ReduceOp.MIN)
    # inputs, product, packed, received, result; and the oracle's copies in float32
    bytes_per_batch = 12 * 4 * sizes.tokens * sizes.n
    return replace(sizes, batch=max(1, min(sizes.batch, int(free) // bytes_per_batch)))


def report(result: DemoResult) -> dict[str, Any]:
    """The JSON: the figures of the table, and their conditions. Times in seconds."""
    facts, times = asdict(result), {name: timing.median for name, timing in result.times.items()}
    del facts["trace"]
    ratios = {
        name: {
            "faster_than_matmul_and_all_to_all": times[UNFUSED] / time,
            "faster_than_dtensor": times[DTENSOR] / time,
            "time_over_roof": time / times[ROOF],
            "exposed_communication": time - times[ROOF],
        }
        for name, time in times.items()
    }
    return {**run_facts(), **facts, "ratios": ratios}


def _measure(rank: int, device_type: str, dtype: torch.dtype, rounds: int, traces: bool) -> DemoResult:
    device = world.rank_device(device_type)
    world_size = dist.get_world_size()
    data = ProgramData(sizes_of(device, world_size), dtype, device)
    plan, every = data.plan(), data.eager()
    variants = {name: every[NAMES[name]] for name in NAMES}
    with console.progress(rank == 0, rounds + 1, "checking values", "round") as on_round:
        check_values(variants, lambda name, results: data.check(NAMES[name], results))
        data.randomize()
        times = measure(variants, device, rounds=rounds, on_round=on_round) if world_size > 1 else {}
    traced = trace.record({name: variants[name] for name in (UNFUSED, OURS)}, device) if traces else None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
    huge_pages = world.torch_asks_for_huge_pages()
    problem = f"{data.sizes}, {str(dtype).removeprefix('torch.')}"
    return DemoResult(problem, world_size, name, rounds, str(plan), plan.algorithm, huge_pages, times, traced)


def _print(result: DemoResult) -> None:
    out = console.stdout()
    if not result.times:
        out.print(f"1 rank ({result.device}): {result.problem}")
        out.print("values are right; one rank exchanges nothing, so there is no speed-up to show: start 2 or more")
        return
    out.print(f"{result.world_size} ranks ({result.device}), each: {result.problem}")
    out.print(f"values equal on all ranks; slowest rank, median of {result.rounds} rounds")
    console.show(_table(result.times), out)
    if result.device == CPU:
        out.print(f"{DTENSOR} on a CPU mesh: all_gather + split, which is what torch does there")
    out.print(f"plan of {OURS}: {result.plan}", markup=False)


def _table(times: dict[str, Timing]) -> Table:
    roof, unfused, dtensor = (times[name].median for name in (ROOF, UNFUSED, DTENSOR))

    def text(value: Callable[[float], float], digits: int) -> Callable[[str], str]:
        """A cell with ``value`` of the program's time in seconds. The roof has none, because it exchanges nothing."""
        return lambda name: "" if name == ROOF else f"{value(times[name].median):.{digits}f}"

    columns = (
        Column("program", "what every rank runs, at the same sizes", str, left=True),
        Column("time\nms", "median over rounds of the slowest rank", lambda name: f"{times[name].median * 1e3:.1f}"),
        Column("speed-up over\nDTensor", "time of DTensor / time", text(lambda t: dtensor / t, 2), drop=1),
        Column("speed-up over\nmatmul + all_to_all", f"time of {UNFUSED} / time", text(lambda t: unfused / t, 2)),
        Column("time /\nroof", "1 is the best there is: the exchange costs nothing", text(lambda t: t / roof, 2)),
        Column(
            "exposed\nms",
            "time - roof: communication that is not hidden; below 0 where the op alone has huge pages, on a CPU",
            text(lambda t: (t - roof) * 1e3, 1),
        ),
    )
    return Table(columns, list(times), is_bold=lambda name: name == OURS)
