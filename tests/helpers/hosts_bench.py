"""`pipelined` across two hosts, on a throttled link between two network namespaces of this machine. It needs root.

    python -m tests.helpers.hosts_bench [OP ...] [--mbit 400] [--rounds 15] [--json FILE]

There is one rank of one thread on each host. Sizes are chosen such that the bytes that an op must send take 0.25 to 4
times as long on the link as the matmul takes. Measured side by side, with the matmul alone and the wire alone as
roofs: unfused; pipelined in 2 to 16 pieces; and what the planner chooses, after `fusedcomm tune` on that link. wire
alone is gloo's all_to_all or all_gather of the least bytes, from and into tensors that are there.

What overlaps best still takes max(matmul, wire) and one piece of the shorter one: that is the bound.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm
from fusedcomm.bench import tune
from fusedcomm.bench.common import Goal, Ratio, at_least, draws, ms, tabulated
from fusedcomm.bench.fits import Unreliable
from fusedcomm.bench.op_bench import AUTO, PROGRAMS, ROOF, OpBench, OpData
from fusedcomm.bench.timing import Timing, check_values, measure_rounds
from fusedcomm.launch import console, world
from fusedcomm.launch.console import Column
from fusedcomm.launch.provenance import run_facts
from fusedcomm.memory import members
from fusedcomm.memory.group import resolve
from fusedcomm.ops.whole_group import MatmulSize
from fusedcomm.plan import planner
from tests.helpers.hosts import MOST_MBIT, NoHosts, torchrun, two_hosts

OPS = ("matmul_all_to_all", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce")
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # time on the wire / time of the matmul
PIECES = (2, 4, 8, 16)
OTHER_DIM = 1024  # N of a push, K of a gather: the bytes of a row; the third dim comes from the ratio
LONGER_S = 0.12  # what the longer of matmul and wire takes: far above gloo's start and the link's burst
ROWS_STEP = 128  # 16 pieces of 2 chunks have 4 rows each at least
WIRE, UNFUSED = "wire", "unfused"
TIMEOUT_S = 1800.0
CPU = torch.device("cpu")
MOST_OVER_BOUND, LEAST_WHERE_EQUAL, NOT_SLOWER = 1.15, 1.3, 0.95


@dataclass(frozen=True)
class HostsRow:
    """One op at one size. Times are the slowest rank's: the least of all rounds, as what else runs only adds to it."""

    op: str
    rows: int
    k: int
    n: int
    asked_ratio: float
    plan: str
    algorithm: str
    num_pieces: int
    least: dict[str, float]
    times: dict[str, Timing]
    over_unfused: dict[str, Ratio]  # unfused / each, the median within a round

    @property
    def ratio(self) -> float:
        return self.least[WIRE] / self.least[ROOF]

    def bound(self, num_pieces: int) -> float:
        both = self.least[WIRE], self.least[ROOF]
        return max(both) + min(both) / num_pieces

    @property
    def over_bound(self) -> float | None:
        """The planned call's, where it is pipelined."""
        return self.least[AUTO] / self.bound(self.num_pieces) if self.algorithm == "pipelined" else None

    @property
    def best(self) -> int:
        """The number of pieces with the least time."""
        return min(PIECES, key=lambda num_pieces: self.least[in_pieces(num_pieces)])

    def speedup(self, name: str) -> float:
        return self.least[UNFUSED] / self.least[name]

    def report(self) -> dict[str, Any]:
        pieces = {in_pieces(n): self.least[in_pieces(n)] / self.bound(n) for n in PIECES}
        facts = {"ratio": self.ratio, "over_bound": self.over_bound, "pieces_over_bound": pieces, "best": self.best}
        return asdict(self) | facts | {"speedup": {name: self.speedup(name) for name in self.over_unfused}}


def in_pieces(num_pieces: int) -> str:
    return f"{num_pieces} pieces"


LOCAL = "the local matmul is [rows, K] @ [K, N], float32"
LEAST = "least of the rounds, slowest rank"


def _pieces_column(n: int) -> Column:
    return Column(f"{n}\npieces", f"pipelined in {n} pieces, ms: {LEAST}", lambda row: ms(row.least[in_pieces(n)], 1))


