"""Greedy decoding through tensor parallel half layers, without attention: a matmul by columns, a RowParallelTail.

    torchrun --nproc-per-node 2 examples/decode_loop.py

On GPUs the step is replayed as a CUDA graph, which has never run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fusedcomm

BATCH, HIDDEN, INNER, VOCAB, LAYERS, TOKENS = 4, 64, 256, 100, 6, 8
Tail = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def step(embedding: Tensor, head: Tensor, layers: Sequence[tuple[Tensor, Tail]], tokens: Tensor) -> None:
    residual = embedding[tokens]
    x = F.rms_norm(residual, (HIDDEN,))
    for up, tail in layers:
        x, residual = tail(F.silu(x @ up), residual)
    tokens.copy_((x @ head).argmax(-1))


def plain_tail(down: Tensor) -> Tail:
    return lambda x, residual: (F.rms_norm(total := residual + x @ down, (HIDDEN,), eps=1e-6), total)


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    torch.set_default_device(device)
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, group_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model on every rank
    ends = torch.randn(VOCAB, HIDDEN), torch.randn(HIDDEN, VOCAB)
    weights = [(torch.randn(HIDDEN, INNER) / 8, torch.randn(INNER, HIDDEN) / 16) for _ in range(LAYERS)]

    with fusedcomm.before_capture():  # on CPUs it changes nothing
        layers = []
        for up, down in weights:
            own = down.chunk(group_size)[rank].contiguous()
            tail = fusedcomm.inference.RowParallelTail(own, None, None, max_rows=BATCH)
            tail.warm_up([BATCH])
            layers.append((up.chunk(group_size, 1)[rank].contiguous(), tail))
        tokens = torch.arange(BATCH)
        step(*ends, layers, tokens)
    decode: Callable[[], None] = lambda: step(*ends, layers, tokens)  # noqa: E731
    if gpu:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            decode()
        decode = graph.replay

    plain, same = [(up, plain_tail(down)) for up, down in weights], torch.arange(BATCH)
    tokens.copy_(same)
    for number in range(TOKENS):
        decode()
        step(*ends, plain, same)
        if rank == 0:
            print(f"token {number}: {tokens.tolist()}")
        assert torch.equal(tokens, same)
    if rank == 0:
        print(f"decode_loop: the tokens on {group_size} ranks equal those of a single process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # behind main, with whose graph NCCL would wait for ever
