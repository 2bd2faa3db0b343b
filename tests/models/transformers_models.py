"""Language models of transformers under their own plans of tensor parallelism."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.small_llama import VOCAB
from tests.models.case import Case

BATCH, TOKENS = 2, 8
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "use_cache": False,
    "attn_implementation": "sdpa",
}


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **SIZES))


def qwen3(layers: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=layers, **SIZES))


def own_plan(model: Any, changes: dict[str, str] | None = None) -> nn.Module:
    """``changes`` are put into the plan."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=dist.get_world_size(), tp_plan=changes or "auto")
    config, _, mesh = model.prepare_distribute_model(config)
    return model.maybe_distribute_model(model, config, mesh)


def inputs() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, VOCAB, (BATCH, TOKENS))}


def _case(make: Callable[[int], nn.Module]) -> Case:
    return Case("transformers", make, own_plan, inputs)


CASES = {"llama": _case(llama), "qwen3": _case(qwen3)}
