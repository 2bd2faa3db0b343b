"""Calls of one rank on pretended GPUs, in a process that make host-cost has prepared:

    python -m tests.host_cost.calls R FILE [count]

checks the work on streams, and times the calls; with ``count`` callgrind counts each. FILE: for JSON.
"""

import gc
import json
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm import all_gather_matmul, force_algorithm, matmul_all_to_all
from fusedcomm.kernels import native_part
from fusedcomm.launch.provenance import run_facts
from tests.host_cost import checks, shared_expert
from tests.host_cost.device import Driver, join, made

SLOT_BYTES = 128 << 20  # a round a call
DEVICE = torch.device("cuda", 0)
WARM_CALLS, CALLS, TIMES = 30, 10, 300
PLAIN = "torch.mm"
TRAINING, BACKWARD = ", inputs require grad", ", forward and backward"


def rows() -> Iterator[tuple[str, str | None, Callable[[], Any]]]:
    """A name, the algorithm and the call, of each row of the table."""
    x, w, shard = (made(*shape, device=DEVICE) for shape in ((4096, 4096), (4096, 8192), (1024, 4096)))
    xg, wg = (each.detach().requires_grad_() for each in (x, w))
    push, gather = (lambda x, w: matmul_all_to_all(x, w, 0, 1)), partial(all_gather_matmul, gather_dim=0)
    yield PLAIN, None, lambda: torch.mm(x, w)
    yield PLAIN + TRAINING, None, lambda: torch.mm(xg, wg)
    yield PLAIN + BACKWARD, None, step(torch.mm, xg, wg)
    for algorithm in ("fused", "chunked"):
        with force_algorithm(algorithm, strict=True):
            name, gather_name = f"{algorithm} matmul_all_to_all", f"{algorithm} all_gather_matmul"
            yield f"{name}, torch.ops", algorithm, dispatched(lambda: push(x, w))
            yield f"{name}, public", algorithm, lambda: push(x, w)
            yield f"{name}, public{TRAINING}", algorithm, lambda: push(xg, wg)
            yield f"{name}, public{BACKWARD}", algorithm, step(push, xg, wg)
            yield f"{gather_name}, torch.ops", algorithm, dispatched(lambda: gather(shard, w))
            yield f"{gather_name}, public", algorithm, lambda: gather(shard, w)


def step(call: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> Callable[[], None]:
    grad = torch.empty_like(call(x, w))

    def run() -> None:
        x.grad = w.grad = None
        call(x, w).backward(grad)

    return run


def dispatched(call: Callable[[], Any]) -> Callable[[], Any]:
    """The package's op behind ``call``, with the same arguments."""
    found: list[Callable[[], Any]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "fusedcomm":
                packet = getattr(torch.ops.fusedcomm, func._schema.name.partition("::")[2])
                found.append(partial(packet, *args, **(kwargs or {})))
            return func(*args, **(kwargs or {}))

    with Mode():
        call()
    (op,) = found
    return op


def main(group_size: int, file: Path, count: bool) -> None:
    torch.cuda.set_device(DEVICE)
    driver = Driver()
    join(group_size, SLOT_BYTES, DEVICE)
    report: dict[str, Any] = run_facts() | {"native_part": native_part.native is not None, "us": {}}
    gc.disable()  # it would fall into one row or another
    for name, algorithm, call in rows():
        with force_algorithm(algorithm, strict=algorithm is not None):
            for _ in range(WARM_CALLS):
                call()
            gc.collect()
            if count:
                with driver.counts(name):
                    for _ in range(CALLS):
                        call()
            else:
                report["us"][name] = round(1e6 * min(timeit.repeat(call, number=1, repeat=TIMES)), 1)
    if not count:
        report["traces"] = [*checks.traces(driver, group_size), *shared_expert.traces(driver, checks.DEVICE)]
    file.write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), "count" in sys.argv[3:])
