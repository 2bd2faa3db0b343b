"""Attention blocks of real models under Ulysses, with the exchanges and what stands around them as their packages write
them, in plain torch. Without a group the exchanges are left out: one process with all tokens, the oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.program_parts import reshard

Group = Any  # a ProcessGroup, or None
Table = tuple[Tensor, ...]  # cos and sin, or one complex tensor
_aten = torch.ops.aten


@dataclass(frozen=True)
class Size:
    batch: int = 1
    tokens: int = 8  # this rank's
    text: int = 4  # this rank's, in a second stream
    heads: int = 4
    head_dim: int = 8

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


def all_to_all(x: Tensor, group: Group) -> Tensor:
    y = funcol.all_to_all_single(x.flatten(), None, None, group).reshape(x.shape)
    return y.wait() if isinstance(y, funcol.AsyncCollectiveTensor) else y


def to_heads(x: Tensor, group: Group) -> Tensor:
    """[b, t, h, d] -> [b, R t, h / R, d] as diffusers has it."""
    b, t, h, d = x.shape
    r = group.size()
    x = x.reshape(b, t, r, h // r, d).permute(2, 1, 0, 3, 4).contiguous()
    return all_to_all(x, group).flatten(0, 1).permute(1, 0, 2, 3).contiguous()


def to_tokens(x: Tensor, group: Group) -> Tensor:
    """[b, R t, h / R, d] -> [b, t, h, d] as diffusers has it."""
    b, t, h, d = x.shape
    r = group.size()
    x = x.reshape(b, r, t // r, h, d).permute(1, 3, 0, 2, 4).contiguous()
    return all_to_all(x, group).flatten(0, 1).permute(1, 2, 0, 3).contiguous()


class UlyssesAttention(torch.autograd.Function):
    """Diffusers writes the exchanges and the attention as one Function, its backward by hand."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
        q, k, v = (to_heads(x, group).transpose(1, 2) for x in (q, k, v))
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return to_tokens(out.transpose(1, 2), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad = to_heads(grad, ctx.group).transpose(1, 2)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, False)
        return *(to_tokens(each.transpose(1, 2), ctx.group) for each in grads), None


def local_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def ulysses(q: Tensor, k: Tensor, v: Tensor, group: Group) -> Tensor:
    return local_attention(q, k, v) if group is None else UlyssesAttention.apply(q, k, v, group)


