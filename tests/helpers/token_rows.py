"""Single kernels of dispatches and combines, and routings of all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedcomm.plan.builder import Builder, layout_of
from fusedcomm.plan.routing import counts_of, pack
from fusedcomm.plan.schedule import Launch
from fusedcomm.run import python_executor


def run_kernel(
    names: str,
    program: Callable[..., list[Tensor]],
    workspace: Any,
    fingerprint: int,
    *tensors: Tensor | None,
    **facts: Any,
) -> list[Tensor]:
    """The results of a program of `fusedcomm.plan.routed_rounds` of which these kernels run alone, for a last piece."""
    kernels = [f"{name}_kernel" for name in names.split()]
    layouts = [None if t is None else layout_of(t) for t in tensors]
    s = Builder(workspace.memory_facts(), workspace.device_facts(), layouts)
    schedule = s.finish(*program(s, *s.inputs, **facts))
    launches = (step for step in schedule.steps if isinstance(step.work, Launch))
    steps = {step.work.kernel.split(".")[1]: step for step in launches}
    of = tuple(step for name, step in steps.items() if name in kernels)
    return python_executor.run(replace(schedule, steps=of), workspace, "", fingerprint, tensors)


def routings(ids: list[Tensor], k: int, num_experts: int, capacity: int, alignment: int = 1) -> list[Tensor]:
    """Every rank's, of its ids [T * k]."""
    counts = torch.stack([counts_of(each, num_experts) for each in ids])
    return [pack(each, k, counts, rank, capacity, alignment) for rank, each in enumerate(ids)]
