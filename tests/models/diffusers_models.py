"""Image and video transformers of diffusers under its Ulysses context parallelism."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.models.case import Case, random

HEADS, DIM, TEXT, TOKENS = 4, 8, 8, 16


def wan(layers: int) -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=DIM,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=64,
        num_layers=layers,
        rope_max_seq_len=32,
    )


def fused_wan(layers: int) -> nn.Module:
    model = wan(layers)
    for block in model.blocks:
        block.attn1.fuse_projections()
        block.attn2.fuse_projections()
    return model


def wan_inputs() -> dict[str, Any]:
    return {
        "hidden_states": random(1, 4, 1, 8, 8),
        "timestep": torch.tensor([5]),
        "encoder_hidden_states": random(1, TEXT, 16),
    }


def flux(layers: int) -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
    )


def flux_inputs(ids: int = 3) -> dict[str, Any]:
    return {
        "hidden_states": random(1, TOKENS, 16),
        "encoder_hidden_states": random(1, TEXT, 16),
        "pooled_projections": random(1, 16),
        "timestep": torch.tensor([0.005]),
        "img_ids": torch.randint(0, 4, (TOKENS, ids)).float(),
        "txt_ids": torch.zeros(TEXT, ids),
    }


def flux2(layers: int) -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=16,
        num_layers=layers,
        num_single_layers=layers,
        attention_head_dim=DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=False,
    )


def flux2_inputs() -> dict[str, Any]:
    inputs = flux_inputs(ids=4)
    del inputs["pooled_projections"]
    return inputs | {name: inputs[name][None] for name in ("img_ids", "txt_ids")}


def qwen_image(layers: int) -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=layers,
        attention_head_dim=DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=16,
        axes_dims_rope=(2, 2, 4),
    )


def qwen_image_inputs() -> dict[str, Any]:
    return {
        "hidden_states": random(1, TOKENS, 16),
        "encoder_hidden_states": random(1, TEXT, 16),
        "timestep": torch.tensor([0.005]),
        "img_shapes": [(1, 4, 4)],
    }


def ltx(layers: int) -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=HEADS,
        attention_head_dim=DIM,
        cross_attention_dim=HEADS * DIM,
        num_layers=layers,
        caption_channels=16,
    )


def ltx_inputs() -> dict[str, Any]:
    """As many tokens of text as of the video: the backward of diffusers takes keys to be as many as queries."""
    return {
        "hidden_states": random(1, TOKENS, 16),
        "encoder_hidden_states": random(1, TOKENS, 16),
        "timestep": torch.tensor([5]),
        "encoder_attention_mask": None,
        "num_frames": 1,
        "height": 4,
        "width": 4,
    }


def ulysses(model: nn.Module) -> nn.Module:
    from diffusers import ContextParallelConfig

    with mock.patch("torch.accelerator.device_count", return_value=1):  # 0 on a machine without a GPU
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    if torch.is_grad_enabled():
        model.set_attention_backend("_native_flash")
    return model


def _forward(
    ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, scale: Any, *_: Any, **__: Any
) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    ctx.save_for_backward(q, k, v, y, lse)
    ctx.options = dropout, causal, scale
    return y.transpose(1, 2)


def _backward(ctx: Any, grad: Tensor, *_: Any, **__: Any) -> list[Tensor]:
    dropout, causal, scale = ctx.options
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.transpose(1, 2), *ctx.saved_tensors, dropout, causal, scale=scale
    )
    return [t.transpose(1, 2) for t in grads]


def flash_attention_on_cpus() -> AbstractContextManager[object]:
    """As torch.compile cuts the graph before the exchange where autograd is called in a backward, as by the default."""
    return mock.patch.multiple(
        "diffusers.models.attention_dispatch",
        _native_flash_attention_forward_op=_forward,
        _native_flash_attention_backward_op=_backward,
    )


def _case(make: Callable[[int], nn.Module], inputs: Callable[[], dict[str, Any]]) -> Case:
    return Case(
        "diffusers",
        make,
        ulysses,
        lambda: inputs() | {"return_dict": False},
        summed=True,
        around=flash_attention_on_cpus,
    )


CASES = {
    "wan": _case(wan, wan_inputs),
    "wan-fused-qkv": _case(fused_wan, wan_inputs),
    "flux": _case(flux, flux_inputs),
    "flux2": _case(flux2, flux2_inputs),
    "qwen-image": _case(qwen_image, qwen_image_inputs),
    "ltx": _case(ltx, ltx_inputs),
}
