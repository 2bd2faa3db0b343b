"""A small Llama of experts, trained on two ranks by dispatches and combines, has the losses of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusedcomm
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import BATCH, TOKENS, VOCAB, WIDTH, Llama, llama

NUM_EXPERTS, K, HIDDEN, STEPS = 8, 2, 24, 200


class Experts(nn.Module):
    """SwiGLU experts, of which a rank has a block. One process has all, in loops over experts."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.router, self.num_ranks = nn.Linear(WIDTH, NUM_EXPERTS, bias=False), num_ranks
        shapes = (NUM_EXPERTS, WIDTH, 2 * HIDDEN), (NUM_EXPERTS, HIDDEN, WIDTH)
        own = [(torch.randn(shape) / shape[1] ** 0.5).chunk(num_ranks)[rank] for shape in shapes]
        self.up, self.down = (nn.Parameter(w.clone()) for w in own)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(K)
        if self.num_ranks == 1:
            return self._by_loops(x.flatten(0, 1), scores.flatten(0, 1), ids.flatten(0, 1)).view_as(x)
        facts = {"num_experts": NUM_EXPERTS, "capacity": None, "max_tokens": BATCH * TOKENS, "alignment": 8}
        h, _, routing = fusedcomm.dispatch_grouped_matmul(x, ids, self.up, **facts)
        return fusedcomm.grouped_matmul_combine(_swiglu(h), self.down, routing, scores)

    def _by_loops(self, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            y = y.index_add(0, token, _swiglu(x[token] @ up) @ down * scores[token, choice, None])
        return y


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def of_experts(rank: int, num_ranks: int) -> Llama:
    model = llama()
    for block in model.layers:
        block.feed_forward = Experts(rank, num_ranks)
    return model.double()


def losses(rank: int, num_ranks: int) -> list[float]:
    """A rank has its part of each batch. Gradients of experts are whole, those of replicated weights are summed."""
    model, found = of_experts(rank, num_ranks), []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    replicated = [p for name, p in model.named_parameters() if not name.endswith((".up", ".down"))]
    for step in range(STEPS):
        starts, strides = torch.randint(1, VOCAB, (2, BATCH, 1), generator=torch.Generator().manual_seed(step))
        tokens = ((starts + (strides % 3) * torch.arange(TOKENS + 1)) % VOCAB).chunk(num_ranks)[rank]
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (BATCH * TOKENS)
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if num_ranks > 1:
            for t in (total, *(p.grad for p in replicated)):
                dist.all_reduce(t)
        optimizer.step()
        found.append(total.item())
    return found


@pytest.mark.nightly
@on_ranks(2)
@pytest.mark.parametrize("algorithm", ["chunked", "unfused"])
def test_losses_are_those_of_one_process(rank: int, algorithm: str) -> None:
    """In float64, where no rounding moves a token to another expert."""
    with fusedcomm.force_algorithm(algorithm, strict=True):
        found = losses(rank, 2)
    want = losses(0, 1)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(want), rtol=1e-9, atol=0)
    assert want[-1] < want[0] / 2
