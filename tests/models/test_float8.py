"""torchao's Float8Linear under the styles of fusedcomm.parallel, beside torch's own styles."""

import copy
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import fusedcomm.parallel as our_parallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.spies import Dispatched

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed; `make models` installs it"),
]

K, N, TOKENS = 32, 48, 8
GATHER, SCATTER, REDUCE = "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"
CASES = {  # style, its layouts, ops of a forward and a backward
    "tokens": ("ColwiseParallel", {"input_layouts": Shard(1)}, [GATHER, SCATTER]),
    "held": ("ColwiseParallel", {}, [REDUCE]),
    "scattered": ("RowwiseParallel", {"output_layouts": Shard(1)}, [SCATTER, GATHER]),
    "summed": ("RowwiseParallel", {}, [REDUCE]),
}


def float8(linear: nn.Linear, **config: Any) -> nn.Linear:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    made: nn.Linear = Float8Linear.from_float(linear, Float8LinearConfig(**config))
    return made


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def step(layer: nn.Module, x: Tensor, rank: int) -> list[Any]:
    """The result, and gradients of x and of the parameters. Each rank has other largest elements."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.arange(1.0, 1.0 + y.numel()).view(y.shape).sin().to(y.dtype) * (1 + rank))
    grads = [p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *(g.full_tensor() if isinstance(g, DTensor) else g for g in grads)]


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [{}, {"round_scales_to_power_of_2": True}, {"emulate": True}], ids=str)
def test_a_layer(rank: int, case: str, dtype: torch.dtype, config: dict[str, bool]) -> None:
    """Results and gradients are bit for bit those of torch's style, but for a bias after a sum and emulated scales."""
    name, layouts, ops = CASES[case]
    mesh = init_device_mesh("cpu", (2,))
    for bias in (False, True):
        answers = []
        for styles in (torch_parallel, our_parallel):
            torch.manual_seed(0)
            style = getattr(styles, name)(**layouts)
            layer = torch_parallel.parallelize_module(float8(nn.Linear(K, N, bias, dtype=dtype), **config), mesh, style)
            x, placement = random(2, TOKENS, K, dtype=dtype), style.input_layouts[0]
            if isinstance(placement, Shard):
                x = x.chunk(2, placement.dim)[rank]
            with Dispatched() as spy:
                answers.append(step(layer, x, 0 if case == "summed" else rank))
        assert spy.names("fusedcomm") == ops
        wants, found = answers
        for i, (each, want) in enumerate(zip(found, wants, strict=True)):
            eps = torch.finfo(dtype).eps
            rows = bias and name == "RowwiseParallel" and i in (0, 3)  # torch adds bias / R to each partial sum
            close = 8 * eps if rows or "emulate" in config else 0  # emulated: values / scale, not times 1 / scale
            torch.testing.assert_close(each, want, rtol=close, atol=close * want.abs().max().item())


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((K, N), (K, N), (N, K)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def losses(styles: Any, mesh: DeviceMesh, prepared: bool) -> tuple[list[Tensor], nn.Module]:
    from torchao.float8 import convert_to_float8_training

    torch.manual_seed(0)
    model, tp = convert_to_float8_training(FeedForward()), mesh["tp"]
    if prepared:
        prepare = styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        torch_parallel.parallelize_module(model, tp, prepare)
    up = styles.ColwiseParallel(input_layouts=Replicate() if prepared else Shard(1))
    down = styles.RowwiseParallel(output_layouts=Shard(1))
    torch_parallel.parallelize_module(model, tp, {"gate": up, "up": up, "down": down})
    fully_shard(model, mesh=mesh["dp"])
    cast(FSDPModule, model).set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for seed in range(3):
        x = random(4, TOKENS, K) * (1 + seed)
        x = x.chunk(2)[mesh["dp"].get_local_rank()].chunk(2, 1)[tp.get_local_rank()]
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(p.detach().full_tensor() for p in model.parameters())], model


@on_ranks(4)
@pytest.mark.parametrize("prepared", [False, True])
def test_training(rank: int, prepared: bool) -> None:
    """Losses and weights of three steps with FSDP2. An x gathered by `PrepareModuleInput` is torchao's to cast."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wants, _ = losses(torch_parallel, mesh, prepared)
    found, model = losses(our_parallel, mesh, prepared)
    torch.testing.assert_close(found, wants, rtol=0, atol=0)
    by_torch = "torch's own: x is placed as (Replicate(),), where no tokens are to be gathered"
    up = by_torch if prepared else GATHER
    assert our_parallel.explain_layers(model) == {"gate": up, "up": up, "down": SCATTER}


@on_ranks(2)
def test_compiled_and_autocast(rank: int) -> None:
    """Autocast casts x alone, as torchao does on GPUs."""
    mesh, tokens = init_device_mesh("cpu", (2,)), our_parallel.ColwiseParallel(input_layouts=Shard(1))
    layer = torch_parallel.parallelize_module(float8(nn.Linear(K, N)), mesh, tokens)
    x = random(2, TOKENS, K).chunk(2, 1)[rank]
    wants = step(copy.deepcopy(layer), x, rank)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), wants[0], rtol=0, atol=0)
    torch.testing.assert_close(step(compiled, x, rank), wants, rtol=0, atol=0)
    for style in (our_parallel.ColwiseParallel(), our_parallel.RowwiseParallel(input_layouts=Replicate())):
        layer = torch_parallel.parallelize_module(float8(nn.Linear(K, N, bias=False)), mesh, style)
        want = layer(random(2, TOKENS, K, dtype=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer(random(2, TOKENS, K)), want, rtol=0, atol=0)


@on_ranks(2)
def test_what_is_left_to_torch(rank: int) -> None:
    """Other recipes, weights that FSDP2 gathers in float8, and subclasses have a reason."""
    from torchao.float8 import CastConfig, Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    class Derived(Float8Linear):
        pass

    e5m2 = CastConfig(target_dtype=torch.float8_e5m2)
    rowwise = Float8LinearConfig.from_recipe_name("rowwise")
    casts = "it casts input to torch.float8_e4m3fn by DYNAMIC and AXISWISE scales"
    for layer, why in (
        (Float8Linear.from_float(nn.Linear(K, N), rowwise), casts),
        (float8(nn.Linear(K, N), cast_config_weight=e5m2), "two operands are float8_e5m2"),
        (
            float8(nn.Linear(K, N), enable_fsdp_float8_all_gather=True),
            "its weight is a WeightWithDynamicFloat8CastTensor",
        ),
        (Derived.from_float(nn.Linear(K, N)), "it is a Derived"),
    ):
        layer = torch_parallel.parallelize_module(layer, init_device_mesh("cpu", (2,)), our_parallel.RowwiseParallel())
        assert our_parallel.explain_layers(layer) == {"": f"torch's own: {why}"} and isinstance(layer, Float8Linear)
