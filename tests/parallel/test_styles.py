"""The styles of fusedcomm.parallel, layer by layer, beside torch's own of the same names."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.prepared_attention import CLOSE, GATHER, REDUCE, SCATTER
from tests.helpers.small_llama import whole
from tests.helpers.spies import Dispatched

K, N, BATCH, TOKENS = 8, 12, 2, 4


@dataclass(frozen=True)
class Case:
    style: str
    input: Placement | None = None
    output: Placement | None = None
    local: bool = True
    bias: bool = True
    ops: tuple[str, ...] = ()  # first those of the forward
    ran: str = ""

    def __str__(self) -> str:
        return (
            f"{self.style}-{self.input}-{self.output}"
            + ("" if self.local else "-dtensor")
            + ("" if self.bias else "-no-bias")
        )


HELD = "matmul_all_reduce in the backward, as all ranks hold x"
BY_FEATURES = "torch's own: x is placed as (Shard(dim=2),), where no tokens are to be gathered"
PARTIAL = "torch's own: the result is placed as Partial(sum)"
CASES = [
    Case("ColwiseParallel", Shard(1), ops=(GATHER, SCATTER), ran=GATHER),
    Case("ColwiseParallel", Shard(0), local=False, ops=(GATHER, SCATTER), ran=GATHER),
    Case("ColwiseParallel", Shard(-2), bias=False, ops=(GATHER, SCATTER), ran=GATHER),
    Case("ColwiseParallel", Shard(1), Replicate(), ops=(GATHER, SCATTER), ran=GATHER),
    Case("ColwiseParallel", Shard(1), Shard(1), local=False, ops=(GATHER, SCATTER), ran=GATHER),
    Case("ColwiseParallel", ops=(REDUCE,), ran=HELD),
    Case("ColwiseParallel", bias=False, local=False, ops=(REDUCE,), ran=HELD),
    Case("ColwiseParallel", Shard(-1), ran=BY_FEATURES),
    Case("RowwiseParallel", None, Shard(1), ops=(SCATTER, GATHER), ran=SCATTER),
    Case("RowwiseParallel", None, Shard(0), local=False, ops=(SCATTER, GATHER), ran=SCATTER),
    Case("RowwiseParallel", Shard(2), Shard(-2), bias=False, ops=(SCATTER, GATHER), ran=SCATTER),
    Case("RowwiseParallel", ops=(REDUCE,), ran=REDUCE),
    Case("RowwiseParallel", bias=False, local=False, ops=(REDUCE,), ran=REDUCE),
    Case("RowwiseParallel", Replicate(), ops=(REDUCE,), ran=REDUCE),
    Case("RowwiseParallel", Shard(1), Shard(1), ops=(SCATTER, GATHER), ran=SCATTER),
    Case("RowwiseParallel", None, Shard(-1), ran="torch's own: the result is placed as Shard(dim=-1)"),
    Case("RowwiseParallel", None, Partial(), local=False, bias=False, ran=PARTIAL),
]  # fmt: skip


def styled(styles: Any, case: Case, mesh: DeviceMesh, linear: nn.Linear | None = None) -> Any:
    torch.manual_seed(0)
    style = getattr(styles, case.style)(
        input_layouts=case.input, output_layouts=case.output, use_local_output=case.local
    )
    return torch_parallel.parallelize_module(linear or nn.Linear(K, N, case.bias), mesh, style)


def part(t: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    part = t.chunk(size, placement.dim)[rank] if isinstance(placement, Shard) else t
    return part.clone().requires_grad_()


def step(linear: nn.Linear, x: Tensor) -> tuple[list[Any], Dispatched]:
    with Dispatched() as spy:
        y = linear(x)
        local = y.to_local() if isinstance(y, DTensor) else y
        weights = torch.arange(1.0, 1.0 + local.numel()).view(local.shape).sin()
        if isinstance(y, DTensor):
            weights = DTensor.from_local(weights, y.device_mesh, y.placements)
        y.backward(weights)
    return [y.detach(), x.grad, *(p.grad for p in linear.parameters())], spy


@on_ranks(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_layer(rank: int, case: Case) -> None:
    """Result, gradients and placements are those of torch's style, and the ops are those that the class names."""
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(BATCH, TOKENS, K, generator=torch.Generator().manual_seed(1))
    placement = case.input or (Replicate() if case.style == "ColwiseParallel" else Shard(-1))
    wants, _ = step(styled(torch_parallel, case, mesh), part(x, placement, rank, 2))
    linear = styled(our_parallel, case, mesh)
    found, spy = step(linear, part(x, placement, rank, 2))
    for each, want in zip(found, wants, strict=True):
        assert isinstance(each, DTensor) == isinstance(want, DTensor)
        if isinstance(want, DTensor):
            assert each.placements == want.placements and each.shape == want.shape
        torch.testing.assert_close(whole(each), whole(want), **CLOSE)
    assert tuple(spy.names("fusedcomm")) == case.ops
    assert linear.ran == case.ran
    assert our_parallel.explain_layers(nn.Sequential(linear)) == {"0": case.ran}


