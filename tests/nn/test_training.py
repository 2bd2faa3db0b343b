"""Training with fusedcomm.nn: loss, every gradient and every weight equal to the same model on one process.

The oracle is the plain model with all tokens, on every rank; no fused op and no collective takes part in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedcomm
from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, UlyssesOut, UlyssesQKV, sum_replicated_gradients
from tests.helpers.nn_layers import whole
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

BATCH, TOKENS, HIDDEN, HEADS, INNER, STEPS = 2, 24, 32, 8, 64, 5
# float32 has 1.2e-7; sums of up to a few hundred terms run in another order, of gradients between 1e-3 and 1.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Case:
    name: str
    parts: tuple[str, ...]  # "attention", "mlp"
    kv_heads: int = HEADS
    bias: bool = True
    sequence: bool = True  # tokens are sharded outside the layers

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("ulysses", ("attention",)),
    Case("ulysses-no-bias", ("attention",), bias=False),
    Case("ulysses-gqa", ("attention",), kv_heads=4),
    Case("ulysses-gqa-no-bias", ("attention",), kv_heads=4, bias=False),
    Case("mlp-sequence", ("mlp",)),
    Case("mlp-sequence-no-bias", ("mlp",), bias=False),
    Case("mlp", ("mlp",), sequence=False),
    Case("mlp-no-bias", ("mlp",), sequence=False, bias=False),
    Case("block", ("attention", "mlp")),
]
BY_NAME = {case.name: case for case in CASES}

# The ops of one forward and of its backward, in order.
OPS = {
    "ulysses": (["matmul_all_to_all", "all_to_all_matmul"], ["matmul_all_to_all", "all_to_all_matmul"]),
    "ulysses-gqa": (
        ["matmul_all_to_all", "matmul_all_to_all", "all_to_all_matmul"],
        ["matmul_all_to_all", "all_to_all_matmul", "all_to_all_matmul"],
    ),
    "mlp-sequence": (["all_gather_matmul", "matmul_reduce_scatter"], ["all_gather_matmul", "matmul_reduce_scatter"]),
    "mlp": (["matmul_all_reduce"], ["matmul_all_reduce"]),
    "block": (
        ["matmul_all_to_all", "all_to_all_matmul", "all_gather_matmul", "matmul_reduce_scatter"],
        ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_to_all", "all_to_all_matmul"],
    ),
}

# Plain parameters of the layers that see a rank's tokens alone.
PARTIAL = {
    "ulysses": {"attention.qkv.weight", "attention.qkv.bias", "attention.out.weight", "attention.out.bias"},
    "mlp-sequence": set(),
    "mlp": set(),
}


class PlainQKV(nn.Linear):
    kv_heads = HEADS

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        heads = super().forward(x).unflatten(-1, (HEADS + 2 * self.kv_heads, -1))
        return heads.split([HEADS, self.kv_heads, self.kv_heads], -2)


class PlainOut(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(-2))


class Attention(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv: Any = PlainQKV(HIDDEN, (HEADS + 2 * case.kv_heads) * (HIDDEN // HEADS), case.bias)
        self.qkv.kv_heads = case.kv_heads
        self.out: Any = PlainOut(HIDDEN, HIDDEN, case.bias)
        self.gqa = case.kv_heads != HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm(x)))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.gqa)
        return x + self.out(heads.transpose(1, 2))


class MLP(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up: Any = nn.Linear(HIDDEN, INNER, case.bias)
        self.down: Any = nn.Linear(INNER, HIDDEN, case.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        if "attention" in case.parts:
            self.attention = Attention(case)
        if "mlp" in case.parts:
            self.mlp = MLP(case)
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = checkpoint(part, x, use_reentrant=False) if self.checkpointed else part(x)
        return x


def parallel(plain: Model, case: Case) -> Model:
    model = copy.deepcopy(plain)
    if "attention" in case.parts:
        model.attention.qkv = UlyssesQKV.from_linear(model.attention.qkv, num_heads=HEADS, num_kv_heads=case.kv_heads)
        model.attention.out = UlyssesOut.from_linear(model.attention.out, num_heads=HEADS)
    if "mlp" in case.parts:
        dim = 1 if case.sequence else None
        model.mlp.up = ColumnParallelLinear.from_linear(model.mlp.up, sequence_dim=dim)
        model.mlp.down = RowParallelLinear.from_linear(model.mlp.down, sequence_dim=dim)
    return model


def norms(model: Model) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if ".norm." in name]


class Side:
    """One of the two that train side by side: the plain model with all tokens, or the parallel one with this rank's."""

    def __init__(self, model: Model, x: Tensor, target: Tensor) -> None:
        self.model, self.target = model, target
        self.x = x.clone().requires_grad_()
        # AdamW divides by a gradient's size: where that is zero but for rounding, as k's bias, it would compare noise.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def forward(self, autocast: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = self.model(self.x)
        return (out.to(self.target.dtype) - self.target).square().sum() / (BATCH * TOKENS * HIDDEN)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.x.grad = None


