"""Programs as users write them, on any number of ranks R, and what the passes should make of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._higher_order_ops.wrap import TagActivationCheckpoint
from torch.nn import functional as F

from tests.helpers.program_parts import (
    DIM,
    HEADS,
    AllToAll,
    B,
    K,
    N,
    T,
    all_gather_autograd,
    heads_first,
    mesh,
    reduce_scatter,
    reduce_scatter_autograd,
    reshard,
    tokens_first,
    veomni,
    world,
)

Program = Callable[..., Any]


@dataclass(frozen=True)
class Fragment:
    """``make(R)`` gives a program, a module perhaps, and the shapes of its arguments."""

    name: str
    make: Callable[[int], tuple[Program, list[tuple[int, ...]]]]
    forward: list[str]  # ops of fusedcomm, one for each call
    backward: list[str] = field(default_factory=list)
    grad: bool = True
    frozen: tuple[int, ...] = ()  # arguments without a gradient
    exact: bool = True
    dynamic: tuple[int, ...] = ()  # dims of the first argument
    autocast: bool = False

    def __str__(self) -> str:
        return self.name


FRAGMENTS: list[Fragment] = []


def fragment(forward: list[str], backward: list[str] | None = None, **options: Any) -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        name = make.__name__.replace("_", "-")
        FRAGMENTS.append(Fragment(name, make, forward, backward or [], **options))
        return make

    return add


M2A, A2M, AGM, MRS, MAR, A2A = (
    "matmul_all_to_all",
    "all_to_all_matmul",
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "all_to_all",
)


@fragment([M2A], [A2M])
def start_program(r: int) -> Any:
    device_mesh = mesh()

    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.matmul(x, w)
        y = y.view(B, T, HEADS, N // HEADS)
        return reshard(y, 1, -2, device_mesh)

    return program, [(B, T, K), (B, K, N)]


@fragment([M2A], grad=False)
def shard_dim_alltoall(r: int) -> Any:
    name = world().group_name

    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops._dtensor.shard_dim_alltoall((x @ w).view(B, T, HEADS, DIM), 1, 2, name)

    return program, [(B, T, K), (K, N)]


@fragment([A2M], grad=False)
def shard_dim_alltoall_before(r: int) -> Any:
    name = world().group_name

    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops._dtensor.shard_dim_alltoall(x, 2, 1, name).flatten(2) @ w

    return program, [(B, T * r, HEADS // r, DIM), (N, K)]


@fragment([M2A], [A2M])
def deepspeed_before_attention(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w).view(T, B, HEADS, DIM)
        # [R, t, b, h / R, d] arrives as [t R, ...]: the sequence is joined at dim 0
        t = y.reshape(T * B, r, HEADS // r, DIM).transpose(0, 1).contiguous()
        return AllToAll.apply(t).reshape(r * T, B, HEADS // r, DIM).contiguous()

    return program, [(T, B, K), (N, K)]


@fragment([M2A], [A2M])
def veomni_before_attention(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return veomni((x @ w).view(T, HEADS, DIM), r)

    return program, [(T, K), (K, N)]


@fragment([M2A], [A2M, A2M, A2M])
def q_k_v_linears_of_grouped_query_attention(r: int) -> Any:
    def program(x: Tensor, *args: Tensor) -> list[Tensor]:
        return [heads_first(F.linear(x, w, b).view(B, T, -1, DIM), r) for w, b in zip(args[:3], args[3:], strict=True)]

    return program, [(B, T, K), (2 * N, K), (N, K), (N, K), (2 * N,), (N,), (N,)]


@fragment([M2A, M2A], [A2A, M2A])  # a matmul goes into one op
def experts(r: int) -> Any:
    def program(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return AllToAll.apply(AllToAll.apply(x @ up) @ down)

    return program, [(r * T, K), (K, N), (N, K)]


@fragment([M2A], [A2M])
def batched_with_bias(r: int) -> Any:
    def program(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        y = torch.baddbmm(bias, x, w).view(B, T, r, N // r).permute(2, 0, 1, 3).contiguous()
        return AllToAll.apply(y).permute(1, 0, 2, 3).reshape(B, r * T, N // r)

    return program, [(B, T, K), (B, K, N), (N,)]


@fragment([M2A], grad=False)
def cast_before_it_is_sent(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = (x.bfloat16() @ w.bfloat16()).float()
        return heads_first(y.view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


@fragment([M2A, A2M], [M2A, A2M], autocast=True)
def under_autocast(r: int) -> Any:
    def program(x: Tensor, w: Tensor, wo: Tensor) -> Tensor:
        y = heads_first((x @ w).view(B, T, HEADS, DIM), r)
        return tokens_first(y, r).flatten(2) @ wo

    return program, [(B, T, K), (K, N), (N, K)]


# torch 2.11 keeps what the exchanges return; later ones run both again, the second for grad wo alone
RECOMPUTED = [] if hasattr(TagActivationCheckpoint, "tag_nodes") else [M2A, A2A]


@fragment([M2A, A2M], [*RECOMPUTED, M2A, A2M], exact=False)
def checkpointed(r: int) -> Any:
    from torch.utils.checkpoint import checkpoint

    def block(x: Tensor, w: Tensor, wo: Tensor) -> Tensor:
        y = heads_first((x @ w).view(B, T, HEADS, DIM), r).sigmoid()
        return tokens_first(y, r).flatten(2) @ wo

    def program(x: Tensor, w: Tensor, wo: Tensor) -> Tensor:
        return checkpoint(block, x, w, wo, use_reentrant=False)

    return program, [(B, T, K), (K, N), (N, K)]


@fragment([AGM, MRS], [AGM, MRS], dynamic=(0, 1))
def dynamic_batch_and_tokens(r: int) -> Any:
    def program(x: Tensor, w: Tensor, wo: Tensor) -> Tensor:
        y = all_gather_autograd(x, 1, world()) @ w
        return reduce_scatter_autograd(y @ wo, "sum", 1, world())

    return program, [(B, T, K), (K, N), (N, K)]


@fragment([M2A], [A2A], frozen=(0,))
def frozen_input(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return heads_first((x @ w).view(B, T, HEADS, DIM), r)

    return program, [(B, T, K), (K, N)]


class Mlp(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up, self.down = nn.Linear(K, 4 * N, bias=bias), nn.Linear(4 * N, K, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


@fragment([AGM, MRS], [AGM, MRS], exact=False)
def dtensor_sequence_parallel(r: int) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Mlp(bias=True), mesh(), plan), [(B, T, K)]


@fragment([MAR], [MAR], exact=False)
def dtensor_tensor_parallel(r: int) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(Mlp(bias=True), mesh(), plan), [(B, T, K)]


@fragment([AGM], [MRS])
def gather_for_several_linears(r: int) -> Any:
    def program(x: Tensor, *ws: Tensor) -> list[Tensor]:
        gathered = all_gather_autograd(x, 1, world())
        return [F.linear(gathered, w) for w in ws]

    return program, [(B, T, K), (N, K), (N, K), (2 * N, K)]


@fragment([MRS], [AGM])
def megatron_row_parallel(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return reduce_scatter_autograd(F.linear(x, w), "sum", 0, world())

    return program, [(T * r, B, K), (N, K)]


@fragment([MRS], grad=False)
def sum_of_matmuls(r: int) -> Any:
    def program(x: Tensor, w: Tensor, x2: Tensor, w2: Tensor) -> Tensor:
        return reduce_scatter(x @ w + x2 @ w2, "sum", 1, world())

    return program, [(B, T * r, K), (K, N), (B, T * r, N), (N, N)]


@fragment([MAR], grad=False)
def all_reduce_in_place(r: int) -> Any:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = F.linear(x, w)
        dist.all_reduce(y)
        return y

    return program, [(B, T, K), (N, K)]
