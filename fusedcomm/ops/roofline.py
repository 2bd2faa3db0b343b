"""Times of calls for torch's overlap scheduler: by its roofline, as those of subgraphs.

A benchmark would make as many calls as its rank's clock allows, while peers make others.
"""

from typing import Any

from torch._inductor.fx_passes import overlap_scheduling
from torch.fx import Node

_benchmark = overlap_scheduling.benchmark_node_with_cache_key
_in_2_11 = getattr(overlap_scheduling, "estimate_mem_bound_runtime_ms", None)
_estimate: Any = getattr(overlap_scheduling, "estimate_roofline_runtime_ms", _in_2_11)


def _benchmark_or_estimate(node: Node, *args: Any, **kwargs: Any) -> tuple[float, str | None]:
    if getattr(node.target, "namespace", None) == "fusedcomm":
        return _estimate(node), None
    return _benchmark(node, *args, **kwargs)


overlap_scheduling.benchmark_node_with_cache_key = _benchmark_or_estimate  # type: ignore[assignment]
