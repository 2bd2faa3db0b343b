"""A call of an algorithm. All algorithms are programs of one signature: `program(s, exchange, *operands, **facts)`.

`chunked`, `fused` and `pipelined` emit the steps of a schedule, which is made once for all calls of a kind. `s` is the
`Builder`, operands are stand-ins. `unfused` runs the plain program at once: `s` is the rank's memory.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import NamedTuple, cast

from torch import Tensor

from fusedcomm.memory.call_memory import CallMemory
from fusedcomm.memory.captures import is_capturing
from fusedcomm.memory.launch_order import ordered
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan import builder, chunked, fused, norm_tail, pipelined, scaled_programs
from fusedcomm.plan.builder import Layout, Program, layout_of
from fusedcomm.plan.padded_rows import padded
from fusedcomm.plan.planner import Plan
from fusedcomm.plan.schedule import Schedule
from fusedcomm.plan.terms import of_terms
from fusedcomm.run import native_plan, python_executor, unfused

ALGORITHMS: Mapping[str, ModuleType] = {
    "unfused": unfused,
    "chunked": chunked,
    "fused": fused,
    "pipelined": pipelined,
}
Operand = Tensor | None | Sequence[Tensor | None]


class Ran(NamedTuple):
    """A call as it ran."""

    plan: Plan
    memory: CallMemory
    inputs: Sequence[Tensor | None]
    returned: list[Tensor]


def run(plan: Plan, memory: CallMemory, name: str, operands: Sequence[Operand], facts: Mapping[str, Hashable]) -> Ran:
    """Run the program ``name`` of the plan's algorithm.

    A round that is left half way breaks the workspace: the peers have seen its signals.
    """
    inputs = _flat(operands)
    if plan.algorithm == "unfused":
        program: Program = unfused.program_of(name)
        return Ran(plan, memory, inputs, program(memory, plan.exchange, *operands, **facts))
    schedule = schedule_of(plan, memory, name, operands, facts)
    if not isinstance(memory, Workspace):
        returned = python_executor.run(schedule, memory, plan.op, plan.fingerprint, inputs)
        return Ran(plan, memory, inputs, returned)
    fixed = is_capturing(memory.device) or memory.captured  # replays move the epoch, which the host cannot know
    assert schedule.can_be_captured or not fixed, "the slots of a captured round would stay where they are"
    memory.enter(plan.op, plan.fingerprint)
    with ordered(memory), memory.guarded(plan.op):
        returned = python_executor.run(schedule, memory, plan.op, plan.fingerprint, inputs)
    return Ran(plan, memory, inputs, returned)


def run_again(ran: Ran) -> list[Tensor]:
    """The results of the same call of a workspace again: by the native part, where it takes the plan."""
    plan, memory = ran.plan, cast(Workspace, ran.memory)
    how = cast(Schedule, plan.schedule), memory, plan.op, plan.fingerprint, ran.inputs
    run: Callable[[], list[Tensor]] = partial(python_executor.run, *how)
    with suppress(Exception):  # where later calls run in Python too
        run = native_plan.bound(*how)
    memory.enter(plan.op, plan.fingerprint)
    with ordered(memory), memory.guarded(plan.op):
        return run()


def schedule_of(
    plan: Plan, memory: CallMemory, name: str, operands: Sequence[Operand], facts: Mapping[str, Hashable]
) -> Schedule:
    """The plan's schedule, made by its first call, or where a workspace has grown or is captured."""
    made_for = memory.memory_facts(), memory.device_facts()
    if plan.schedule is None or plan.made_for != made_for:
        plan.schedule, plan.made_for = build(plan, memory, name, operands, facts), made_for
    return plan.schedule


@outside_modes()
def build(
    plan: Plan, memory: CallMemory, name: str, operands: Sequence[Operand], facts: Mapping[str, Hashable]
) -> Schedule:
    assert plan.exchange is not None
    layouts = [_layout(t) if t is None or isinstance(t, Tensor) else list(map(_layout, t)) for t in operands]
    return builder.build(
        program_of(plan.algorithm, name),
        plan.exchange,
        memory.memory_facts(),
        memory.device_facts(),
        layouts,
        num_pieces=plan.num_rounds,
        backend_sums=plan.backend_sums,
        **facts,
    )


def program_of(algorithm: str, name: str) -> Program:
    """A program of an algorithm with a schedule."""
    if name == "scaled_gather_matmul":
        return partial(scaled_programs.gather, program_of(algorithm, "gather_matmul"))
    if name.startswith("scaled_"):
        return partial(scaled_programs.push, program_of(algorithm, name.removeprefix("scaled_")))
    module = ALGORITHMS[algorithm]
    if name == "push_reduce_norm":
        program = partial(norm_tail.push_reduce_norm, module.push_reduce_gather, algorithm=algorithm)
        return partial(norm_tail.with_norm, program)
    if name == "push_reduce_scatter_norm":
        return partial(norm_tail.with_norm, partial(norm_tail.push_reduce_scatter_norm, module.push_reduce))
    if name == "push_reduce_gather":
        return partial(of_terms, partial(padded, module.push_reduce_gather))
    return partial(of_terms, module.push_reduce) if name == "push_reduce" else getattr(module, name)


def _layout(t: Tensor | None) -> Layout | None:
    return None if t is None else layout_of(t)


def _flat(operands: Sequence[Operand]) -> list[Tensor | None]:
    return [t for each in operands for t in _each(each)]


def _each(operand: Operand) -> Sequence[Tensor | None]:
    return [operand] if operand is None or isinstance(operand, Tensor) else operand