COLUMNS = (
    Column("op", "what is called", lambda row: row.op, left=True),
    Column("rows", LOCAL, lambda row: str(row.rows), drop=5),
    Column("K", LOCAL, lambda row: str(row.k), drop=5),
    Column("N", LOCAL, lambda row: str(row.n), drop=5),
    Column("matmul\nms", f"the matmul alone: {LEAST}", lambda row: ms(row.least[ROOF], 1)),
    Column("wire\nms", f"the collective alone, of the least bytes: {LEAST}", lambda row: ms(row.least[WIRE], 1)),
    Column("unfused\nms", LEAST, lambda row: ms(row.least[UNFUSED], 1)),
    *map(_pieces_column, PIECES),
    Column("plan", "what the planner chooses, and its pieces", lambda row: f"{row.algorithm} {row.num_pieces}"),
    Column("planned\nms", LEAST, lambda row: ms(row.least[AUTO], 1)),
    Column("unfused /\nplanned", "of the least times", lambda row: f"{row.speedup(AUTO):.2f}"),
    Column(
        "unfused / planned\nby round",
        "median of the ratios within a round (its 95% interval, from rounds drawn anew)",
        lambda row: str(row.over_unfused[AUTO]),
        drop=4,
    ),
    Column(
        "planned /\nbound",
        "bound: max(matmul, wire) + min(matmul, wire) / pieces",
        lambda row: "-" if row.over_bound is None else f"{row.over_bound:.2f}",
    ),
)