@on_ranks(2)
def test_an_x_that_all_ranks_hold(rank: int) -> None:
    """A frozen x costs no communication, and second derivatives are those of the whole layer."""
    linear = styled(our_parallel, Case("ColwiseParallel"), init_device_mesh("cpu", (2,)))
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(6))
    if rank == 0:  # alone: nothing may wait for the other rank
        linear(x).sum().backward()
    dist.barrier()
    x.requires_grad_()
    weight, bias = (whole(t) for t in (linear.weight, linear.bias))
    answers = []
    for y, leaf in ((linear(x), linear.weight), (nn.functional.linear(x, weight.requires_grad_(), bias), weight)):
        grads = torch.autograd.grad(y.square().sum(), (x, leaf), create_graph=True)
        squares = [(g.to_local() if isinstance(g, DTensor) else g).square().sum() for g in grads]
        answers.append([whole(each) for each in torch.autograd.grad(sum(squares), (x, leaf))])
    torch.testing.assert_close(*answers, **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == linear.weight.grad.dtype == torch.float32
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"fusedcomm.* has no forward-mode derivatives"):
        linear(forward_ad.make_dual(x.detach(), x.detach()))


@on_ranks(2)
def test_features_that_cannot_be_cut_evenly(rank: int) -> None:
    """torch's own path runs, and says why."""
    mesh = init_device_mesh("cpu", (2,))
    ours = styled(our_parallel, Case("ColwiseParallel", Shard(0)), mesh, nn.Linear(K, 7))
    x = distribute_tensor(torch.randn(6, K), mesh, [Shard(0)])
    want = nn.functional.linear(x.full_tensor(), ours.weight.full_tensor(), ours.bias.full_tensor())
    y = DTensor.from_local(ours(x), mesh, [Shard(1)], shape=want.shape, stride=want.stride())
    torch.testing.assert_close(y.full_tensor(), want, **CLOSE)
    assert ours.ran == "torch's own: out_features must be divisible by 2, got 7"


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N, bias=False), nn.Linear(N, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


def uneven_step(styles: Any, mesh: DeviceMesh, tokens: int, prepared: bool, local: bool) -> tuple[list[Any], nn.Module]:
    """The result, and the gradients of x and of the parameters, of which each rank has its part."""
    torch.manual_seed(0)
    module, token_shards = FeedForward(), Shard(1)
    if prepared:
        prepare = styles.PrepareModuleInput(input_layouts=token_shards, desired_input_layouts=Replicate())
        torch_parallel.parallelize_module(module, mesh, prepare)
    up = styles.ColwiseParallel(input_layouts=Replicate() if prepared else token_shards)
    down = styles.RowwiseParallel(output_layouts=token_shards, use_local_output=local)
    torch_parallel.parallelize_module(module, mesh, {"gate": up, "up": up, "down": down})
    x = distribute_tensor(torch.randn(BATCH, tokens, K), mesh, [token_shards]).requires_grad_()
    y = module(x)
    part = y.to_local() if isinstance(y, DTensor) else y
    part.backward(torch.arange(1.0, 1.0 + part.numel()).view(part.shape).sin())
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())], module


@on_ranks(4)
@pytest.mark.parametrize("tokens", [5, 6, 7, 2])
@pytest.mark.parametrize(("prepared", "local"), [(False, True), (True, False)])
def test_tokens_that_cannot_be_cut_evenly(rank: int, tokens: int, prepared: bool, local: bool) -> None:
    """Parts are those of a DTensor, the last of which may be empty."""
    mesh = init_device_mesh("cpu", (4,))
    wants, _ = uneven_step(torch_parallel, mesh, tokens, prepared, local)
    found, module = uneven_step(our_parallel, mesh, tokens, prepared, local)
    for each, want in zip(found, wants, strict=True):
        assert isinstance(each, DTensor) == isinstance(want, DTensor)
        if isinstance(want, DTensor):
            assert (each.placements, each.shape, each.stride()) == (want.placements, want.shape, want.stride())
            each, want = each.to_local(), want.to_local()
        torch.testing.assert_close(each, want, **CLOSE)
    gather = f"{GATHER}, shared by 2 layers" if prepared else GATHER
    assert our_parallel.explain_layers(module) == {"gate": gather, "up": gather, "down": SCATTER}


