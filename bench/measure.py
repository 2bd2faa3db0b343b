"""An op at one size: every algorithm beside the baseline, the collective alone and the roof."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm import env
from fusedcomm.bench.op_bench import AUTO, BASELINE, COLLECTIVE, MATMULS, ROOF, OpData
from fusedcomm.bench.scaled_bench import BENCHES
from fusedcomm.bench.timing import Timing, check_values, measure
from fusedcomm.launch import console, world
from fusedcomm.memory import members
from fusedcomm.memory.group import resolve
from fusedcomm.ops.whole_group import MatmulSize

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALGORITHMS = (AUTO, *env.ALGORITHMS)
NOTHING = Timing(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Options:
    """Options of a measurement, the same on all ranks."""

    device_type: str
    rounds: int
    warmup: int
    check: bool
    graph: bool
    algorithms: tuple[str, ...] = (AUTO,)


@dataclass(frozen=True)
class OpRow:
    """An op at one size with one algorithm. Times are the slowest rank's, in seconds; bytes are nccl-tests'."""

    op: str
    rows: int
    k: int
    n: int
    batch: int
    dtype: str
    direction: str
    algorithm: str  # asked for: "auto" leaves it to the planner
    planned: str  # the algorithm that runs
    plan: str
    group_size: int
    num_bytes: int  # exchanged, over all exchanges of the direction
    flops: int
    roof: Timing
    collective: Timing
    baseline: Timing
    ours: Timing

    @property
    def ratio(self) -> float:
        return self.baseline.median / self.ours.median

    @property
    def percent_over_roof(self) -> float:
        return 100 * (self.ours.median / self.roof.median - 1)

    @property
    def exposed(self) -> float:
        return self.ours.median - self.roof.median

    @property
    def overlap_efficiency(self) -> float | None:
        """(T_matmul + T_collective - T_op) / min(T_matmul, T_collective); None where nothing is exchanged.

        It is 1 where the shorter of the two is hidden, and 0 where nothing is.
        """
        if not self.num_bytes:
            return None
        hidden = self.roof.median + self.collective.median - self.ours.median
        return hidden / min(self.roof.median, self.collective.median)

    @property
    def tflops(self) -> float:
        return self.flops / self.ours.median / 1e12

    @property
    def algbw(self) -> float:
        """The bytes exchanged over the time, in GB/s."""
        return self.num_bytes / self.ours.median / 1e9

    @property
    def busbw(self) -> float:
        """As nccl-tests defines it."""
        crossings = 2 if BENCHES[self.op].kind == "all_reduce" else 1
        return self.algbw * crossings * (self.group_size - 1) / self.group_size


def size_of(op: str, num_bytes: int, k: int, n: int, batch: int, dtype: str) -> MatmulSize:
    """The size that exchanges ``num_bytes``, in whole rows, equally many in each batch, and at least one."""
    columns = k if BENCHES[op].gathers else n
    rows = max(num_bytes // (columns * DTYPES[dtype].itemsize), 1)
    return MatmulSize(rows + -rows % max(batch, 1), k, n, batch)


def measure_op(rank: int, op: str, size: MatmulSize, dtype: str, direction: str, options: Options) -> list[OpRow]:
    """A row per algorithm, all of them measured in one run."""
    data = rank_data(op, size, dtype, direction, options.device_type)
    every = variants(data, options.algorithms)
    plans = {algorithm: _plan(data, algorithm) for algorithm in options.algorithms}
    with console.progress(rank == 0, options.rounds + options.warmup, f"{op}: checking values", op) as on_round:
        check_values(every, data.check)
        if options.graph:
            with fusedcomm.before_capture():  # a capture may plan otherwise
                plans = {algorithm: _plan(data, algorithm) for algorithm in plans}
            every = {name: captured(variant) for name, variant in every.items()}
            data.restore()  # a capture calls it once
            check_values(every, data.check)
        if not options.check:
            data.randomize()  # in place, because replays read the same tensors
            every = every if options.graph else variants(data, options.algorithms)
        check, of = data.check if options.check else None, {"rounds": options.rounds, "warmup": options.warmup}
        times = measure(every, data.device, on_round=on_round, check=check, **of)
    bench, size = data.bench, data.size
    return [
        OpRow(
            op=op,
            **asdict(size),
            dtype=dtype,
            direction=direction,
            algorithm=algorithm,
            planned=plans[algorithm].algorithm,
            plan=str(plans[algorithm]),
            group_size=data.num_ranks,
            num_bytes=data.exchanged_bytes * bench.exchanges(direction),
            flops=size.flops * MATMULS[direction],
            roof=times[ROOF],
            collective=times.get(COLLECTIVE, NOTHING),
            baseline=times[BASELINE],
            ours=times[algorithm],
        )
        for algorithm in options.algorithms
    ]


def rank_facts(rank: int, device_type: str) -> dict[str, Any]:
    """Conditions of the figures known to the ranks alone. "topology": their vote, None where no op has run."""
    facts: dict[str, Any] = {"huge_pages": world.torch_asks_for_huge_pages(), "topology": None}
    if member := members.known_member(resolve(None)[1], world.rank_device(device_type)):
        topology = asdict(member.topology)
        constants = topology.pop("constants")
        facts["topology"] = topology | {"numbers": constants["source"] if constants else "default"}
    return facts


def rank_data(op: str, size: MatmulSize, dtype: str, direction: str, device_type: str) -> OpData:
    bench = BENCHES[op]
    size = bench.divisible(size, dist.get_world_size())
    return OpData(bench, size, DTYPES[dtype], world.rank_device(device_type), direction)


def variants(data: OpData, algorithms: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    every = dict(data.variants())
    ours = every.pop(AUTO)
    if data.bench.exchanges(data.direction):
        every[COLLECTIVE] = data.collective()
    return every | {name: ours if name == AUTO else data.forced(name) for name in algorithms}


def captured(variant: Callable[[], Any]) -> Callable[[], Any]:
    """``variant`` as the replay of a CUDA graph."""
    with fusedcomm.before_capture():
        variant()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog makes CUDA calls of its own
        result = variant()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _plan(data: OpData, algorithm: str) -> fusedcomm.Plan:
    if algorithm == AUTO:
        return data.plan()
    with fusedcomm.force_algorithm(algorithm):
        return data.plan()
