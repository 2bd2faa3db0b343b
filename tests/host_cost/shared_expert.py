"""Work given to streams by ExpertParallel with a shared expert, forward and backward, under torch's own autograd."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.nn import ExpertParallel, expert_parallel
from tests.host_cost.device import Driver, made, place
from tests.host_cost.traces import READS, WRITES, Access, Trace, come_before, races

TOKENS, H, HIDDEN, EXPERTS, CAPACITY = 512, 256, 128, 8, 2048


class Noting(TorchDispatchMode):
    """Adds torch's ops to the trace: of their kernels the pretended runtime knows no operands."""

    def __init__(self, trace: list[Access]) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name()
        if not func.is_view and not name.startswith(("aten::detach", "aten::record_stream", "aten::empty")):
            stream = torch.cuda.current_stream()
            for access, tree in (READS, [args, kwargs]), (WRITES, result):
                for t in pytree.tree_leaves(tree):
                    if isinstance(t, Tensor) and t.numel():
                        start, end = place(t)
                        self.trace.append(Access(name, t.get_device(), stream.cuda_stream, access, start, end - start))
        return result


def traces(driver: Driver, device: torch.device) -> Iterator[dict[str, Any]]:
    """`fused` calls; torch's grouped_mm starts kernels that the pretended runtime lacks, so matmuls stand for it."""
    torch.cuda.empty_cache()  # free blocks of earlier cases would be taken before the layer's
    options: Any = {"device": device, "dtype": torch.bfloat16}
    shared = nn.Sequential(nn.Linear(H, HIDDEN, **options), nn.ReLU(), nn.Linear(HIDDEN, H, **options))
    layer = ExpertParallel(H, HIDDEN, EXPERTS, capacity=CAPACITY, shared_expert=shared, **options)
    x, ids = made(TOKENS, H, device=device).requires_grad_(), torch.zeros(TOKENS, 2, dtype=torch.int64, device=device)
    inputs = x, ids, torch.ones(TOKENS, 2, device=device)
    with mock.patch.object(nn.functional, "grouped_mm", grouped_mm):
        heard = partial(of_calls, driver, layer, inputs, [torch.cuda.Stream(device) for _ in range(2)])
        heard()  # kernels are loaded
        yield {"case": "a shared expert", "wrong": [*dict.fromkeys(violations(heard(), device))]}
        missed = []
        for name, defect in defects(device).items():
            with defect:
                if not any(violations(heard(), device)):
                    missed.append(name)
        yield {"case": "a shared expert, with defects planted", "wrong": missed}


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    if b.ndim == 3:
        return torch.cat([rows @ w for rows, w in zip(a.chunk(len(b)), b, strict=True)])
    pairs = zip(a.chunk(len(offs), 1), b.chunk(len(offs)), strict=True)
    return torch.stack([rows @ others for rows, others in pairs])


def of_calls(
    driver: Driver, layer: ExpertParallel, inputs: tuple[Tensor, ...], users: list[torch.cuda.Stream]
) -> Trace:
    """Steps and plain calls on two streams of the caller that nothing orders."""
    x, ids, scores = inputs

    def call() -> None:
        with torch.no_grad():
            layer(x.relu(), ids, scores)

    def step() -> None:
        y = layer(x.relu(), ids, scores)
        grads = torch.autograd.grad(layer(2 * y, ids, scores).relu().sum(), (x, *layer.parameters()))
        _ = [2 * grad for grad in grads]

    with driver.hears([]) as trace, Noting(trace):
        for user, calls in zip(users, ((step, call), (call, step)), strict=True):
            with torch.cuda.stream(user):
                for each in calls:
                    each()
    return trace


def violations(trace: Trace, device: torch.device) -> Iterator[str]:
    yield from races(trace)
    before, stream = come_before(trace), expert_parallel._stream(device).cuda_stream
    matmuls = [i for i, each in enumerate(trace) if each.what == "matmul" and each.stream == stream]
    if not any(trace[j].what == "launch" and not before[i] >> j & 1 for i in matmuls for j in range(i)):
        yield "kernels of an exchange must be given to their stream before matmuls that do not wait for them"


def defects(device: torch.device) -> dict[str, AbstractContextManager[Any]]:
    side = expert_parallel._stream(device)

    def without(owner: Any, name: str, drops: Callable[..., bool]) -> AbstractContextManager[Any]:
        made = getattr(owner, name)
        return mock.patch.object(owner, name, lambda *args: None if drops(*args) else made(*args))

    return {
        "it does not wait for x": without(torch.cuda.Stream, "wait_stream", lambda stream, _: stream == side),
        "nothing waits for it": without(torch.cuda.Stream, "wait_stream", lambda _, other: other == side),
        "its x is reused": without(Tensor, "record_stream", lambda _, stream: stream == side),
        "its result is reused": without(Tensor, "record_stream", lambda _, stream: stream != side),
        "on the caller's stream": mock.patch.object(expert_parallel, "_stream_beside", lambda x: None),
    }
