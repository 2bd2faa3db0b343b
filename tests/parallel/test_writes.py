"""Writes between forward and backward, and between layers that share x: to DTensors, their local tensors, and plain x.

No result and no gradient is another than of the values at each call. A backward raises where torch's styles raise, or
where they would give a wrong gradient without an error.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fusedcomm
import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched, pushed, saved_for_backward

D, SCALE = 8, 3.0
ALIASES_X0 = (
    "shared-held",
    "column",
    "column-held",
    "row",
    "row-tokens",
)  # the layers' x is memory of the program's x0


class Program(NamedTuple):
    kind: str
    events: Sequence[str]  # q and k: calls; others: writes
    used: Sequence[int]  # the calls whose results are in the loss
    frozen: Sequence[str] = ()
    x_grad: bool = True


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.program = nn.Linear(D, D, bias=False), nn.Linear(D, D), program
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in program.frozen)

    def forward(self, x: Tensor, x0: list[Tensor]) -> list[Tensor]:
        results = []
        for event in self.program.events:
            if event in "qk":
                results.append(getattr(self, event)(x))
                continue
            name = event.removesuffix(".local")
            target = {"x": x, "x0": x0[0]}.get(name)
            target = self.get_parameter(name) if target is None else target
            with torch.no_grad():
                (target.to_local() if event != name and isinstance(target, DTensor) else target).mul_(SCALE)
        return results


def run(styles: Any, program: Program, rank: int) -> tuple[list[Tensor], list[Tensor | None] | str]:
    """Results, and the gradients of x and the parameters, or the error of the backward."""
    mesh, kind, model = init_device_mesh("cpu", (2,)), program.kind, Model(program)
    held, dim = kind.endswith("held"), -1 if kind.startswith("row") else 1
    whole = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1))
    x0 = whole if held else whole.chunk(2, dim)[rank].clone()
    x = x0.requires_grad_(program.x_grad)
    layout = Replicate() if held else Shard(dim)
    if kind.endswith("dtensor"):
        x = DTensor.from_local(x0, mesh, [layout])
    row = styles.RowwiseParallel(output_layouts=Shard(1) if kind == "row-tokens" else Replicate())
    style = row if kind.startswith("row") else styles.ColwiseParallel(
        input_layouts=Replicate() if "shared" in kind else layout
    )  # fmt: skip
    if kind.startswith("shared"):
        prepare = styles.PrepareModuleInput(
            input_layouts=(layout, None), desired_input_layouts=(Replicate(), None)
        )  # fmt: skip
        styles.parallelize_module(model, mesh, prepare)
    styles.parallelize_module(model, mesh, {"q": style, "k": style})
    ys = model(x, [x0])
    found = [y.detach().clone() for y in ys]
    try:
        sum(((ys[i] * (i + 1)).square() if i % 2 else ys[i] * 2).sum() for i in program.used).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return found, str(error)
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return found, [x0.grad, *grads]


def expected(program: Program, rank: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """By one process, which writes nothing in place."""
    model, kind = Model(program), program.kind
    leaf = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(1)).requires_grad_(program.x_grad)
    values: dict[str, Tensor] = {"x": leaf, **dict(model.named_parameters())}
    ys = []
    for event in program.events:
        if event in "qk":
            ys.append(nn.functional.linear(values["x"], values[f"{event}.weight"], values.get(f"{event}.bias")))
            continue
        name = event.removesuffix(".local")
        name = "x" if name == "x0" and kind in (*ALIASES_X0, "column-dtensor", "row-dtensor") else name
        if name in values:
            values[name] = values[name] + ((SCALE - 1) * values[name]).detach()
    loss = [((ys[i] * (i + 1)).square() if i % 2 else ys[i] * 2).sum() for i in program.used]
    sum(loss, torch.zeros(())).backward()
    dim = {"row": None, "row-dtensor": None, "row-tokens": 1}.get(kind, -1)
    parts = [y.detach() if dim is None else y.detach().chunk(2, dim)[rank] for y in ys]
    dim = -1 if kind.startswith("row") else 1
    grad = leaf.grad if leaf.grad is None or kind.endswith("held") else leaf.grad.chunk(2, dim)[rank]
    return parts, [grad, *(p.grad for p in model.parameters())]


def close(found: Sequence[Tensor | None], wants: Sequence[Tensor | None]) -> bool:
    pairs = zip(found, wants, strict=True)
    return all(
        torch.allclose(f, w, rtol=1e-4, atol=1e-4) if f is not None and w is not None else f is w for f, w in pairs
    )


def check(program: Program, rank: int) -> str:
    """Whether the backward was right, or raised."""
    wants, grads = expected(program, rank)
    _, stock = run(torch_parallel, program, rank)
    results, ours = run(our_parallel, program, rank)
    assert close(results, wants), program
    if isinstance(ours, str):
        assert isinstance(stock, str) or not close(stock, grads), f"raises, torch is right: {program}"
        return "raised"
    assert close(ours, grads), f"wrong gradient, torch's: {stock if isinstance(stock, str) else '-'}: {program}"
    return "right"


CASES = {  # a write to each, and what the backward does
    Program("shared", ("q", "k.weight.local", "k"), (0, 1)): "right",
    Program("shared", ("q", "k.weight", "k"), (0, 1)): "right",
    Program("shared", ("q", "x.local", "k"), (0, 1)): "raised",
    Program("shared", ("q", "x", "k"), (1,)): "right",
    Program("shared", ("x", "q", "k", "x0"), (0, 1)): "right",
    Program("shared-held", ("q", "x.local", "k"), (0, 1)): "raised",
    Program("shared-held", ("q", "x0", "k"), (1,)): "right",
    Program("shared-held", ("q", "x", "k"), (0,)): "raised",
    Program("shared-held", ("q", "k", "q.weight"), (0, 1)): "raised",
    Program("shared-held", ("q", "k", "q.weight"), (0, 1), x_grad=False): "right",
    Program("column", ("q", "x0"), (0,)): "right",
    Program("column", ("q", "q.weight"), (0,), ("q.weight",)): "raised",
    Program("column-held", ("q", "x0"), (0,), ("q.weight",)): "right",
    Program("row-dtensor", ("q", "x"), (0,)): "raised",
    Program("row-dtensor", ("q", "x.local"), (0,)): "raised",
    Program("row-dtensor", ("q", "x"), (0,), ("q.weight",)): "right",
    Program("row-tokens", ("k", "k.weight.local", "k.bias"), (0,)): "raised",
    Program("row", ("k", "k.weight"), (0,), x_grad=False): "right",
}


@on_ranks(2)
def test_writes(rank: int) -> None:
    for program, want in CASES.items():
        assert check(program, rank) == want, program


def layers() -> dict[str, tuple[Any, Tensor]]:
    mesh, whole = init_device_mesh("cpu", (2,)), torch.ones(2, 4, 8)
    column, row, tokens = our_parallel.ColwiseParallel, our_parallel.RowwiseParallel, Shard(1)
    cases = {
        "column": (column(), whole),
        "column of tokens": (column(input_layouts=tokens), whole[:, :2]),
        "row": (row(), whole[..., :4]),
        "row to tokens": (row(output_layouts=tokens), whole[..., :4]),
    }
    return {
        name: (our_parallel.parallelize_module(nn.Linear(8, 8), mesh, style), x) for name, (style, x) in cases.items()
    }


@on_ranks(2)
@pytest.mark.parametrize("local", [False, True])
def test_weights_of_the_layers(rank: int, local: bool) -> None:
    """A weight is needed for the gradient of x alone, and not where autocast has made a copy of it."""
    for name, (layer, x) in layers().items():
        for x_grad, autocast in ((True, False), (False, False), (True, True)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = layer(x.clone().requires_grad_(x_grad))
            with torch.no_grad():
                (layer.weight.to_local() if local else layer.weight).mul_(SCALE)
            if x_grad and not autocast:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.sum().backward()
            else:
                y.sum().backward()
                assert layer.weight.grad is not None, name


# What layers keep for the backward and send: the table in docs/parallel.md.
R, BATCH, TOKENS, K, H = 2, 2, 6, 8, 10  # R ranks; M = BATCH * TOKENS
WHOLE = BATCH * TOKENS * K * 4  # bytes of M x K elements of float32
PART = WHOLE * (R - 1) // R


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, H, bias=False), nn.Linear(K, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.up(x)  # an addition keeps nothing


def up(styles: Any) -> nn.Module:
    prepare = styles.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    plan = {"": prepare, "gate": styles.ColwiseParallel(), "up": styles.ColwiseParallel()}
    return torch_parallel.parallelize_module(Up(), init_device_mesh("cpu", (R,)), plan)


def down(styles: Any) -> nn.Module:
    style = styles.RowwiseParallel(output_layouts=Shard(1))
    return torch_parallel.parallelize_module(nn.Linear(H, K, bias=False), init_device_mesh("cpu", (R,)), style)


def kept(saved: list[Tensor], parameters: list[Tensor]) -> int:
    """Bytes of what is saved, each memory once, without the parameters."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in saved]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}
    own = {p.to_local().untyped_storage().data_ptr() for p in parameters if isinstance(p, DTensor)}
    return sum(num_bytes for address, num_bytes in storages.items() if address not in own)


@on_ranks(R)
@pytest.mark.parametrize("by_ops", [False, True], ids=["torch", "fusedcomm"])
@pytest.mark.parametrize(
    ("make", "width", "tokens", "keeps"),
    [(up, K, TOKENS // R, WHOLE), (down, H // R, TOKENS, BATCH * TOKENS * H * 4 // R)],
    ids=["gather", "reduce_scatter"],
)
def test_kept_and_sent(rank: int, by_ops: bool, make: Any, width: int, tokens: int, keeps: int) -> None:
    module = make(our_parallel if by_ops else torch_parallel)
    x = torch.randn(BATCH, tokens, width, requires_grad=True)
    with fusedcomm.force_algorithm("chunked", strict=True):
        with pushed() as fused, Dispatched() as plain, saved_for_backward() as saved:
            y = module(x)
        sent = fused.num_bytes, plain.collective_bytes(R)
        with pushed() as fused_back, Dispatched() as plain_back:
            y.sum().backward()
        sent_back = fused_back.num_bytes, plain_back.collective_bytes(R)
    assert kept(saved, list(module.parameters())) == keeps
    assert sent == sent_back == ((PART, 0) if by_ops else (0, PART))