# In every rank
def measure_all(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    tuned = tuned_numbers()
    flops, rate = calibrate(), options["mbit"] * 1e6 / 8
    rows = [measure_row(op, ratio, flops, rate, options["rounds"]) for op in options["ops"] for ratio in RATIOS]
    facts = {"tuned": tuned, "flops": flops, "load": os.getloadavg()}
    return facts | {"rows": [[asdict(row), row.report()] for row in rows]}


def tuned_numbers() -> str:
    """Tune on this link, and meet again, so that the group reads what is then in the file. Returns how it went."""
    ours = members.member(resolve(None)[1], CPU)
    try:
        found = tune.tune(ours, quick=True)
    except Unreliable as reason:
        return f"not tuned: {reason}"
    assert dist.group.WORLD is not None
    tune.write_for_all(found.constants, CPU, dist.group.WORLD, tune.num_hosts_of(ours))
    fusedcomm.close()
    ours = members.member(resolve(None)[1], CPU)
    assert ours.topology.measured_apart, ours.topology
    return f"tuned, with a noise of {found.noise:.0%}"


def calibrate() -> float:
    """FLOP per second of a matmul while the other rank has one too."""
    x, w = torch.randn(2048, 1024), torch.randn(1024, 1024)
    seconds = measure_rounds({ROOF: lambda: torch.mm(x, w)}, CPU, rounds=15, warmup=2)[ROOF].min().item()
    return 2 * x.shape[0] * x.shape[1] * w.shape[1] / seconds


def size_of(bench: OpBench, ratio: float, flops: float, rate: float) -> MatmulSize:
    """Rows and the third dim, of a matmul whose bytes take ``ratio`` times as long as it takes itself."""
    row_bytes = OTHER_DIM * 4 / 2 * (2 if bench.kind == "all_reduce" else 1)  # that one row adds to what a rank sends
    third = max(16, round(row_bytes / rate / ratio * flops / (2 * OTHER_DIM) / 16) * 16)
    row_s = max(row_bytes / rate, 2 * OTHER_DIM * third / flops)
    rows = max(ROWS_STEP, round(LONGER_S / row_s / ROWS_STEP) * ROWS_STEP)
    return MatmulSize(rows, OTHER_DIM, third) if bench.gathers else MatmulSize(rows, third, OTHER_DIM)


def measure_row(op: str, ratio: float, flops: float, rate: float, rounds: int) -> HostsRow:
    bench = PROGRAMS[op]
    data = OpData(bench, size_of(bench, ratio, flops, rate), torch.float32, CPU)
    every: dict[str, Callable[[], Any]] = {UNFUSED: data.forced(UNFUSED), AUTO: data.variants()[AUTO]}
    every |= {in_pieces(n): forced_pieces(data, n) for n in PIECES}
    check_values(every, data.check)
    data.randomize()
    every |= {ROOF: data.variants()[ROOF], WIRE: wire(data)}
    plan = data.plan()
    seconds = measure_rounds(every, CPU, rounds=rounds, warmup=2)
    return HostsRow(
        op,
        data.size.rows,
        data.size.k,
        data.size.n,
        ratio,
        str(plan),
        plan.algorithm,
        plan.num_rounds,
        {name: each.min().item() for name, each in seconds.items()},
        {name: Timing.of(each) for name, each in seconds.items()},
        {name: _ratio(seconds[UNFUSED], each) for name, each in seconds.items() if name not in (ROOF, WIRE)},
    )


def _ratio(a: Tensor, b: Tensor) -> Ratio:
    """With the 95% interval of the median, from rounds drawn anew."""
    ratios = a / b
    drawn = ratios[draws(len(ratios))].quantile(0.5, dim=-1)
    low, high = drawn.quantile(drawn.new_tensor([0.025, 0.975])).tolist()
    return Ratio(ratios.quantile(0.5).item(), low, high)


def at_most(name: str, value: float, bound: float) -> Goal:
    return Goal(name, value, f"<= {bound:g}", value <= bound)


def forced_pieces(data: OpData, num_pieces: int) -> Callable[[], Any]:
    forced = data.forced("pipelined")

    def run() -> Any:
        with choosing(num_pieces):
            return forced()

    return run


@contextmanager
def choosing(num_pieces: int) -> Iterator[None]:
    """Inside, the planner cuts each call into so many pieces."""
    before = planner.in_pieces.fastest
    planner.in_pieces.fastest = lambda *call: (num_pieces, 0.0)  # type: ignore[assignment]
    try:
        yield
    finally:
        planner.in_pieces.fastest = before


def wire(data: OpData) -> Callable[[], None]:
    """The least bytes of the op, in one collective, or two where sums are gathered after what is added was sent."""
    size = data.size
    whole = torch.randn(size.rows, size.k if data.bench.gathers else size.n)
    received = torch.empty_like(whole)
    part = whole[: size.rows // 2]

    def exchanged() -> None:
        if data.bench.kind != "all_gather":
            dist.all_to_all_single(received, whole)
        if data.bench.kind in ("all_gather", "all_reduce"):
            dist.all_gather_into_tensor(received, part)

    return exchanged


def rank_main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    result = measure_all(rank, json.loads((folder / "options.json").read_text()))
    (folder / f"result.{rank}").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# In the process that prints
def summary(rows: Sequence[HostsRow]) -> list[Goal]:
    found = []
    if over := [row.over_bound for row in rows if row.over_bound is not None]:
        found.append(at_most("planned / bound, maximum", max(over), MOST_OVER_BOUND))
    if equal := [row.speedup(AUTO) for row in rows if row.asked_ratio == 1]:
        found.append(at_least("unfused / planned, wire as matmul, minimum", min(equal), LEAST_WHERE_EQUAL))
    found.append(at_least("unfused / planned, minimum", min(row.speedup(AUTO) for row in rows), NOT_SLOWER))
    found.append(Goal("unfused / best pieces, minimum", min(row.speedup(in_pieces(row.best)) for row in rows)))
    return found


def row_of(facts: dict[str, Any]) -> HostsRow:
    times = {name: Timing(**each) for name, each in facts.pop("times").items()}
    ratios = {name: Ratio(**each) for name, each in facts.pop("over_unfused").items()}
    return HostsRow(**facts, times=times, over_unfused=ratios)


def noise_of(rows: Sequence[HostsRow]) -> str:
    """How much the matmul alone differed, and whether figures can be believed."""
    spreads = [(row.times[ROOF].p90 - row.times[ROOF].p10) / row.times[ROOF].median for row in rows]
    worst = max(spreads)
    text = f"the matmul alone differed by up to {worst:.0%} of its median (first to last decile)"
    return text + (": NOISY, other programs ran meanwhile" if worst > tune.MOST_NOISE else "")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if world.under_torchrun():
        rank_main(Path(args.ranks))
        return 0
    rows: list[HostsRow] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "options.json").write_text(json.dumps({"ops": args.op, "rounds": args.rounds, "mbit": args.mbit}))
        try:
            with two_hosts(args.mbit) as hosts:
                env = {"FUSEDCOMM_CACHE_DIR": str(folder / "cache"), "FUSEDCOMM_ALGORITHM": ""}
                found = torchrun(
                    hosts, "tests.helpers.hosts_bench", "--ranks", folder, TIMEOUT_S, ranks_per_host=1, env=env
                )[0]
        except NoHosts as reason:
            print(f"hosts: {reason}", file=sys.stderr)
            return 1
    with tabulated(COLUMNS, rows, len(found["rows"])) as add:
        for facts, _ in found["rows"]:
            add([row_of(facts)])
    print(f"{args.mbit} Mbit/s each way; {found['tuned']}")
    print(noise_of(rows) + f"; load averages at the end: {found['load']}")
    goals = summary(rows)
    print(*goals, sep="\n")
    if args.json:
        facts = {"program": "hosts", "mbit": args.mbit, "rounds": args.rounds, "noise": noise_of(rows)}
        facts |= {name: found[name] for name in ("tuned", "flops", "load")}
        facts |= {"rows": [report for _, report in found["rows"]], "goals": [asdict(goal) for goal in goals]}
        console.write_json(args.json, run_facts() | facts)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.helpers.hosts_bench", description="Values are checked before anything is timed."
    )
    parser.add_argument("op", nargs="*", metavar="OP", help=f"of {', '.join(OPS)}; default: all")
    parser.add_argument("--mbit", type=int, default=400, help=f"of the link, each way, at most {MOST_MBIT}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--ranks", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.op = args.op or list(OPS)
    if wrong := [op for op in args.op if op not in OPS]:
        parser.error(f"OP must be of {', '.join(OPS)}, got {', '.join(wrong)}")
    if not 0 < args.mbit <= MOST_MBIT:
        parser.error(f"--mbit must be at most {MOST_MBIT}, and more than 0, got {args.mbit}")
    return args


if __name__ == "__main__":
    sys.exit(main())
