"""A call of an algorithm: its schedule, made once for all calls of a kind, and the run of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedcomm.memory.captures import is_capturing
from fusedcomm.memory.launch_order import ordered
from fusedcomm.memory.outside_modes import outside_modes
from fusedcomm.memory.workspace import Call
from fusedcomm.plan.builder import Builder, Layout, layout_of
from fusedcomm.plan.schedule import Schedule
from fusedcomm.run import python_executor

Program = Callable[..., Any]  # of fusedcomm.plan: it emits the steps of a call
Operand = Tensor | None | Sequence[Tensor | None]
_MOST_KEPT = 1024  # schedules of a workspace; one with more, whose sizes change all the time, begins anew


class Ran(NamedTuple):
    """A call as it ran."""

    schedule: Schedule
    inputs: Sequence[Tensor | None]
    returned: Sequence[Tensor]


def run(call: Call, program: Program, *operands: Operand, **facts: Hashable) -> list[Tensor]:
    """Run ``program(builder, exchange, *operands, **facts)`` on the call's workspace; the tensors that it returns.

    A round that is left half way breaks the workspace: the peers have seen its signals.
    """
    workspace, schedule = call.workspace, schedule_of(call, program, *operands, **facts)
    fixed = is_capturing(workspace.device) or workspace.captured  # replays move the epoch, which the host cannot know
    assert schedule.can_be_captured or not fixed, "the slots of a captured round would stay where they are"
    workspace.enter(call.op, call.fingerprint)
    inputs = _flat(operands)
    with ordered(workspace), workspace.guarded(call.op):
        returned = python_executor.run(schedule, workspace, call.op, call.fingerprint, inputs)
    call.ran = Ran(schedule, inputs, returned)
    return returned


def schedule_of(call: Call, program: Program, *operands: Operand, **facts: Hashable) -> Schedule:
    """The schedule of all calls of this kind, made by the first."""
    kept: dict[Hashable, tuple[Schedule, object]] = call.workspace.schedules
    layouts = tuple(None if t is None else layout_of(t) for t in _flat(operands))
    key = program, id(call.exchange), layouts, call.workspace.device_facts(), tuple(facts.values())
    if key not in kept:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        kept[key] = _build(call, program, layouts, operands, facts), call.exchange  # which keeps its id
    return kept[key][0]


@outside_modes()
def _build(
    call: Call,
    program: Program,
    layouts: Sequence[Layout | None],
    operands: Sequence[Operand],
    facts: Mapping[str, Hashable],
) -> Schedule:
    builder = Builder(call.workspace.memory_facts(), call.workspace.device_facts(), layouts)
    inputs = iter(builder.inputs)
    stand_ins = [[next(inputs) for _ in each] if isinstance(each, (list, tuple)) else next(inputs) for each in operands]
    returned = program(builder, call.exchange, *stand_ins, **facts)
    return builder.finish(*([returned] if isinstance(returned, Tensor) else returned))


def _flat(operands: Sequence[Operand]) -> list[Tensor | None]:
    return [t for each in operands for t in _each(each)]


def _each(operand: Operand) -> Sequence[Tensor | None]:
    return [operand] if operand is None or isinstance(operand, Tensor) else operand
