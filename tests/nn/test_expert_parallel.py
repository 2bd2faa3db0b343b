"""ExpertParallel against loops over tokens and experts in one process, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fusedcomm
from fusedcomm.nn import ExpertParallel, full_state_dict
from tests.helpers.groups import empty_is_nan
from tests.helpers.on_ranks import on_ranks

H, HIDDEN, E, K, SIZE = 6, 5, 4, 2, 2
LEADS: list[list[tuple[int, ...]]] = [[(5,), (3,)], [(2, 3), (1, 4)], [(0,), (4,)]]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def inputs(rank: int, lead: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    """x, expert_ids of which some are -1, scores."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x, logits = (torch.randn(*lead, n, generator=generator, dtype=torch.float64) for n in (H, E))
    scores, ids = logits.softmax(-1).topk(K)
    ids[..., -1:][x[..., :1] < -1] = -1
    return [x.requires_grad_(), ids, scores.requires_grad_()]


def layer_of(**options: Any) -> ExpertParallel:
    torch.manual_seed(3)
    return ExpertParallel(H, HIDDEN, E, **{"max_tokens": 6, "dtype": torch.float64, **options})


def all_experts() -> dict[str, Tensor]:
    torch.manual_seed(3)
    shapes = {"w1": (HIDDEN, H), "w2": (H, HIDDEN), "w3": (HIDDEN, H)}
    linears = {name: [nn.Linear(*shape[::-1], bias=False).weight for _ in range(E)] for name, shape in shapes.items()}
    return {name: torch.stack(ws).detach().double().requires_grad_() for name, ws in linears.items()}


def looped(ws: dict[str, Tensor], x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    ys = [scores.sum() * x.new_zeros(0, H)]
    for token, experts, weights in zip(x.view(-1, H), ids.view(-1, K).tolist(), scores.view(-1, K), strict=True):
        y = 0 * token
        for expert, score in zip(experts, weights, strict=True):
            if expert >= 0:
                w1, w2, w3 = (w[expert] for w in ws.values())
                y = y + score * (w2 @ (nn.functional.silu(w1 @ token) * (w3 @ token)))
        ys.append(y[None])
    return torch.cat(ys).view(x.shape)


@on_ranks(SIZE)
@pytest.mark.parametrize("algorithm", ["unfused", "chunked"])
def test_a_step_of_training(rank: int, algorithm: str) -> None:
    """Initial values, results, gradients of x and scores, weights after a step of SGD: those of one process."""
    for leads in LEADS:
        ws, everyone = all_experts(), [inputs(r, lead) for r, lead in enumerate(leads)]
        shared = nn.Linear(H, H, dtype=torch.float64)
        wants = [looped(ws, *theirs) + shared(theirs[0]) for theirs in everyone]
        sum(want.square().sum() for want in wants).backward()
        torch.optim.SGD(ws.values(), lr=0.1).step()

        x, ids, scores = inputs(rank, leads[rank])
        with fusedcomm.force_algorithm(algorithm, strict=True), empty_is_nan():
            layer = layer_of(shared_expert=copy.deepcopy(shared), dtype=torch.float32).double()
            y = layer(x, ids, scores)
            y.square().sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        torch.testing.assert_close(y, wants[rank], **CLOSE)
        for got, want in zip((x, scores), everyone[rank][::2], strict=True):
            torch.testing.assert_close(got.grad, want.grad, **CLOSE)
        for name, w in ws.items():
            torch.testing.assert_close(layer.get_parameter(name), nn.Parameter(w.chunk(SIZE)[rank]), **CLOSE)


@on_ranks(SIZE)
def test_one_compilation(rank: int) -> None:
    """Also of a capacity, and of a shared expert."""
    layer = layer_of(capacity=5, shared_expert=nn.Linear(H, H, dtype=torch.float64))
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x, ids, scores = inputs(rank, (4,), seed)
        answers = []
        for run in (layer, compiled):
            with torch.compiler.set_stance("fail_on_recompile" if seed and run is compiled else "default"):
                y = run(x, ids, scores)
            answers.append([y, *torch.autograd.grad(y.square().sum(), (x, scores, *layer.parameters()))])
        torch.testing.assert_close(*answers, rtol=0, atol=0)


@on_ranks(SIZE)
@pytest.mark.parametrize("dim", [0, 1])
def test_weights_are_drawn_alike_after_fully_shard(rank: int, dim: int) -> None:
    """Sharded along E or F, by ranks that have the same experts."""
    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("data", "experts"))
    for num_experts in (E, 1):
        with torch.device("meta"):
            layer = ExpertParallel(H, HIDDEN + 1, num_experts, (mesh, "experts"), max_tokens=6)
        fully_shard(layer, mesh=mesh["data"], shard_placement_fn=lambda w: Shard(dim))
        layer.to_empty(device="cpu")
        torch.manual_seed(3)
        layer.reset_parameters()
        torch.manual_seed(3)
        whole = ExpertParallel(H, HIDDEN + 1, num_experts, (mesh, "experts"), max_tokens=6)
        for sharded, w in zip(layer.parameters(), whole.parameters(), strict=True):
            assert isinstance(sharded, DTensor) and sharded.full_tensor().equal(w)


@on_ranks(SIZE)
def test_state(rank: int) -> None:
    """A state dict of all experts, in parts or by DTensors; autocast; errors."""
    ws, (x, ids, scores) = all_experts(), inputs(rank, (3,))
    layer = layer_of(dtype=torch.float32)
    with torch.no_grad():
        layer.load_state_dict({name: 2 * w.chunk(SIZE)[rank] for name, w in ws.items()})
        want = looped({name: 2 * w for name, w in ws.items()}, x, ids, scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float(), ids, scores).dtype == torch.bfloat16
    mesh = init_device_mesh("cpu", (SIZE,))
    for name, w in list(layer.named_parameters()):
        layer.register_parameter(name, nn.Parameter(DTensor.from_local(w.detach(), mesh, [Shard(0)])))
    y = layer(x.float(), ids, scores)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert isinstance(layer.w2.grad, DTensor) and layer.w2.grad.to_local().any()
    for name, w in full_state_dict(layer).items():
        torch.testing.assert_close(w.double(), 2 * ws[name].detach(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_experts must be a multiple of group_size, got 3"):
        ExpertParallel(H, HIDDEN, 3)
    assert "num_experts=4, capacity=None, max_tokens=6, group_size=2" in repr(layer)
