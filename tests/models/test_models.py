"""Models of other packages, unchanged: values and gradients as in one process, and how many collectives are fused.

The packages are no development tools: `make models` installs them.
"""

import copy
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fusedcomm.compile
from fusedcomm.compile.reports import CompileReport
from fusedcomm.launch.ranks import RankPool
from tests.helpers.block_checks import no_latency
from tests.helpers.graphs import recorded_graphs
from tests.models.case import Case, skip_without

pytestmark = pytest.mark.nightly

# Fused, of all collectives, by kind, in models of one layer, of each kind that the model has. Reductions that are
# added count as they were written; exchanges of constants and of gradients, one each, are all_to_alls too. In training
# AOTAutograd saves a sum, and not its residual_out: its norm stays outside.
FUSED = {  # model: inference; forward and backward
    "diffusers.wan": (
        "all_gather 0/1, all_reduce 0/1, all_to_all 4/5",
        "all_gather 0/1, all_reduce 0/2, all_to_all 8/10",
    ),
    "diffusers.wan-fused-qkv": (
        "all_gather 0/1, all_reduce 0/1, all_to_all 2/3",
        "all_gather 0/1, all_reduce 0/2, all_to_all 4/6",
    ),
    "diffusers.flux": ("all_gather 0/1, all_to_all 12/13", "all_gather 0/1, all_to_all 24/26"),
    "diffusers.flux2": ("all_gather 0/1, all_to_all 10/11", "all_gather 0/1, all_to_all 20/22"),
    "diffusers.qwen-image": ("all_gather 0/1, all_to_all 7/8", "all_gather 0/1, all_to_all 14/16"),
    "diffusers.ltx": (  # in inference the tables of one layer are as large as what moves
        "all_gather 0/1, all_reduce 0/1, all_to_all 6/9",
        "all_gather 0/1, all_reduce 0/4, all_to_all 16/18",
    ),
    "transformers.llama": ("all_gather 0/1, all_reduce 2/3, 2 norms", "all_gather 0/1, all_reduce 5/11, 1 norms"),
    "transformers.qwen3": ("all_gather 0/1, all_reduce 2/3, 2 norms", "all_gather 0/1, all_reduce 5/11, 1 norms"),
    "deepspeed.distributed-attention": ("all_to_all 4/4", "all_to_all 8/8"),
    "deepspeed.distributed-attention-with-norms": ("all_to_all 4/5", "all_to_all 8/10"),
    "deepspeed.hugging-face-llama": ("all_gather 0/1, all_to_all 4/5", "all_gather 0/1, all_to_all 8/9"),
    "torchtitan.llama": ("all_gather 3/4, reduce_scatter 2/3, 2 norms", "all_gather 5/7, reduce_scatter 5/6, 1 norms"),
}
FUSED_IN_TWO_LAYERS = {"diffusers.wan": "all_gather 0/1, all_reduce 0/4, all_to_all 16/18"}
FUSED_ON_FOUR_RANKS = {"diffusers.flux": FUSED["diffusers.flux"][0]}  # as on two


@pytest.mark.parametrize("model", FUSED)
def test_inference(ranks: Callable[[int], RankPool], model: str) -> None:
    compare(ranks, model, False, FUSED[model][0])


@pytest.mark.parametrize("model", FUSED)
def test_training(ranks: Callable[[int], RankPool], model: str) -> None:
    compare(ranks, model, True, FUSED[model][1])


@pytest.mark.parametrize("model", FUSED_IN_TWO_LAYERS)
def test_two_layers(ranks: Callable[[int], RankPool], model: str) -> None:
    compare(ranks, model, True, FUSED_IN_TWO_LAYERS[model], layers=2)


@pytest.mark.parametrize("model", FUSED_ON_FOUR_RANKS)
def test_four_ranks(ranks: Callable[[int], RankPool], model: str) -> None:
    compare(ranks, model, False, FUSED_ON_FOUR_RANKS[model], world_size=4)


def compare(
    ranks: Callable[[int], RankPool], model: str, training: bool, fused: str, layers: int = 1, world_size: int = 2
) -> None:
    package = model.split(".")[0]
    skip_without(package)
    assert ranks(world_size).run(check, model, training, layers) == [fused] * world_size


def check(rank: int, model: str, training: bool, layers: int) -> str:
    """Values and gradients: one process, eager ranks and compiled ranks. The result is what of the graphs is fused."""
    package, name = model.split(".")
    case: Case = importlib.import_module(f"tests.models.{package}_models").CASES[name]
    torch.manual_seed(0)
    with torch.set_grad_enabled(training), case.around():
        whole, inputs = randomized(case.make(layers).eval()), case.inputs()
        weights = torch.randn(result(whole, inputs).shape)
        want = run(whole, whole, inputs, weights)
        parallel = case.parallelize(copy.deepcopy(whole))
        eager = run(parallel, parallel, case.local(inputs), case.local(weights))
        with recorded_graphs(), no_latency(), fusedcomm.compile.enabled(commute=True) as report:
            got = run(torch.compile(parallel), parallel, case.local(inputs), case.local(weights))
    want["result"] = case.local(want["result"])
    assert_near({name: of_all_ranks(t, case, name) for name, t in got.items()}, want)
    assert_near({name: local(t) for name, t in got.items()}, {name: local(t) for name, t in eager.items()})
    return summary(report)


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """No parameter is equal in all its elements, as the weights of norms and the biases are at first."""
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p)
    return model


def result(program: Callable[..., Any], inputs: dict[str, Any]) -> Tensor:
    out = program(**inputs)
    return out if isinstance(out, Tensor) else out[0]


def run(program: Callable[..., Any], model: nn.Module, inputs: dict[str, Any], weights: Tensor) -> dict[str, Tensor]:
    """The result, and this rank's gradients of its weighted sum by the name of the parameter."""
    model.zero_grad()
    y = result(program, inputs)
    if torch.is_grad_enabled():
        (y * weights).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"result": y.detach(), **grads}


def local(t: Any) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def of_all_ranks(t: Tensor, case: Case, name: str) -> Tensor:
    if isinstance(t, DTensor):
        return t.full_tensor()
    if case.summed and name != "result":
        t = t.clone()
        dist.all_reduce(t)
    return t


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Within what a sum of float32 in another order changes."""
    assert got.keys() == want.keys()
    for name, t in want.items():
        difference = float((got[name] - t).abs().max() / (1 + t.abs().max()))
        assert difference < 2e-6, f"{name} differs by {difference:g}"


def summary(report: CompileReport) -> str:
    """Like "all_gather 0/1, all_to_all 4/8": fused of all, by kind; and "2 norms" of those."""
    every = Counter(line.collective for line in report.collectives)
    fused = Counter(line.collective for line in report.collectives if line.status == "fused")
    norms = sum(str(line.op).endswith("_norm") for line in report.collectives)
    shown = [f"{kind} {fused[kind]}/{n}" for kind, n in sorted(every.items())]
    return ", ".join([*shown, f"{norms} norms"] if norms else shown)
