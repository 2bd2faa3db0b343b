"""Users' programs on 2 processes that share one GPU: torch.compile, uneven parts, parallel styles, a training step.

Where ranks exchange anything outside of the ops, they do it on the host: gloo does not take all CUDA tensors.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fusedcomm
import fusedcomm.compile
import fusedcomm.parallel
from fusedcomm.bench.gpu_check import child
from fusedcomm.bench.gpu_check.llama_layer import MODELS, Layer, Sizes, styled
from fusedcomm.bench.gpu_check.pools import Pools
from fusedcomm.bench.start_program import ProgramData, ProgramSizes, matmul_and_reshard_heads, no_caches, same_program
from fusedcomm.plan.geometry.cut import chunk_parts

GROUP_SIZE = 2
DTYPE = torch.bfloat16
CALLS = 4  # the third of a kind and later ones run natively
TOLERANCE = 3e-2  # share of the norm
CHUNKED = {"FUSEDCOMM_ALGORITHM": "chunked"}  # in autograd's threads too
SIZES = {"cuda": Sizes(), "cpu": Sizes(1, 8, 32, 1, 16, 32)}
LAYERS, VOCABULARY, STEPS, LEARNING_RATE = 2, 64, CALLS, 0.1


def cases(device: torch.device) -> child.Cases:
    case = partial(Pools(device).case, GROUP_SIZE, env=CHUNKED)
    return {
        "compiled fused": case(compiled, "fused"),
        "compiled chunked": case(compiled, "chunked"),
        "uneven chunked": case(uneven),
        "float8 along K": case(scaled),
        **{f"parallel styles {model}": case(parallel_styles, model) for model in MODELS},
        "training": case(training),
    }


def compiled(rank: int, device_type: str, algorithm: str) -> dict[str, Any]:
    """The start program under torch.compile: every exchange fused, forward and backward, results and gradients."""
    sizes = ProgramSizes(3, 2, 1024, 512, 1024) if device_type == "cuda" else ProgramSizes(1, 1, 8, 16, 32, 4)
    data = ProgramData(sizes, DTYPE, torch.device(device_type))
    inputs = [*data.xs, *data.ws]
    for t in inputs:
        t.requires_grad_()
    with fusedcomm.force_algorithm(algorithm, strict=True), no_caches(), fusedcomm.compile.enabled() as report:
        program = torch.compile(same_program(matmul_and_reshard_heads), fullgraph=True)
        for _ in range(CALLS):
            ys = [y.wait() if hasattr(y, "wait") else y for y in program(data.xs, data.ws, data.mesh, sizes.heads)]
            grads = torch.autograd.grad(ys, inputs, [torch.ones_like(y) for y in ys])
        fusedcomm.synchronize()
    wrong = data.check("compiled", [y.detach() for y in ys])
    assert wrong is None, wrong
    for x, w, grad_x, grad_w in zip(data.xs, data.ws, grads[: sizes.pairs], grads[sizes.pairs :], strict=True):
        ones = torch.ones(*x.shape[:-1], w.shape[-1], device=x.device)
        _near("gradient of x", grad_x, ones @ w.float().mT)
        _near("gradient of w", grad_w, x.float().mT @ ones)
    states = [each.status for each in report.collectives]
    assert states.count("fused") == len(states) == 2 * sizes.pairs, str(report)
    return {"fused": len(states)}


def uneven(rank: int, device_type: str) -> dict[str, Any]:
    """Tokens and heads that the ranks do not divide: the projections into and out of attention, and gradients."""
    tokens, heads, dim, k = (1023, 15, 64, 512) if device_type == "cuda" else (7, 3, 8, 16)
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(device_type, DTYPE)

    parts, columns = (chunk_parts(each, GROUP_SIZE) for each in (tokens, heads))
    own = slice(parts.starts[rank], parts.starts[rank] + parts.sizes[rank])
    whole, w, out_w = integers(tokens, k), integers(k, heads * dim), integers(heads * dim, k)
    x = whole[own].clone().requires_grad_()
    with fusedcomm.force_algorithm("chunked", strict=True):
        y = fusedcomm.matmul_all_to_all(x, w, 0, 1, out_shape=[heads, dim], gather_splits=parts.sizes)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        z = fusedcomm.all_to_all_matmul(y.detach(), out_w, 1, 0, gather_splits=columns.sizes)
        fusedcomm.synchronize()
    want = (whole.float() @ w.float()).to(DTYPE)
    assert torch.equal(y, want.view(tokens, heads, dim).split(columns.sizes, 1)[rank]), "wrong values"
    _near("gradient of x", grad, w.float().sum(1).expand_as(x))
    _near("projection out of attention", z, want[own].float() @ out_w.float())
    return {"tokens": parts.sizes, "heads": columns.sizes}


def scaled(rank: int, device_type: str) -> dict[str, int]:
    """Gathered along K, float8 products are added in float32, and copied to the result when all have come."""
    rows, k, n = (256, 512, 128) if device_type == "cuda" else (8, 32, 16)
    one = torch.ones((), device=device_type)
    with fusedcomm.force_algorithm("chunked", strict=True):
        for seed in range(CALLS):
            generator = torch.Generator().manual_seed(seed)
            x, w = (torch.randint(-2, 3, shape, generator=generator).float() for shape in ((rows, k), (n, k)))
            own, weight = (t.to(device_type, torch.float8_e4m3fn) for t in (x.chunk(GROUP_SIZE, 1)[rank], w))
            y = fusedcomm.scaled_all_gather_matmul(own.contiguous(), weight.mT, one, one, gather_dim=1)
            fusedcomm.synchronize()
            assert torch.equal(y.cpu(), (x @ w.mT).to(y.dtype)), f"wrong values in call {seed}"
    return {"calls": CALLS}


def parallel_styles(rank: int, device_type: str, model: str) -> dict[str, str]:
    """Forward and gradients of part of a Llama, sequence parallel, against the whole of it in float32."""
    sizes, device = SIZES[device_type], torch.device(device_type)
    torch.manual_seed(0)
    module = styled(model, sizes, device).to(DTYPE)
    torch.manual_seed(0)
    plain = MODELS[model](sizes, GROUP_SIZE).to(device)
    shape = (sizes.batch, sizes.tokens * GROUP_SIZE, sizes.hidden)
    x, grad = (torch.randn(shape).to(device, DTYPE) for _ in range(2))
    mine = [each.chunk(GROUP_SIZE, 1)[rank].contiguous() for each in (x, grad)]
    for _ in range(CALLS):
        y, grad_x, *grads = _forward_and_backward(module, *mine)
    want_y, want_x, *wants = _forward_and_backward(plain, x.float(), grad.float())
    for name, found, want in (("result", y, want_y), ("gradient of x", grad_x, want_x)):
        _near(name, found, want.chunk(GROUP_SIZE, 1)[rank])
    for (name, _), found, want in zip(plain.named_parameters(), grads, wants, strict=True):
        _near(f"gradient of {name}", own_part(found), like_part(want, found, rank))
    return fusedcomm.parallel.explain_layers(module)


def training(rank: int, device_type: str) -> dict[str, Any]:
    """Steps of SGD of a small Llama, its layers under the parallel styles, against the same in one process."""
    sizes, device = SIZES[device_type], torch.device(device_type)
    shared, plain = (_llama(sizes, device, sharded) for sharded in (True, False))
    tokens = torch.randint(VOCABULARY, (sizes.batch, GROUP_SIZE * sizes.tokens + 1)).to(device)
    starts = [each.detach().clone() for each in plain.parameters()]
    losses = []
    for _ in range(STEPS):
        want = _step(plain, tokens, slice(None))
        part = slice(rank * sizes.tokens, (rank + 1) * sizes.tokens)
        loss = _host_sum(_step(shared, tokens, part).detach())
        _near("loss", loss, want.detach())
        losses.append(loss.item())
    for (name, found), want, start in zip(shared.named_parameters(), plain.parameters(), starts, strict=True):
        local = found.to_local() if isinstance(found, DTensor) else found
        _near(f"change of {name}", local - like_part(start, found, rank), like_part(want - start, found, rank))
    assert losses[-1] < losses[0], f"the loss does not fall: {losses}"
    return {"losses": losses, "layers": fusedcomm.parallel.explain_layers(shared)}


def _llama(sizes: Sizes, device: torch.device, sharded: bool) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [styled("layer", sizes, device) if sharded else Layer(sizes, GROUP_SIZE) for _ in range(LAYERS)]
    ends = nn.Embedding(VOCABULARY, sizes.hidden), nn.Linear(sizes.hidden, VOCABULARY, bias=False)
    return nn.Sequential(ends[0], *layers, ends[1]).to(device)


def _step(model: nn.Sequential, tokens: Tensor, part: slice) -> Tensor:
    """This rank's share of the loss, before the step. ``part``: its tokens."""
    given, wanted = tokens[:, :-1], tokens[:, 1:]
    scores = model(given[:, part])
    loss = F.cross_entropy(scores.flatten(0, 1), wanted[:, part].flatten(), reduction="sum") / wanted.numel()
    loss.backward()
    sharded = any(isinstance(each, DTensor) for each in model.parameters())
    with torch.no_grad():
        for each in model.parameters():
            assert each.grad is not None
            grad = own_part(each.grad) if isinstance(each, DTensor) or not sharded else _host_sum(each.grad)
            (each.to_local() if isinstance(each, DTensor) else each).sub_(LEARNING_RATE * grad)
            each.grad = None
    return loss


def own_part(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, with partial sums added up."""
    if not isinstance(t, DTensor):
        return t
    (placement,) = t.placements
    return _host_sum(t.to_local()) if placement.is_partial() else t.to_local()


def like_part(whole: Tensor, t: Tensor, rank: int) -> Tensor:
    """The part of ``whole`` that this rank has of ``t``."""
    if not isinstance(t, DTensor) or not t.placements[0].is_shard():
        return whole
    return whole.chunk(GROUP_SIZE, t.placements[0].dim)[rank]  # type: ignore[attr-defined]


def _host_sum(t: Tensor) -> Tensor:
    total = t.detach().float().cpu().clone()
    dist.all_reduce(total)
    return total.to(t)


def _forward_and_backward(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    given = x.detach().requires_grad_()
    y = module(given)
    y = y.to_local() if isinstance(y, DTensor) else y
    return [y.detach(), *torch.autograd.grad(y, [given, *module.parameters()], grad)]


def _near(name: str, found: Tensor, want: Tensor) -> None:
    error = ((found.float() - want.float()).norm() / want.float().norm()).item()
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"  # False for NaN
