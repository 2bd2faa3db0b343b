"""torch's own scheduler of collectives, to compare with: its plan of a graph, made with fusedcomm's estimates.

As shipped it asks a GPU's driver for its speed, and does not count the memory of CPU tensors. Both are replaced while
it runs, so it plans with the numbers by which it is judged, and on any machine.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

if TYPE_CHECKING:
    from fusedcomm.compile.overlap.estimator import Estimator


@dataclass(frozen=True)
class Scheduled:
    gm: GraphModule
    seconds: float


def copy_of(gm: GraphModule) -> GraphModule:
    """A copy of gm with nodes of its own; the fake tensors are the same."""
    return GraphModule(torch.nn.Module(), copy.deepcopy(gm.graph))


def schedule(gm: GraphModule, estimator: Estimator, *, bucket: bool, memory_ratio: float = 0.05) -> Scheduled:
    """A copy of gm as `schedule_overlap_bucketing` orders it; raises whatever that raises.

    ``memory_ratio`` is how much the peak may grow, as torch counts it. torch does not always keep to it.
    """
    from torch._inductor.fx_passes import overlap_scheduling

    options: dict[str, Any] = {
        "collective_bucketing": bucket,
        "pre_bucketing_fsdp_collectives": bucket,
        "insert_overlap_deps": False,
        "custom_runtime_estimation": lambda node, size=None: _estimate(estimator, node, size),
        "compute_estimator": "analytical",
        "max_memory_increase_gb": 0.0,  # torch takes the larger of the two
        "max_memory_increase_ratio": memory_ratio,
    }
    known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
    options = {name: value for name, value in options.items() if name in known}
    copied = copy_of(gm)
    with _anywhere(gm, estimator), pass_time() as seconds:
        result = overlap_scheduling.schedule_overlap_bucketing(copied, **options)
    return Scheduled(result, seconds())


@contextlib.contextmanager
def pass_time() -> Iterator[Callable[[], float]]:
    """Measure processor time, which other load changes little, without garbage collection, which meets only some runs.

    The function yielded says the seconds, once the block has ended.
    """
    gc.collect()
    gc.disable()
    spent, start = [0.0], time.thread_time()
    try:
        yield lambda: spent[0]
    finally:
        spent[0] = time.thread_time() - start
        gc.enable()


@contextlib.contextmanager
def _anywhere(gm: GraphModule, estimator: Estimator) -> Iterator[None]:
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes import overlap_scheduling

    fake_mode = detect_fake_mode([node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    assert fake_mode is not None
    patch, tracker = mock.patch.object, overlap_scheduling.MemoryTracker
    told = logging.root.manager.disable
    logging.disable(logging.INFO)  # torch tells what it has bucketed, for each graph
    try:
        with (
            fake_mode,
            patch(overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: _estimate(estimator, node)),
            patch(overlap_scheduling, "MemoryTracker", lambda graph: tracker(graph, device_filter=_any)),
        ):
            yield
    finally:
        logging.disable(told)


def _any(device: torch.device) -> bool:
    return True


def _estimate(estimator: Estimator, node: Node, size: int | None = None) -> float:
    """ms. Besides its own size, torch asks for size 0 of a collective, to learn its latency."""
    cost = estimator.cost(node)
    if cost.transfer is None:
        return cost.compute_ms
    return cost.transfer.latency_ms if size == 0 else cost.transfer.ms