def sides(rank: int, case: Case, seed: int = 0) -> tuple[Side, Side]:
    size = dist.get_world_size()
    torch.manual_seed(seed)
    plain = Model(case)
    x, target = torch.randn(2, BATCH, TOKENS, HIDDEN)
    mine = [t.chunk(size, 1)[rank] if case.sequence else t for t in (x, target)]
    return Side(plain, x, target), Side(parallel(plain, case), *mine)


def mine_of(name: str, t: Tensor, rank: int, case: Case) -> Tensor:
    """This rank's part of what the plain model has under that name; parameters are compared whole."""
    return t.chunk(dist.get_world_size(), 1)[rank] if name == "x" and case.sequence else t


def gradients(side: Side) -> Iterator[tuple[str, Tensor]]:
    yield "x", side.x.grad
    for name, parameter in side.model.named_parameters():
        assert parameter.grad is not None, name
        yield name, whole(parameter.grad)


def total_of(loss: Tensor, case: Case) -> Tensor:
    total = loss.detach().clone()
    if case.sequence:
        dist.all_reduce(total)
    return total


def sum_gradients(side: Side, case: Case) -> None:
    sum_replicated_gradients(side.model, also=norms(side.model) if case.sequence else ())


def collectives(spy: Dispatched) -> list[str]:
    return [*spy.names("c10d"), *spy.names("_c10d_functional")]


@contextmanager
def fused_only(case: Case, kind: str | None) -> Iterator[Dispatched]:
    """Check that chunked runs, and nothing communicates but fusedcomm's ops; with ``kind``, exactly those of OPS.

    A bias of the rows of a sequence has its gradient summed by an all_reduce of its own.
    """
    with fusedcomm.force_algorithm("chunked", strict=True), Dispatched() as spy:
        yield spy
    assert collectives(spy) == ["all_reduce"] * ("mlp" in case.parts and case.sequence and case.bias)
    assert spy.names("fusedcomm")
    if kind is not None:
        assert spy.names("fusedcomm") == OPS[kind][0] + OPS[kind][1]


def check_training(rank: int, case: Case, checkpointed: bool) -> None:
    plain, ours = sides(rank, case)
    ours.model.checkpointed = checkpointed
    kind = case.name.removesuffix("-no-bias")
    for _ in range(STEPS):
        want = plain.forward(autocast=False)
        want.backward()
        with fused_only(case, None if checkpointed else kind) as spy:
            loss = ours.forward(autocast=False)
            assert spy.names("fusedcomm") == OPS[kind][0]
            loss.backward()
        sum_gradients(ours, case)
        torch.testing.assert_close(total_of(loss, case), want.detach(), **CLOSE)
        wants = dict(gradients(plain))
        assert wants.keys() == dict(gradients(ours)).keys()
        for name, grad in gradients(ours):
            assert wants[name].abs().max() > 100 * CLOSE["atol"], f"{name}: nothing to compare"
            torch.testing.assert_close(grad, mine_of(name, wants[name], rank, case), **CLOSE, msg=f"gradient: {name}")
        plain.step()
        ours.step()
    for name, parameter in ours.model.named_parameters():
        want = plain.model.get_parameter(name)
        torch.testing.assert_close(whole(parameter), want, **CLOSE, msg=lambda m, name=name: f"weight {name}: {m}")


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_a_single_process(ranks: Any, case: Case, world_size: int) -> None:
    ranks(world_size).run(check_training, case, False)


