"""Programs to check: calls of every op, in several rounds, on one group or two, by the schedules that ranks make."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fusedcomm.memory.segment import HeaderLayout
from fusedcomm.memory.workspace import Workspace
from fusedcomm.ops.table import OPS
from fusedcomm.plan import chunked, fused, pipelined, routed_rounds
from fusedcomm.plan.builder import Builder, Device, Memory, build, layout_of
from fusedcomm.plan.geometry.exchange import Exchange
from fusedcomm.plan.routing import packed_shape
from fusedcomm.plan.schedule import Schedule
from fusedcomm.run.calls import program_of
from tests.helpers.plain_cases import Case
from tests.helpers.problems import GATHERS, Problem
from tests.helpers.schedule.kernel_effects import Group
from tests.helpers.schedule.multiprocessors import NUM_SMS
from tests.helpers.schedule.operations import Enqueued
from tests.helpers.schedule.walk import Walk
from tests.helpers.uneven import Uneven

COPIES = {"writes_by_stream": True, "least_copied": Workspace.least_copied}
GPU = Device(is_gpu=True, architecture=90, triton=(3, 9), num_sms=NUM_SMS, **COPIES)
CPU = Device()
BF16 = torch.bfloat16


@dataclass(frozen=True)
class World:
    """``group_size`` ranks, each on a device of its own, all in every group. ``changed``: a schedule with a defect."""

    group_size: int
    slot_bytes: int
    algorithm: str
    num_groups: int = 1
    device: Device = GPU
    changed: Callable[[int, Schedule], Schedule] = lambda rank, schedule: schedule

    @property
    def groups(self) -> list[Group]:
        return [Group(f"group {i}", tuple(range(self.group_size))) for i in range(self.num_groups)]

    def enqueue(self, program: Program) -> list[Enqueued]:
        """The operations of each rank. They all run the same program."""
        found = []
        for rank in range(self.group_size):
            calls = Calls(self, rank)
            program(calls)
            found.append(calls.walk.enqueued)
        return found


class Mesh(World):
    """Two rows of ranks: each rank is in the group of its row, and in that of its column."""

    @property
    def groups(self) -> list[Group]:
        half = self.group_size // 2
        rows = [Group(f"row {i}", tuple(range(i * half, (i + 1) * half))) for i in range(2)]
        return rows + [Group(f"column {i}", (i, i + half)) for i in range(half)]


class Calls:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.groups = [group for group in world.groups if rank in group.ranks]
        memories = [memory_of(group.ranks.index(rank), len(group.ranks), world.slot_bytes) for group in self.groups]
        self.walk = Walk(rank, self.groups, memories)
        self._made: dict[Hashable, Schedule] = {}

    def __call__(
        self,
        problem: Problem | Uneven | Case,
        group: Group | None = None,
        caller: Hashable = 0,
        dtype: torch.dtype = BF16,
        by_product: bool = False,
        algorithm: str = "",
    ) -> None:
        group, algorithm = group or self.groups[0], algorithm or self.world.algorithm
        key = problem, group, dtype, by_product, algorithm
        if key not in self._made:
            memory = self.walk.memories[group.name]
            found = schedule(problem, memory, self.world.device, algorithm, dtype, by_product)
            self._made[key] = self.world.changed(memory.rank, found)
        self.walk.call(self._made[key], group, caller)


Program = Callable[[Calls], None]
ALGORITHMS: dict[str, ModuleType] = {"chunked": chunked, "fused": fused, "pipelined": pipelined}
NUM_PIECES = 4  # of a pipelined call


def memory_of(rank: int, group_size: int, slot_bytes: int) -> Memory:
    layout = HeaderLayout(group_size).for_kernels
    return Memory(rank, group_size, slot_bytes, slot_bytes, slot_bytes // group_size, layout)


def operands(problem: Problem | Uneven, x: Any, ws: list[Any], biases: list[Any]) -> list[Any]:
    if problem.op == "matmul_all_to_all":
        return [x, ws[0], biases[0], None]
    if problem.op in GATHERS:
        return [x, ws, biases]
    return [x, ws[0], *((None, biases[0]) if problem.partial else (biases[0], None)), None]


def schedule(
    problem: Problem | Uneven | Case,
    memory: Memory,
    device: Device,
    algorithm: str,
    dtype: torch.dtype = BF16,
    by_product: bool = False,
) -> Schedule:
    """The steps of a rank in one call, made without a group."""
    if isinstance(problem, Case):
        return _plain(problem, memory, device, algorithm, dtype)
    exchange, *tensors = geometry(problem, memory, dtype)
    programs, facts = ALGORITHMS[algorithm], dict[str, Any]()
    if problem.op == "matmul_all_to_all":
        program = programs.push_matmul
    elif problem.op in GATHERS:
        program, facts = programs.gather_matmul, {"return_gathered": by_product}
    else:
        scatters = problem.op == "matmul_reduce_scatter"
        program = program_of(algorithm, "push_reduce" if scatters else "push_reduce_gather")
        facts = {"scale": 1 / memory.group_size if getattr(problem, "reduce_op", "sum") == "avg" else 1.0}
    return build(program, exchange, memory, device, operands(problem, *tensors), num_pieces=NUM_PIECES, **facts)


def _plain(case: Case, memory: Memory, device: Device, algorithm: str, dtype: torch.dtype) -> Schedule:
    spec, args = OPS[case.op], case.arguments(memory.rank, memory.group_size, dtype)
    given, facts = spec.operands(args)
    layouts = [layout_of(t) if isinstance(t, Tensor) else t for t in given]
    program = program_of(algorithm, spec.program)
    return build(program, case.exchange(args), memory, device, layouts, num_pieces=NUM_PIECES, **facts)


def exchange_of(problem: Problem | Uneven | Case, memory: Memory) -> Exchange:
    if isinstance(problem, Case):
        return problem.exchange(problem.arguments(memory.rank, memory.group_size, BF16))
    return geometry(problem, memory)[0]


def geometry(
    problem: Problem | Uneven, memory: Memory, dtype: torch.dtype = BF16
) -> tuple[Exchange, Any, list[Any], list[Any]]:
    return (_of_uneven if isinstance(problem, Uneven) else _of_problem)(problem, memory, dtype)


def _layouts(*tensors: Tensor | None) -> list[Any]:
    return [None if t is None else layout_of(t) for t in tensors]


def _of_problem(problem: Any, memory: Memory, dtype: torch.dtype) -> tuple[Exchange, Any, list[Any], list[Any]]:
    size = memory.group_size
    x_shape, w_shapes, _ = problem.sizes(size)
    x = torch.empty(x_shape, dtype=dtype, device="meta")
    ws = [torch.empty(shape, dtype=dtype, device="meta") for shape in w_shapes]
    exchange = problem.exchange(x, ws if isinstance(problem.n, tuple) else ws[0], size)
    if problem.transposed:
        ws = [w.mT.contiguous().mT for w in ws]
    sizes = [None] if problem.partial and memory.rank == 1 else problem.bias_sizes(size)
    biases = [None if n is None else torch.empty(n, dtype=dtype, device="meta") for n in sizes]
    return exchange, *_layouts(x), _layouts(*ws), _layouts(*biases)


def _of_uneven(case: Any, memory: Memory, dtype: torch.dtype) -> tuple[Exchange, Any, list[Any], list[Any]]:
    given = case.inputs(memory.group_size)[memory.rank]
    x, w, bias = (None if t is None else t.to("meta", dtype) for t in given)
    exchange = case.exchange(x, w, memory.rank, memory.group_size)
    return exchange, *_layouts(x), _layouts(w), _layouts(bias)


def each_way(problem: Problem | Uneven | Case) -> list[tuple[Problem | Uneven | Case, bool]]:
    """The call, and one with its by-product if it has one, of a w that is stored as nn.Linear stores its weight."""
    if isinstance(problem, Case):
        return [(problem, False)] * 2
    again = problem if isinstance(problem, Uneven) else replace(problem, transposed=True)
    return [(problem, False), (again, problem.op in GATHERS)]


def calls(problems: Sequence[Problem | Uneven | Case], dtype: torch.dtype = BF16, twice: bool = True) -> Program:
    """The calls one after the other, in each group in turn; ``twice``: `each_way`."""

    def program(call: Calls) -> None:
        for problem in problems:
            for group in call.groups:
                for each, by_product in each_way(problem)[: 1 + twice]:
                    call(each, group, dtype=dtype, by_product=by_product)

    return program


def token_schedules(memory: Memory, device: Device) -> list[Schedule]:
    """A dispatch, combines, a dispatch by a routing that is there, and one in pieces with their products."""
    k, size = 2, memory.group_size
    num_experts, capacity = 2 * size, 64 * size
    x, rows = (torch.empty(num, 64, dtype=BF16, device="meta") for num in (128, capacity))
    w = torch.empty(2, 64, 64, dtype=BF16, device="meta")
    ids, scores = (torch.empty(128 * k, dtype=dtype, device="meta") for dtype in (torch.int64, torch.float32))
    packed = torch.empty(packed_shape(128 * k, num_experts, size), dtype=torch.int64, device="meta")
    sizes = {"num_experts": num_experts, "capacity": capacity, "alignment": 8}

    def schedule_of(program: Any, *tensors: Tensor | None, **facts: Any) -> Schedule:
        s = Builder(memory, device, _layouts(*tensors))
        return s.finish(*program(s, *s.inputs, k=k, **facts))

    return [
        schedule_of(routed_rounds.dispatch, x, ids, **sizes),
        schedule_of(routed_rounds.combine, rows, None, scores, packed, num_tokens=128, return_received=True),
        schedule_of(routed_rounds.combine, rows, w, scores, packed, num_tokens=128, return_received=False),
        schedule_of(routed_rounds.send, x, scores, packed, capacity=capacity),
        schedule_of(routed_rounds.dispatch, x, ids, w, w, **sizes, num_pieces=2),
    ]


def of_tokens(call: Calls) -> None:
    """Dispatches and combines of rows, which read slots of other ranks, and a call of another kind behind them."""
    group, *_ = call.groups
    memory = call.walk.memories[group.name]
    found = [call.world.changed(memory.rank, each) for each in token_schedules(memory, call.world.device)]
    for number, each in enumerate((*found, found[1], *found, *found[1:3])):
        call.walk.call(each, replace(group, pulls=number % 2 == 1))
    call(Problem("rows", (256, 128), 256, scatter_dim=0, op="matmul_reduce_scatter", bias=True), group)
    call.walk.call(found[1], replace(group, pulls=True))


def on_two_streams(problems: Sequence[Problem | Case]) -> Program:
    """Each group's calls on a stream of its own, with a matmul of the caller's behind each."""

    def program(call: Calls) -> None:
        for problem in problems:
            for caller, group in enumerate(call.groups):
                for each, by_product in each_way(problem):
                    call(each, group, caller, by_product=by_product)
                    call.walk.multiply(1, 2048, 256, 2048, caller=caller)

    return program