@on_ranks(2)
@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_an_x_on_another_mesh_is_refused(rank: int, style: str) -> None:
    """The first placement of x is that of another dim: an op would gather or reduce over the wrong ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("other_data", "other_tensor"))
    layout = Shard(0)
    x = DTensor.from_local(torch.ones(4, K), mesh, [layout, Replicate()])
    for styles in (torch_parallel, our_parallel):
        linear = styled(styles, Case(style, layout, layout), mesh["other_tensor"])
        with pytest.raises((RuntimeError, ValueError), match=r"mesh|placements"):
            linear(x)


@on_ranks(2)
def test_an_x_that_no_op_takes(rank: int) -> None:
    """One dim, and complex numbers: torch's own path. float64 stays float64 under autocast."""
    mesh = init_device_mesh("cpu", (2,))
    for x in (torch.randn(K), torch.randn(3, K, dtype=torch.complex64), torch.randn(3, K, dtype=torch.float64)):
        x = x.clone().requires_grad_()
        for style in ("ColwiseParallel", "RowwiseParallel"):
            case = Case(style, Replicate())
            stock, ours = (styled(styles, case, mesh).to(x.dtype) for styles in (torch_parallel, our_parallel))
            with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float64):
                want, found = stock(x), ours(x)
            assert found.dtype == want.dtype == x.dtype
            grads = [torch.autograd.grad(y.abs().sum(), x)[0] for y in (want, found)]
            torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_a_second_style_and_a_plain_weight_are_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for style, x in (("ColwiseParallel", torch.ones(2, K)), ("RowwiseParallel", torch.ones(2, K // 2))):
        linear = styled(our_parallel, Case(style), mesh)
        with pytest.raises(RuntimeError, match="only be called once"):
            styled(our_parallel, Case(style), mesh, linear)
        with pytest.raises(TypeError, match="weight must be the DTensor that the style has made, got a Tensor"):
            torch.func.functional_call(linear, {"weight": linear.weight.to_local().detach()}, x)


@on_ranks(2)
def test_other_modules_are_torch_s_matter(rank: int) -> None:
    """An embedding, and a subclass of nn.Linear whose forward may do anything."""

    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    mesh = init_device_mesh("cpu", (2,))
    for make, x in ((lambda: nn.Embedding(6, K), torch.arange(6).view(2, 3)), (lambda: Twice(K, K), torch.ones(2, K))):
        for style in (our_parallel.ColwiseParallel, our_parallel.RowwiseParallel):
            torch.manual_seed(0)
            plain = make()
            kind, want = type(plain), plain(x)
            layouts = {"input_layouts": Replicate(), "output_layouts": Replicate()}
            styled = torch_parallel.parallelize_module(plain, mesh, style(**layouts))
            assert type(styled) is kind
            torch.testing.assert_close(styled(x), want, **CLOSE)


def twice(linear: Any, name: str) -> None:
    inner = getattr(linear, name)
    setattr(linear, name, lambda *args: inner(*args) * 2)


def minus_mean(linear: nn.Linear) -> None:  # of all features, or of this rank's
    linear.register_forward_hook(lambda module, args, y: y - y.mean(-1, keepdim=True))


CHANGES: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "forward": (lambda m: twice(m, "forward"), "its forward is replaced"),
    "compiled": (lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")), "its forward is replaced"),
    "_call_impl": (lambda m: twice(m, "_call_impl"), "its _call_impl is replaced"),
    "hook": (minus_mean, "it has forward or backward hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda *args: None), "it has forward or backward hooks"),
}


def check_left(
    rank: int, case: Case, why: str | None, change: Callable[[nn.Linear], Any] = id, derive: Any = lambda kind: kind
) -> None:
    placement = case.input or (Replicate() if case.style == "ColwiseParallel" else Shard(-1))
    x = torch.randn(BATCH, TOKENS, K, generator=torch.Generator().manual_seed(1))
    answers = []
    for styles in (torch_parallel, our_parallel):
        torch.manual_seed(0)
        linear = nn.Linear(K, N, case.bias)
        change(linear)
        kind = SimpleNamespace(**{case.style: derive(getattr(styles, case.style))})
        linear = styled(kind, case, init_device_mesh("cpu", (2,)), linear)
        answers.append(step(linear, part(x, placement, rank, 2))[0])
    for found, want in zip(*reversed(answers), strict=True):
        torch.testing.assert_close(whole(found), whole(want), **CLOSE)
    if why is not None:
        assert our_parallel.explain_layers(nn.Sequential(linear)) == {"0": f"torch's own: {why}"}


LEFT = [case for case in CASES if case.input in (None, Shard(1)) and case.output in (None, Shard(1)) and case.local]


@on_ranks(2)
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_torch_s_matter(rank: int, name: str) -> None:
    change, why = CHANGES[name]
    for case in LEFT:
        check_left(rank, case, why, change)
    if name == "forward":
        with mock.patch.object(nn.Linear, "forward", lambda self, x: 2 * (x @ self.weight.mT + self.bias)):
            check_left(rank, LEFT[0], "Linear.forward is patched")
    if name == "backward hook":  # on one rank alone
        why = why if rank == 0 else "another rank's is not plain"
        check_left(rank, LEFT[0], why, change if rank == 0 else id)


def doubled(kind: Any, method: str) -> Any:
    inner = getattr(kind, method)
    return staticmethod(lambda a, b, c, d, e: inner(a, b, c, d, e) * 2)  # torch counts them


DERIVED: dict[str, tuple[Callable[[Any, str], Any], str]] = {
    "derived": (lambda kind, name: type("Mine", (kind,), {name: doubled(kind, name)}), "Mine has a {1} of its own"),
    "instance": (
        lambda kind, name: lambda **options: put(kind(**options), name, doubled(kind, name).__func__),
        "{0} has a {1} of its own",
    ),
    "patched": (
        lambda kind, name: put(kind, name, doubled(kind, name)) if kind.__module__.startswith("torch.") else kind,
        "{0}.{1} is patched",
    ),
}


def put(on: Any, name: str, value: Any) -> Any:
    setattr(on, name, value)
    return on


@on_ranks(2)
@pytest.mark.parametrize("how", DERIVED)
def test_styles_that_prepare_in_their_own_way_are_torch_s(rank: int, how: str) -> None:
    derive, why = DERIVED[how]
    for method in ("_prepare_input_fn", "_prepare_output_fn"):
        for case in LEFT:
            style = getattr(torch_parallel, case.style)
            with mock.patch.object(style, method, getattr(style, method)):  # undoes what is put there
                setattr(style, method, staticmethod(getattr(style, method)))
                check_left(rank, case, why.format(case.style, method), derive=lambda kind, m=method: derive(kind, m))


@on_ranks(2)
@pytest.mark.parametrize("method", ["_prepare_input_fn", "_prepare_input_arg", "_prepare_input_kwarg_fn"])
def test_inputs_prepared_in_their_own_way_are_torch_s(rank: int, method: str) -> None:
    def tripled(kind: Any) -> Any:
        def mine(self: Any, *args: Any) -> Any:
            found = getattr(kind, method)(self, *args)
            return pytree.tree_map_only(Tensor, lambda t: 3 * t, found)

        return type("Mine", (kind,), {method: mine})

    mesh, answers = init_device_mesh("cpu", (2,)), []
    for styles in (torch_parallel, our_parallel):
        torch.manual_seed(0)
        plan = dict.fromkeys(["gate", "up"], styles.ColwiseParallel()) | {
            "": tripled(styles.PrepareModuleInput)(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "down": styles.RowwiseParallel(output_layouts=Shard(1)),
        }
        module = torch_parallel.parallelize_module(FeedForward(), mesh, plan)
        answers.append(step(module, part(torch.ones(BATCH, TOKENS, K).cumsum(1), Shard(1), rank, 2))[0])
    for found, want in zip(*reversed(answers), strict=True):
        torch.testing.assert_close(whole(found), whole(want), **CLOSE)
    assert our_parallel.explain_layers(module)[""] == f"torch's own: Mine has a {method} of its own"


@on_ranks(2)
def test_names_are_torch_s(rank: int) -> None:
    """Whatever a program imports from torch.distributed.tensor.parallel is here too."""
    missing = set(torch_parallel.__all__) - set(our_parallel.__all__)
    assert not missing
    assert issubclass(our_parallel.RowwiseParallel, torch_parallel.RowwiseParallel)
