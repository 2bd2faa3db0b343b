"""One call of each kernel, in a workspace of one rank that signals itself. Only K is gathered between two ranks."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.gpu_calls import FINGERPRINT, GpuCall, first_of
from fusedcomm.memory import triton_probe
from fusedcomm.memory.workspace import Workspace
from fusedcomm.plan.geometry import shapes
from fusedcomm.plan.geometry.exchange import Exchange, RoundSpans
from fusedcomm.testing import launch_now
from fusedcomm.testing.virtual import VirtualGroup

DTYPE = torch.bfloat16


def calls(cuda: bool) -> list[GpuCall]:
    return [GpuCall(2 if cuda else 1, DTYPE, first_of(op, cuda)) for op in ("all_to_all_matmul", "matmul_all_to_all")]


def cases(device: torch.device) -> child.Cases:
    cuda = device.type == "cuda"
    gathers_k, pushes = calls(cuda)
    return {
        "signal": partial(signal, device),
        **{kernel.__name__.replace("_", " "): partial(kernel, device) for kernel in KERNELS},
        "gather K": partial(gathers_k.check, "fused", device),
        **({"chunked": partial(pushes.check, "chunked", device)} if cuda else {}),
    }


def signal(device: torch.device) -> None:
    reason = triton_probe.cannot_launch(device)
    assert reason is None, reason


def round_without_data(device: torch.device) -> None:
    workspace = workspace_of(128, device)
    launch_now.begin_push(workspace)
    launch_now.signal(workspace, None, FINGERPRINT)
    launch_now.wait(workspace, FINGERPRINT)
    _check(workspace)


def wait_source_and_finish(device: torch.device) -> None:
    workspace, out = workspace_of(128, device), torch.ones(64, dtype=DTYPE, device=device)
    launch_now.signal(workspace, 0, FINGERPRINT)
    launch_now.wait_source(0, workspace, FINGERPRINT)
    launch_now.finish(out, workspace, FINGERPRINT, end_round=True)
    _check(workspace)
    _expect(out, torch.ones_like(out))


def pack_and_unpack(device: torch.device) -> None:
    x, w, _ = operands(device)
    spans, workspace = prepared(shapes.all_gather_matmul(x.shape, [w.shape], 0, 1), device)
    launch_now.pack(x, spans, workspace, FINGERPRINT)
    out = torch.full_like(x, torch.nan)
    launch_now.unpack(out, spans, workspace, FINGERPRINT)
    _check(workspace)
    _expect(out, x)


def push(device: torch.device) -> None:
    x, w, y = operands(device)
    spans, workspace = prepared(shapes.matmul_all_to_all(x.shape, w.shape, None, 0, 1, 1), device)
    launch_now.push(x, w, None, spans, workspace, FINGERPRINT)
    out = torch.full_like(y, torch.nan)
    launch_now.unpack(out, spans, workspace, FINGERPRINT)
    _check(workspace)
    _expect(out, y)


def push_and_reduce(device: torch.device) -> None:
    x, w, y = operands(device)
    spans, workspace = prepared(shapes.matmul_reduce_scatter(x.shape, w.shape, "sum", 0, 1), device)
    launch_now.push(x, w, None, spans, workspace, FINGERPRINT)
    out = torch.full_like(y, torch.nan)
    launch_now.reduce(out, spans, None, 1.0, workspace, FINGERPRINT)
    _check(workspace)
    _expect(out, y)


def pack_and_gather(device: torch.device) -> None:
    x, w, y = operands(device)
    spans, workspace = prepared(shapes.all_gather_matmul(x.shape, [w.shape], 0, 1), device)
    launch_now.pack(x, spans, workspace, FINGERPRINT)
    out = torch.full_like(y, torch.nan)
    launch_now.gather_matmul(out, w, None, spans, workspace, FINGERPRINT, end_round=True)
    _check(workspace)
    _expect(out, y)


KERNELS = (round_without_data, wait_source_and_finish, pack_and_unpack, push, push_and_reduce, pack_and_gather)


def operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and x @ w in small integers, so that sums are exact."""
    m, k, n = (512, 256, 512) if device.type != "cpu" else (16, 16, 32)
    generator = torch.Generator("cpu").manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    x, w = integers(m, k), integers(k, n)
    return tuple(t.to(device, DTYPE) for t in (x, w, x @ w))  # type: ignore[return-value]


def prepared(exchange: Exchange, device: torch.device) -> tuple[RoundSpans, Workspace]:
    (spans,) = exchange.rounds(exchange.chunk_numel)
    return spans, workspace_of(exchange.chunk_numel * DTYPE.itemsize, device)


def workspace_of(slot_bytes: int, device: torch.device) -> Workspace:
    return VirtualGroup(1, slot_bytes, device).workspaces[0]


def _expect(out: Tensor, want: Tensor) -> None:
    """Meta tensors pass: `compile_kernels` calls these functions on device "meta"."""
    assert out.is_meta or torch.equal(out, want), f"{(out != want).sum().item()} of {out.numel()} values are wrong"


def _check(workspace: Workspace) -> None:
    if workspace.device.type == "cuda":
        torch.cuda.synchronize()
    workspace.check("smoke")


if __name__ == "__main__":
    child.main(cases)