@pytest.mark.parametrize("name", ["ulysses-gqa", "mlp-sequence", "mlp", "block"])
def test_with_activation_checkpointing(ranks: Any, name: str) -> None:
    ranks(2).run(check_training, BY_NAME[name], True)


def wrong_without_the_sum(rank: int, case: Case, also: bool) -> set[str]:
    """The gradients that differ from the single process's, if nothing, or only ``also``, is summed."""
    plain, ours = sides(rank, case)
    for side in (plain, ours):
        side.forward(autocast=False).backward()
    if also:
        sum_gradients(ours, case)
    wants = {name: mine_of(name, grad, rank, case) for name, grad in gradients(plain)}
    return {name for name, grad in gradients(ours) if not torch.allclose(grad, wants[name], **CLOSE)}


@pytest.mark.parametrize("name", ["ulysses", "ulysses-gqa", "mlp-sequence", "mlp"])
def test_exactly_the_partial_gradients_are_wrong_without_their_sum(ranks: Any, name: str) -> None:
    """This is the negative control of the comparison, and the proof that no other gradient needs the sum."""
    case = BY_NAME[name]
    partial = PARTIAL[name.removesuffix("-gqa")]
    kind = "attention" if "attention" in case.parts else "mlp"
    norm = {f"{kind}.norm.weight", f"{kind}.norm.bias"} if case.sequence else set()
    assert ranks(2).run(wrong_without_the_sum, case, False) == [partial | norm] * 2
    assert ranks(2).run(wrong_without_the_sum, case, True) == [set()] * 2


def compare_errors(
    rank: int, case: Case, plain: dict[str, Tensor], ours: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    for name, grad in ours.items():
        assert grad.dtype == plain[name].dtype == torch.float32
        want = mine_of(name, exact[name], rank, case)
        error, error_of_plain = (
            (t - want).norm() / want.norm() for t in (grad, mine_of(name, plain[name], rank, case))
        )
        assert error <= 2 * error_of_plain, f"{name}: {error:.3g}, plain {error_of_plain:.3g}"


@on_ranks()
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["ulysses", "ulysses-gqa", "mlp-sequence", "mlp", "block"])
def test_under_autocast(rank: int, name: str, world_size: int) -> None:
    """The error against float64, over the whole of a tensor, is at most twice the plain model's under autocast."""
    case = BY_NAME[name]
    plain, ours = sides(rank, case)
    exact = Side(copy.deepcopy(plain.model).double(), plain.x.detach().double(), plain.target.double())
    losses = []
    for _ in range(STEPS):
        want = plain.forward(autocast=True)
        with fused_only(case, case.name):
            loss = ours.forward(autocast=True)
            loss.backward()
        want.backward()
        sum_gradients(ours, case)
        losses.append((total_of(loss, case), want.detach()))
        if len(losses) == 1:
            exact.forward(autocast=False).backward()
            compare_errors(rank, case, dict(gradients(plain)), dict(gradients(ours)), dict(gradients(exact)))
        plain.step()
        ours.step()
    for got, want in losses:
        torch.testing.assert_close(got, want, rtol=1e-2, atol=0)


def unfused_ops_of_a_frozen_input(rank: int) -> list[str]:
    """This is the control of ``fused_only``: where x needs no gradient, the backward's exchange is plain."""
    _, ours = sides(rank, BY_NAME["ulysses"])
    layer = ours.model.attention.qkv
    with Dispatched() as spy:
        sum(t.sum() for t in layer(ours.x.detach())).backward()
    return collectives(spy)


def test_a_plain_collective_would_be_seen(ranks: Any) -> None:
    for found in ranks(2).run(unfused_ops_of_a_frozen_input):
        assert "all_to_all_single" in found
