"""torchtitan's Llama under its plan of tensor parallelism."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.small_llama import TOKENS, VOCAB
from tests.models.case import Case


def llama(layers: int) -> nn.Module:
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sizes = TransformerModelArgs(
        dim=32, n_layers=layers, n_heads=4, n_kv_heads=4, vocab_size=VOCAB, multiple_of=16, max_seq_len=TOKENS
    )
    model = Transformer(sizes)
    with torch.no_grad():
        model.init_weights()
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    from torchtitan.models.llama3.infra.parallelize import apply_tp

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False)
    return model


def inputs() -> dict[str, Any]:
    return {"tokens": torch.randint(0, VOCAB, (2, TOKENS))}


CASES = {"llama": Case("torchtitan", llama, tensor_parallel, inputs)}