class SeqAllToAll(torch.autograd.Function):
    """DeepSpeed's exchange of [b, t, h, d]: it goes into a buffer, and its backward is itself with the dims swapped."""

    @staticmethod
    def forward(ctx: Any, group: Group, x: Tensor, scatter_dim: int, gather_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (scatter_dim, gather_dim)
        r = group.size()
        blocks = x.reshape(*x.shape[:scatter_dim], r, x.shape[scatter_dim] // r, *x.shape[scatter_dim + 1 :])
        blocks = blocks.movedim(scatter_dim, 0).contiguous()
        out = torch.empty_like(blocks)
        dist.all_to_all_single(out, blocks, group=group)
        return out.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        scatter_dim, gather_dim = ctx.dims
        return None, SeqAllToAll.apply(ctx.group, grad, gather_dim, scatter_dim), None, None


def complex_rotary(x: Tensor, table: Table) -> Tensor:
    """Qwen-Image; the table is [t, d / 2]."""
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * table[0].unsqueeze(1)
    return torch.view_as_real(turned).flatten(3).type_as(x)


def stack_rotary(x: Tensor, table: Table) -> Tensor:
    """Flux; the tables are [t, d]."""
    cos, sin = (each[None, :, None, :] for each in table)
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(3)
    return (x.float() * cos + turned.float() * sin).to(x.dtype)


def slice_rotary(x: Tensor, table: Table) -> Tensor:
    """Wan assigns to slices."""
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table[0][None, :, None, 0::2], table[1][None, :, None, 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = x1 * cos - x2 * sin
    out[..., 1::2] = x1 * sin + x2 * cos
    return out.type_as(x)


def half_rotary(x: Tensor, table: Table) -> Tensor:
    """Llama: the halves of a head are turned against each other."""
    cos, sin = (each[None, :, None, :] for each in table)
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos + torch.cat((-x2, x1), dim=-1) * sin).type_as(x)


def flat_rotary(x: Tensor, table: Table) -> Tensor:
    """LTX turns [b, t, heads x d]: each head has angles of its own."""
    real, imaginary = x.unflatten(2, (-1, 2)).unbind(-1)
    turned = torch.stack([-imaginary, real], dim=-1).flatten(2)
    return (x.float() * table[0] + turned.float() * table[1]).to(x.dtype)


Rotary = Callable[[Tensor, Table], Tensor]
ROTARIES: dict[str, Rotary] = {
    "complex": complex_rotary,
    "stack": stack_rotary,
    "slice": slice_rotary,
    "half": half_rotary,
    "flat": flat_rotary,
}


def rotary_table(rotary: str, tokens: int, size: Size) -> Table:
    """cos and sin, [tokens, dim], the same for the two elements that a rotary of this form pairs."""
    dim = size.dim if rotary == "flat" else size.head_dim
    angles = torch.arange(tokens)[:, None] / 10.0 ** (torch.arange(dim // 2) / dim)
    if rotary == "complex":
        return (torch.polar(torch.ones_like(angles), angles),)
    angles = torch.cat([angles, angles], 1) if rotary == "half" else angles.repeat_interleave(2, 1)
    return angles.cos(), angles.sin()


class Block(nn.Module):
    """``forward(streams, tables)`` gives the streams, [b, t, dim] each; the tables have the rank's tokens."""

    rotary = ""
    streams = 1

    def __init__(self, size: Size, group: Group, rotary: str) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dim, self.group = size.heads, size.head_dim, size.dim, group
        self.rotate = ROTARIES.get(rotary or self.rotary)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def linears(self, names: str) -> None:
        for name in names.split():
            setattr(self, name, nn.Linear(self.dim, self.dim))

    def norms(self, names: str, dim: int) -> None:
        for name in names.split():
            setattr(self, name, nn.RMSNorm(dim, eps=1e-5))

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.dim,))

    def split_heads(self, *xs: Tensor) -> list[Tensor]:
        return [x.unflatten(-1, (-1, self.head_dim)) for x in xs]


class Wan(Block):
    rotary = "slice"

    def build(self) -> None:
        self.linears("to_q to_k to_v to_out")
        self.norms("norm_q norm_k", self.dim)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.to_q(x), self.to_k(x), self.to_v(x)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        (x,), (table,) = streams, tables
        q, k, v = self.projections(self.normed(x))
        q, k, v = self.split_heads(self.norm_q(q), self.norm_k(k), v)
        q, k = self.rotate(q, table), self.rotate(k, table)
        out = ulysses(q, k, v, self.group).flatten(2, 3).type_as(q)
        return [x + self.to_out(out)]


class WanFusedQkv(Wan):
    def build(self) -> None:
        self.to_qkv = nn.Linear(self.dim, 3 * self.dim)
        self.linears("to_out")
        self.norms("norm_q norm_k", self.dim)

    def projections(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.to_qkv(x).chunk(3, dim=-1)


class FluxSingle(Block):
    rotary = "stack"
    streams = 2

    def build(self) -> None:
        self.linears("to_q to_k to_v")
        self.norms("norm_q norm_k", self.head_dim)
        self.mlp, self.out = nn.Linear(self.dim, 2 * self.dim), nn.Linear(3 * self.dim, self.dim)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        image, text = streams
        table = tuple(torch.cat([b, a]) for a, b in zip(*tables, strict=True))
        x = torch.cat([text, image], dim=1)
        normed = self.normed(x)
        mlp = F.gelu(self.mlp(normed), approximate="tanh")
        q, k, v = self.split_heads(self.to_q(normed), self.to_k(normed), self.to_v(normed))
        q, k = self.rotate(self.norm_q(q), table), self.rotate(self.norm_k(k), table)
        out = ulysses(q, k, v, self.group).flatten(2, 3).to(q.dtype)
        x = x + self.out(torch.cat([out, mlp], dim=2))
        return [x[:, text.shape[1] :], x[:, : text.shape[1]]]


class FluxDouble(Block):
    rotary = "stack"
    streams = 2

    def build(self) -> None:
        self.linears("to_q to_k to_v add_q add_k add_v to_out to_add_out")
        self.norms("norm_q norm_k norm_added_q norm_added_k", self.head_dim)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        image, text = streams
        table = tuple(torch.cat([b, a]) for a, b in zip(*tables, strict=True))
        x, y = map(self.normed, streams)
        q, k, v = self.split_heads(self.to_q(x), self.to_k(x), self.to_v(x))
        text_q, text_k, text_v = self.split_heads(self.add_q(y), self.add_k(y), self.add_v(y))
        q = torch.cat([self.norm_added_q(text_q), self.norm_q(q)], dim=1)
        k = torch.cat([self.norm_added_k(text_k), self.norm_k(k)], dim=1)
        v = torch.cat([text_v, v], dim=1)
        q, k = self.rotate(q, table), self.rotate(k, table)
        out = ulysses(q, k, v, self.group).flatten(2, 3).to(q.dtype)
        y, x = out.split_with_sizes([text.shape[1], out.shape[1] - text.shape[1]], dim=1)
        return [image + self.to_out(x.contiguous()), text + self.to_add_out(y.contiguous())]


class QwenImage(FluxDouble):
    rotary = "complex"

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        image, text = streams
        x, y = map(self.normed, streams)
        q, k, v = self.split_heads(self.to_q(x), self.to_k(x), self.to_v(x))
        text_q, text_k, text_v = self.split_heads(self.add_q(y), self.add_k(y), self.add_v(y))
        q, k = self.rotate(self.norm_q(q), tables[0]), self.rotate(self.norm_k(k), tables[0])
        text_q, text_k = (
            self.rotate(self.norm_added_q(text_q), tables[1]),
            self.rotate(self.norm_added_k(text_k), tables[1]),
        )
        q, k, v = (torch.cat(pair, dim=1) for pair in ((text_q, q), (text_k, k), (text_v, v)))
        out = ulysses(q, k, v, self.group).flatten(2, 3).to(q.dtype)
        x, y = out[:, text.shape[1] :, :], out[:, : text.shape[1], :]
        return [image + self.to_out(x.contiguous()), text + self.to_add_out(y.contiguous())]


class LtxAttention(Block):
    rotary = "flat"

    def build(self) -> None:
        self.linears("to_q to_k to_v to_out")
        self.norms("norm_q norm_k", self.dim)

    def forward(self, x: Tensor, y: Tensor, table: Table | None) -> Tensor:
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(y)), self.to_v(y)
        if table is not None:
            q, k = self.rotate(q, table), self.rotate(k, table)
        q, k, v = (each.unflatten(2, (self.heads, -1)) for each in (q, k, v))
        return self.to_out(ulysses(q, k, v, self.group).flatten(2, 3).to(q.dtype))


class Ltx(Block):
    """Self-attention, then attention to the text, whose tokens are shared among the ranks too."""

    rotary = "flat"
    streams = 2

    def __init__(self, size: Size, group: Group, rotary: str) -> None:
        super().__init__(size, group, rotary)
        self.attn1, self.attn2 = LtxAttention(size, group, rotary), LtxAttention(size, group, rotary)

    def build(self) -> None: ...

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        x, text = streams
        normed = self.normed(x)
        x = x + self.attn1(normed, normed, tables[0])
        return [x + self.attn2(x, text, None), text]


class Flux2(Block):
    rotary = "stack"

    def build(self) -> None:
        self.to_qkv_mlp = nn.Linear(self.dim, 3 * self.dim + 4 * self.dim, bias=False)
        self.norms("norm_q norm_k", self.head_dim)
        self.to_out = nn.Linear(3 * self.dim, self.dim, bias=False)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        (x,), (table,) = streams, tables
        qkv, mlp = torch.split(self.to_qkv_mlp(self.normed(x)), [3 * self.dim, 4 * self.dim], dim=-1)
        q, k, v = self.split_heads(*qkv.chunk(3, dim=-1))
        q, k = self.rotate(self.norm_q(q), table), self.rotate(self.norm_k(k), table)
        out = ulysses(q, k, v, self.group).flatten(2, 3).to(q.dtype)
        mlp = F.silu(mlp[..., : 2 * self.dim]) * mlp[..., 2 * self.dim :]
        return [x + self.to_out(torch.cat([out, mlp], dim=-1))]


class DeepSpeed(Block):
    """DistributedAttention around attention with normed q and k."""

    rotary = "half"

    def build(self) -> None:
        self.linears("to_q to_k to_v to_out")
        self.norms("norm_q norm_k", self.head_dim)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        (x,), (table,) = streams, tables
        normed = self.normed(x)
        q, k, v = self.split_heads(self.to_q(normed), self.to_k(normed), self.to_v(normed))
        q, k = self.rotate(self.norm_q(q), table), self.rotate(self.norm_k(k), table)
        if self.group is None:
            out = local_attention(q, k, v)
        else:
            q, k, v = (SeqAllToAll.apply(self.group, each, 2, 1) for each in (q, k, v))
            out = SeqAllToAll.apply(self.group, local_attention(q, k, v), 1, 2)
        return [x + self.to_out(out.flatten(2))]


class Packed(Block):
    """One projection for q, k and v, exchanged as one tensor, with DTensor."""

    streams = 1

    def build(self) -> None:
        from torch.distributed.tensor import DeviceMesh

        self.to_qkv, self.to_out = nn.Linear(self.dim, 3 * self.dim), nn.Linear(self.dim, self.dim)
        self.mesh = self.group and DeviceMesh.from_group(self.group, "cpu")

    def resharded(self, x: Tensor, source: int, target: int) -> Tensor:
        return x if self.group is None else reshard(x, source, target, self.mesh)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        (x,) = streams
        qkv = self.to_qkv(self.normed(x)).view(x.shape[0], -1, 3, self.heads, self.head_dim)
        out = local_attention(*self.resharded(qkv, 1, 3).unbind(2))
        return [x + self.to_out(self.resharded(out, 2, 1).flatten(2))]


BLOCKS: dict[str, type[Block]] = {
    "wan": Wan,
    "wan_fused_qkv": WanFusedQkv,
    "flux_single": FluxSingle,
    "flux_double": FluxDouble,
    "qwen_image": QwenImage,
    "ltx": Ltx,
    "flux2": Flux2,
    "deepspeed": DeepSpeed,
    "packed": Packed,
}


class Model(nn.Module):
    """``layers`` blocks of one name. The weights are the same on every rank, and without a group."""

    def __init__(
        self,
        name: str,
        size: Size,
        group: Group,
        layers: int = 1,
        rotary: str = "",
        checkpointed: bool = False,
        whole_tables: bool = False,
    ) -> None:
        super().__init__()
        self.group, self.checkpointed = group, checkpointed
        self.part = (group.size(), group.rank()) if whole_tables and group is not None else None
        self.layers = nn.ModuleList(BLOCKS[name](size, group, rotary) for _ in range(layers))
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator) + float(parameter.ndim == 1)

    def forward(self, streams: list[Tensor], tables: list[Table]) -> list[Tensor]:
        """Whole tables are cut as diffusers does."""
        if self.part is not None:
            ranks, rank = self.part
            tables = [tuple(each.chunk(ranks)[rank] for each in table) for table in tables]
        for layer in self.layers:
            if self.checkpointed:
                streams = checkpoint(layer, streams, tables, use_reentrant=False)
            else:
                streams = layer(streams, tables)
        return streams
