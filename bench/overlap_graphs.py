"""Graphs of transformers on 64 ranks that do not exist, to schedule: plain aten and functional collectives.

    with world() as groups:
        gm = build(llama("8b"), groups, num_layers=32, part="forward")

8 nodes of 8 ranks: a (8, 8) mesh whose dim "tp" is inside a node and whose dim "dp" is between nodes. Everything is
a fake CPU tensor: no memory, no GPU, no driver. One layer is traced, with its gradients, and cut in two by
AOTAutograd's partitioner; the layers are then copies of it, each with tensors of its own.

Every model shards its weights over dp (FSDP): gathered before use, gathered again in the backward, and their
gradients averaged and scattered. Embedding, head, loss and optimizer are left out: they are not per layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.nn import functional as F

RANKS_PER_NODE = NUM_NODES = 8
PARTS = ("forward", "backward", "joint")

aten, functional = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class GroupNames:
    """Group names. ``tp`` has the 8 ranks inside a node, whatever the model does there; ``dp`` one rank per node."""

    dp: str
    tp: str


@contextlib.contextmanager
def world() -> Iterator[GroupNames]:
    """Inside, this process is rank 0 of 64 fake ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_NODES * RANKS_PER_NODE)
    try:
        mesh = init_device_mesh("cpu", (NUM_NODES, RANKS_PER_NODE), mesh_dim_names=("dp", "tp"))
        yield GroupNames(mesh.get_group("dp").group_name, mesh.get_group("tp").group_name)
    finally:
        dist.destroy_process_group()


# What layers are made of: collectives along dim 0, with gradients


