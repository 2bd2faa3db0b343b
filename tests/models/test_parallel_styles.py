"""Models of other packages by their own plans, with the styles of fusedcomm.parallel, as docs/parallel.md shows it.

Losses, norms, gradients and weights are those under the styles that the package uses by itself, and in one process.
"""

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel

from fusedcomm.launch.ranks import RankPool
from fusedcomm.parallel import explain_layers
from tests.helpers.small_llama import TOKENS, Run, agree, batch_of, difference, loss_of, plain_name, train
from tests.helpers.spies import Dispatched
from tests.models import torchtitan_models, transformers_models
from tests.models.case import skip_without

pytestmark = pytest.mark.nightly

PAGE = (Path(__file__).parents[2] / "docs/parallel.md").read_text()
CLOSE = 1e-6  # relative; float32 has 1.2e-7
LAYERS = 2
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def seeded(make: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make(LAYERS)


def collectives(spy: Dispatched) -> Counter[str]:
    return Counter(spy.names("_c10d_functional"))


# --- torchtitan ---

CHECKPOINTING = {  # mode and selective_ac_option; how often the two ops run in a step
    "none": ("none", "", (9, 9)),
    "every-second-block": ("selective", "2", (11, 11)),  # torchtitan's default
    "by-op": ("selective", "op", (13, 13)),
    "by-op-saving-ours": ("selective", "op", (13, 9)),
    "full": ("full", "", (13, 13)),
}


def patched() -> ModuleType:
    """torchtitan's module with the line of its source changed that the page changes."""
    from torchtitan.models.llama3.infra import parallelize

    source = inspect.getsource(parallelize)
    (change,) = re.findall(r"^-(.*)\n\+(.*)$", section("torchtitan"), re.M)
    assert source.count(f"\n{change[0]}\n") == 1
    module = ModuleType("patched_parallelize")
    exec(compile(source.replace(*change), inspect.getfile(parallelize), "exec"), vars(module))
    return module


@functools.cache
def dims() -> Any:
    """Two ranks of tensor parallelism, the others of FSDP2. DTensor takes equal meshes for one: they are made once."""
    from torchtitan.distributed import ParallelDims

    size = dist.get_world_size()
    made = ParallelDims(dp_replicate=1, dp_shard=size // 2, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=size)
    with mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
        made.build_mesh()
    return made


def data() -> DeviceMesh | None:
    return dims().get_mesh("fsdp") if dims().fsdp_enabled else None


def config(checkpointing: str, with_loss_parallel: bool) -> Any:
    from torchtitan.config import JobConfig

    made = JobConfig()
    made.training.seq_len, made.training.mixed_precision_param = TOKENS, "float32"
    made.parallelism.disable_loss_parallel = not with_loss_parallel
    made.activation_checkpoint.mode, made.activation_checkpoint.selective_ac_option, _ = CHECKPOINTING[checkpointing]
    return made


def around(with_loss_parallel: bool) -> AbstractContextManager[None]:
    return loss_parallel() if with_loss_parallel else nullcontext()


def titan_llama(parallelize: Any, checkpointing: str, with_loss_parallel: bool) -> nn.Module:
    settings = config(checkpointing, with_loss_parallel)
    model = parallelize.parallelize_llama(seeded(torchtitan_models.llama), dims(), settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return model


def titan_step(model: nn.Module, with_loss_parallel: bool) -> Dispatched:
    batch = batch_of(0) if data() is None else batch_of(0).chunk(data().size())[data().get_local_rank()]
    with around(with_loss_parallel), Dispatched() as spy:
        loss_of(model, batch).backward()
    return spy


def check_torchtitan(rank: int, checkpointing: str, with_loss_parallel: bool) -> None:
    from torchtitan.models.llama3.infra import parallelize

    runs: list[Run] = []
    spies: list[Dispatched] = []
    ours = patched()
    if checkpointing == "by-op-saving-ours":
        ours._op_sac_save_list.add(torch.ops.fusedcomm.matmul_reduce_scatter.default)
    for module in (parallelize, ours):
        model = titan_llama(module, checkpointing, with_loss_parallel)
        runs.append(train(model, data=data(), before_piece=lambda last: around(with_loss_parallel)))
        spies.append(titan_step(model, with_loss_parallel))
    stock, found = runs
    assert difference(found, stock) <= CLOSE
    agree(found)
    if data() is None:  # torchtitan's FSDP2 adds up gradients without a mean
        assert difference(found, train(seeded(torchtitan_models.llama))) <= CLOSE

    layers = {plain_name(name): why for name, why in explain_layers(model).items()}
    block = dict.fromkeys(("attention.wq", "attention.wk", "attention.wv"), f"{GATHER}, shared by 3 layers")
    block |= dict.fromkeys(("feed_forward.w1", "feed_forward.w3"), f"{GATHER}, shared by 2 layers")
    block |= dict.fromkeys(("attention.wo", "feed_forward.w2"), SCATTER)
    assert layers == {"output": GATHER} | {
        f"layers.{i}.{name}": why for i in range(LAYERS) for name, why in block.items()
    }

    gathers, scatters = CHECKPOINTING[checkpointing][-1]
    assert Counter(spies[1].names("fusedcomm")) == {GATHER: gathers, SCATTER: scatters}
    left = collectives(spies[1])
    logits = 0 if with_loss_parallel else 1
    assert (left["all_gather_into_tensor"], left["reduce_scatter_tensor"]) == (1 + logits, 1)
    assert spies[0].names("fusedcomm") == []
    if checkpointing == "none":
        before = collectives(spies[0])
        assert (before["all_gather_into_tensor"], before["reduce_scatter_tensor"]) == (10 + logits, 10)
        if data() is None:  # in the backward of FSDP2 the gradients of norms are added up, too
            assert left["all_reduce"] == before["all_reduce"] == (3 if with_loss_parallel else 0)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("world_size", [2, 4])
def test_torchtitan_llama(ranks: Callable[[int], RankPool], world_size: int, checkpointing: str) -> None:
    skip_without("torchtitan")
    ranks(world_size).run(check_torchtitan, checkpointing, True)


def test_torchtitan_llama_without_loss_parallel(ranks: Callable[[int], RankPool]) -> None:
    skip_without("torchtitan")
    ranks(2).run(check_torchtitan, "none", False)


# --- transformers ---


def recipe() -> dict[str, Any]:
    """What the example of the page defines; it has changed the registry then."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", section("transformers"), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/parallel.md", "exec"), names)
    return names


def unchanged_registry() -> AbstractContextManager[Any]:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    return mock.patch.dict(ALL_PARALLEL_STYLES._global_mapping)


def mixtral(layers: int) -> nn.Module:
    """The experts' weights have the names of styles as well."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = transformers_models.SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(num_hidden_layers=layers, **sizes))


MODELS = {"llama": transformers_models.llama, "mixtral": mixtral}
OPS = {  # in the forward and in the backward of a step of two layers
    ("llama", False): (4, 11),
    ("llama", True): (4, 5),
    ("mixtral", False): (2, 7),
}


def trained(model: nn.Module) -> Run:
    return train(model, called=lambda tokens: model(tokens).logits, max_norm=None)


def steps(model: nn.Module) -> tuple[Dispatched, Dispatched]:
    with Dispatched() as forward:
        loss = loss_of(lambda tokens: model(tokens).logits, batch_of(0))
    with Dispatched() as backward:
        loss.backward()
    return forward, backward


def check_transformers(rank: int, name: str, shared: bool) -> None:
    make = MODELS[name]
    stock = transformers_models.own_plan(seeded(make))
    want, spies = trained(stock), steps(stock)
    reduced = sum(collectives(spy)["all_reduce"] for spy in spies)
    assert difference(want, trained(seeded(make))) <= CLOSE
    with unchanged_registry():
        changes = recipe()["shared"]
        model = transformers_models.own_plan(seeded(make), changes if shared else None)
    found, spies = trained(model), steps(model)
    assert difference(found, want) <= CLOSE
    agree(found)
    assert tuple(spy.names("fusedcomm") for spy in spies) == tuple([REDUCE] * count for count in OPS[name, shared])
    assert sum(map(collectives, spies), Counter()) == {"all_reduce": 1, "all_gather_into_tensor": 1}
    assert reduced == 1 + sum(OPS[name, False])
    if name == "llama":
        assert set(model.config.base_model_tp_plan.values()) == {"colwise", "rowwise"}
        held = f"{REDUCE} in the backward, {{}}as all ranks hold x"
        five = held.format("shared, " if shared else "")
        assert Counter(explain_layers(model).values()) == Counter(
            [REDUCE] * 2 * LAYERS + [five] * 5 * LAYERS + [held.format("")]
        )


@pytest.mark.parametrize(("name", "shared"), OPS)
def test_transformers(ranks: Callable[[int], RankPool], name: str, shared: bool) -> None:
    skip_without("transformers")
    ranks(2).run(check_transformers, name, shared)


def check_loaded(rank: int, path: str) -> None:
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    if rank == 0:
        seeded(transformers_models.llama).save_pretrained(path)
    dist.barrier()
    with unchanged_registry():
        shared = recipe()["shared"]
        model = LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, tp_plan=shared))
    assert difference(trained(model), trained(seeded(transformers_models.llama))) <= CLOSE
    assert tuple(len(spy.names("fusedcomm")) for spy in steps(model)) == OPS["llama", True]


def test_transformers_loads_a_model(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    skip_without("transformers")
    skip_without("accelerate")
    ranks(2).run(check_loaded, str(tmp_path))