class _Gathered(torch.autograd.Function):
    """A weight from its shards, as in FSDP: gradients are averaged over dp, and over tp summed if it is replicated."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, groups: GroupNames, replicated: bool) -> Tensor:
        ctx.groups, ctx.replicated = groups, replicated
        return functional.wait_tensor(functional.all_gather_into_tensor(shard, NUM_NODES, groups.dp))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        g_shard = functional.reduce_scatter_tensor(g.contiguous(), "avg", NUM_NODES, ctx.groups.dp)
        g_shard = functional.wait_tensor(g_shard)
        if ctx.replicated:
            g_shard = functional.wait_tensor(functional.all_reduce(g_shard, "sum", ctx.groups.tp))
        return g_shard, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_shard: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return functional.wait_tensor(functional.all_gather_into_tensor(x_shard, RANKS_PER_NODE, group_name))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(g.contiguous(), ctx.group_name), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", RANKS_PER_NODE, group_name))

    @staticmethod
    def backward(ctx: Any, g_shard: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(g_shard.contiguous(), ctx.group_name), None


class _AllToAll(torch.autograd.Function):
    """Block p of dim 0 goes to rank p."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str) -> Tensor:
        ctx.group_name = group_name
        splits = [x.shape[0] // RANKS_PER_NODE] * RANKS_PER_NODE
        return functional.wait_tensor(functional.all_to_all_single(x, splits, splits, group_name))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(g.contiguous(), ctx.group_name), None


def _norm(x: Tensor, w: Tensor) -> Tensor:
    """RMSNorm over the last dim."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def _rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """x [S, B, heads, D]; cos and sin [S, 1, 1, D/2]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = rope
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention. q is [S, B, heads, D], k and v can have fewer heads; the result is like q."""
    repeats = q.shape[2] // k.shape[2]
    if repeats > 1:
        k, v = (each.unsqueeze(3).expand(-1, -1, -1, repeats, -1).flatten(2, 3) for each in (k, v))
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    # This is the op that GPUs run: F.scaled_dot_product_attention of CPU tensors would become the CPU's.
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0].permute(2, 0, 1, 3)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


# Models


@dataclass(frozen=True)
class ModelSizes:
    """``tokens`` are a sequence's, ``sequences`` those of a rank, or of the ranks of a node where they share them."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    tokens: int
    sequences: int
    head_dim: int = 128

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim


Layer = Callable[[Tensor, tuple[Tensor, Tensor], Sequence[Tensor], GroupNames], Tensor]


@dataclass(frozen=True)
class Model:
    """``layer(x, (cos, sin), weight shards, groups)`` is like x. ``weights``: shapes on a rank before FSDP."""

    name: str
    sizes: ModelSizes
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    layer: Layer

    @property
    def rope(self) -> tuple[int, ...]:
        return self.sizes.tokens, 1, 1, self.sizes.head_dim // 2

    @property
    def shards(self) -> list[tuple[int, ...]]:
        return [(rows // NUM_NODES, *rest) for rows, *rest in self.weights]


def llama(size: str = "8b") -> Model:
    """Llama 3 with FSDP, tensor and sequence parallelism. q, k and v are one weight, and so are gate and up."""
    s, tp = LLAMA[size], RANKS_PER_NODE
    weights = (
        (s.hidden,),
        ((s.hidden + 2 * s.kv) // tp, s.hidden),
        (s.hidden, s.hidden // tp),
        (s.hidden,),
        (2 * s.ffn // tp, s.hidden),
        (s.hidden, s.ffn // tp),
    )

    def layer(x: Tensor, rope: tuple[Tensor, Tensor], shards: Sequence[Tensor], groups: GroupNames) -> Tensor:
        def weight(i: int) -> Tensor:
            return _Gathered.apply(shards[i], groups, weights[i] == (s.hidden,))

        h = _AllGather.apply(_norm(x, weight(0)), groups.tp)
        qkv = F.linear(h, weight(1)).unflatten(-1, (-1, s.head_dim))
        q, k, v = qkv.split([n // tp for n in (s.heads, s.kv_heads, s.kv_heads)], 2)
        out = _attention(_rotated(q, rope), _rotated(k, rope), v).flatten(2)
        x = x + _ReduceScatter.apply(F.linear(out, weight(2)), groups.tp)
        h = _AllGather.apply(_norm(x, weight(3)), groups.tp)
        return x + _ReduceScatter.apply(F.linear(_swiglu(F.linear(h, weight(4))), weight(5)), groups.tp)

    return Model(f"llama-{size}", s, (s.tokens // tp, s.sequences, s.hidden), weights, layer)


LLAMA = {
    "8b": ModelSizes(hidden=4096, heads=32, kv_heads=8, ffn=14336, tokens=8192, sequences=4),
    "70b": ModelSizes(hidden=8192, heads=64, kv_heads=8, ffn=28672, tokens=8192, sequences=4),
}


def ulysses() -> Model:
    """Llama-3-8B's layer on one long sequence, with its tokens sharded in a node. A rank attends to it with few heads.

    FSDP shards weights over dp; the ranks of a node hold the same weights and sum their gradients.
    """
    s = ModelSizes(hidden=4096, heads=32, kv_heads=8, ffn=14336, tokens=131072, sequences=1)
    weights = (
        (s.hidden,),
        (s.hidden, s.hidden),
        (s.kv, s.hidden),
        (s.kv, s.hidden),
        (s.hidden, s.hidden),
        (s.hidden,),
        (2 * s.ffn, s.hidden),
        (s.hidden, s.ffn),
    )
    ranks = RANKS_PER_NODE

    def layer(x: Tensor, rope: tuple[Tensor, Tensor], shards: Sequence[Tensor], groups: GroupNames) -> Tensor:
        def weight(i: int) -> Tensor:
            return _Gathered.apply(shards[i], groups, True)

        def whole_sequences(y: Tensor) -> Tensor:
            """[S/R, B, all heads] -> [S, B, heads/R, D]"""
            blocks = y.unflatten(-1, (ranks, -1, s.head_dim)).permute(2, 0, 1, 3, 4)  # [R, S/R, B, heads/R, D]
            return _AllToAll.apply(blocks.flatten(0, 1).contiguous(), groups.tp)

        h = _norm(x, weight(0))
        q, k, v = (whole_sequences(F.linear(h, weight(i))) for i in (1, 2, 3))
        out = _attention(_rotated(q, rope), _rotated(k, rope), v)
        out = _AllToAll.apply(out.contiguous(), groups.tp).unflatten(0, (ranks, -1))  # [R, S/R, B, heads/R, D]
        x = x + F.linear(out.permute(1, 2, 0, 3, 4).flatten(2), weight(4))
        return x + F.linear(_swiglu(F.linear(_norm(x, weight(5)), weight(6))), weight(7))

    return Model("ulysses", s, (s.tokens // ranks, s.sequences, s.hidden), weights, layer)


EXPERTS, TOP, SHARED_FFN = 64, 4, 2048


def moe() -> Model:
    """Mixture of experts: each rank has sequences of its own and 8 of 64 experts; a shared expert beside them.

    Routing is taken to be even: as many tokens for every expert.
    """
    s = ModelSizes(hidden=4096, heads=32, kv_heads=8, ffn=1024, tokens=8192, sequences=4)
    local = EXPERTS // RANKS_PER_NODE
    experts = ((local, s.hidden, 2 * s.ffn), (local, s.ffn, s.hidden))
    weights = (
        (s.hidden,),
        (s.hidden + 2 * s.kv, s.hidden),
        (s.hidden, s.hidden),
        (s.hidden,),
        (EXPERTS, s.hidden),
        *experts,
        (2 * SHARED_FFN, s.hidden),
        (s.hidden, SHARED_FFN),
    )

    def layer(x: Tensor, rope: tuple[Tensor, Tensor], shards: Sequence[Tensor], groups: GroupNames) -> Tensor:
        def weight(i: int) -> Tensor:
            return _Gathered.apply(shards[i], groups, weights[i] not in experts)

        def of_experts(y: Tensor) -> Tensor:
            """The experts' results for y [tokens, hidden], both sorted by expert."""
            y = _AllToAll.apply(y, groups.tp).view(RANKS_PER_NODE, local, -1, s.hidden).transpose(0, 1)
            y = torch.bmm(_swiglu(torch.bmm(y.flatten(1, 2), weight(5))), weight(6))
            y = y.view(local, RANKS_PER_NODE, -1, s.hidden).transpose(0, 1)
            return _AllToAll.apply(y.reshape(-1, s.hidden), groups.tp)

        qkv = F.linear(_norm(x, weight(0)), weight(1)).unflatten(-1, (-1, s.head_dim))
        q, k, v = qkv.split([s.heads, s.kv_heads, s.kv_heads], 2)
        x = x + F.linear(_attention(_rotated(q, rope), _rotated(k, rope), v).flatten(2), weight(2))
        h = _norm(x, weight(3)).flatten(0, 1)
        share, expert = F.linear(h, weight(4)).float().softmax(-1).topk(TOP)  # [tokens, TOP]
        order = expert.flatten().argsort()
        # F.embedding is a row lookup whose gradient is functional.
        back = F.embedding(order.argsort(), of_experts(F.embedding(order // TOP, h)))
        mixed = (back.view(-1, TOP, s.hidden) * share.unsqueeze(-1).to(x.dtype)).sum(1)
        shared = F.linear(_swiglu(F.linear(h, weight(7))), weight(8))
        return x + (mixed + shared).view_as(x)

    return Model("moe", s, (s.tokens, s.sequences, s.hidden), weights, layer)


# From a model to a graph


def build(model: Model, groups: GroupNames, num_layers: int, part: str = "forward") -> GraphModule:
    """``part``: the forward or the backward graph as AOTAutograd would hand them to a compiler, or both in one."""
    if part not in PARTS:
        raise ValueError(f"part must be one of {PARTS}, got {part!r}")
    mode = FakeTensorMode()
    forward, backward = _trace(model, groups, mode)
    builder = _Builder(mode)
    x, *rope = (builder.placeholder(shape, dtype) for shape, dtype in _primals(model)[:3])
    weights = [[builder.placeholder(each) for each in model.shards] for _ in range(num_layers)]
    saved = []
    for each in weights:
        x, *kept = builder.inline(forward, [x, *rope, *each])
        saved.append(kept)
    every_saved = list(dict.fromkeys(node for kept in saved for node in kept))
    results = [x]
    if part == "forward":
        return builder.finish([x, *every_saved])
    if part == "backward":
        builder, results = _Builder(mode), []
        primals_first = sorted(every_saved, key=lambda node: node.op != "placeholder")
        env = {node: builder.placeholder_like(node) for node in primals_first}
        saved = [[env[node] for node in kept] for kept in saved]
    g = builder.placeholder(model.x, name="tangents_1")
    grads: list[Node] = []
    for kept in reversed(saved):
        g, *of_weights = builder.inline(backward, [*kept, g])
        grads = of_weights + grads
    return builder.finish([*results, *grads, g])


def _primals(model: Model) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The inputs of one layer: x, cos, sin and the weights."""
    bf16 = torch.bfloat16
    return [(model.x, bf16), *[(model.rope, torch.float32)] * 2, *((shape, bf16) for shape in model.shards)]


def _trace(model: Model, groups: GroupNames, mode: FakeTensorMode) -> tuple[GraphModule, GraphModule]:
    """The graphs of one layer: forward (x, cos, sin, weights) -> y, saved; backward (saved, dy) -> dx, dweights."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        x, cos, sin, *shards = primals
        y = model.layer(x, (cos, sin), shards, groups)
        return [y, *torch.autograd.grad(y, (x, *shards), tangents)]

    with mode:
        primals = [torch.empty(shape, dtype=dtype) for shape, dtype in _primals(model)]
        for each in (primals[0], *primals[3:]):
            each.requires_grad_()
        tangents = [torch.empty_like(primals[0])]
        gm = make_fx(joint)(primals, tangents)
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0])
    gm.graph.eliminate_dead_code()
    _gather_again(gm.graph)
    return min_cut_rematerialization_partition(gm, (primals, tangents), num_fwd_outputs=1)


def _gather_again(graph: Graph) -> None:
    """Mark what is computed from weights alone to be computed again in the backward, as FSDP frees gathered weights."""
    from torch.utils.checkpoint import CheckpointPolicy

    _, _, _, *weights, _ = graph.find_nodes(op="placeholder")
    of_weights = set(weights)
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}


class _Builder:
    """A graph under construction: fake tensors are computed as nodes are added, so that copies share no storage."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.graph, self.num_placeholders = mode, Graph(), 0

    def placeholder(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, name: str = "") -> Node:
        self.num_placeholders += 1
        node = self.graph.placeholder(name or f"primals_{self.num_placeholders}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def placeholder_like(self, node: Node) -> Node:
        """A placeholder for what another graph saves, which aliases nothing."""
        val = node.meta["val"]
        placeholder = self.placeholder(val.shape, val.dtype, node.name)
        with self.mode:
            placeholder.meta["val"] = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        return placeholder

    def inline(self, gm: GraphModule, inputs: Sequence[Node]) -> list[Any]:
        """Copy gm's nodes. Returns what stands for its results."""
        env = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
        with self.mode:
            for node in gm.graph.nodes:
                if node.op == "call_function":
                    env[node] = self._copy(node, env)
        (output,) = gm.graph.find_nodes(op="output")
        return [env[each] for each in output.args[0]]

    def _copy(self, node: Node, env: dict[Node, Node]) -> Node:
        target: Any = node.target
        copied = self.graph.call_function(target, *map_arg((node.args, node.kwargs), env.__getitem__))
        args, kwargs = map_arg((copied.args, copied.kwargs), lambda each: each.meta["val"])
        copied.meta["val"] = target(*args, **kwargs)
        return copied

    def finish(self, results: Sequence[Node]) -> GraphModule:
        self.graph.output(tuple(results))
        return GraphModule(torch.nn.Module(), self.graph)
