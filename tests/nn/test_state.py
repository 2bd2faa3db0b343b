"""The parameters of fusedcomm.nn's layers on their way in and out: plain layers, state dicts, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fusedcomm.nn import ColumnParallelLinear, RowParallelLinear, UlyssesOut, UlyssesQKV, full_state_dict
from tests.helpers.nn_layers import BY_NAME, HIDDEN, Nested, local
from tests.helpers.on_ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("name", ["qkv-gqa", "out", "column", "row"])
def test_from_and_to_linear(rank: int, name: str) -> None:
    """from_linear takes the parameters over and to_linear gives them back; both copy."""
    layer = BY_NAME[name]
    linear = layer.plain(dtype=torch.bfloat16).eval()
    linear.bias.requires_grad_(False)
    module = layer.kind.from_linear(linear, **layer.options())
    assert not module.training
    assert [(p.dtype, p.requires_grad) for p in (module.weight, module.bias)] == [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
    ]
    back = module.to_linear()
    assert type(back) is nn.Linear
    assert repr(back) == repr(linear)
    assert not back.training
    for name, parameter in linear.named_parameters():
        assert torch.equal(back.get_parameter(name), parameter)
        assert back.get_parameter(name).requires_grad == parameter.requires_grad
        held = local(module.get_parameter(name))
        assert held.untyped_storage().nbytes() == held.nbytes
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert all(p.any() for each in (linear, back) for p in each.parameters())
    meta = layer.kind.from_linear(layer.plain().to("meta"), **layer.options())
    assert all(p.is_meta for p in meta.parameters())


@on_ranks(2)
def test_initial_values_are_those_of_linear(rank: int) -> None:
    for module_of, plain_of in [
        (lambda: UlyssesQKV(12, 4, 3, dtype=torch.bfloat16), lambda: nn.Linear(12, 36, dtype=torch.bfloat16)),
        (lambda: UlyssesQKV(12, 4, 3, 2, bias=False), lambda: nn.Linear(12, 24, bias=False)),
        (lambda: UlyssesOut(4, 3, 5), lambda: nn.Linear(12, 5)),
        (lambda: ColumnParallelLinear(5, 8), lambda: nn.Linear(5, 8)),
        (lambda: RowParallelLinear(12, 5, sequence_dim=1), lambda: nn.Linear(12, 5)),
    ]:
        torch.manual_seed(3)
        plain = plain_of()
        torch.manual_seed(3)
        module = module_of()
        whole = full_state_dict(module)
        assert whole.keys() == plain.state_dict().keys()
        assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
        on_meta = type(module).__new__(type(module))  # as torch does it for deferred initialisation
        on_meta.__dict__ = copy.deepcopy(module).to("meta").to_empty(device="cpu").__dict__
        torch.manual_seed(3)
        on_meta.reset_parameters()
        for a, b in zip(on_meta.parameters(), module.parameters(), strict=True):
            assert torch.equal(local(a), local(b))
        with torch.device("meta"):
            assert all(p.is_meta for p in module_of().parameters())


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return list(a) == list(b) and all(torch.equal(local(a[name]), local(b[name])) for name in a)


@on_ranks(2)
def test_state_dicts(rank: int) -> None:
    torch.manual_seed(4)
    plain, other = Nested(), Nested()
    model = plain.parallel()
    want = plain.state_dict()
    own = model.state_dict()
    assert list(own) == list(want)
    assert all(own[name].shape == value.shape for name, value in want.items())
    assert own["mlp.0.weight"].to_local().shape == (4, HIDDEN)
    assert own["mlp.2.weight"].to_local().shape == (HIDDEN, 4)
    assert own["mlp.2.weight"].to_local().data_ptr() == model.mlp[2].weight.to_local().data_ptr()

    assert same(full_state_dict(model), want)
    assert same(full_state_dict(nn.ModuleDict({"wrapped": model})), {f"wrapped.{k}": v for k, v in want.items()})
    assert same(full_state_dict(plain), want)
    assert same(model.state_dict(), own)  # whole only inside full_state_dict

    loaded = other.parallel()
    given = dict(want)
    loaded.load_state_dict(given)
    assert same(loaded.state_dict(), own)
    assert same(given, want)
    loaded = other.parallel()
    loaded.load_state_dict(own)
    assert same(full_state_dict(loaded), want)
    loaded = other.parallel()
    loaded.load_state_dict({name: local(value) for name, value in own.items()})  # as layers of plain tensors saved it
    assert same(full_state_dict(loaded), want)
    assert "DTensor" in {type(value.data).__name__ for value in loaded.state_dict().values()}
    loaded = other.parallel()
    loaded.load_state_dict(want, assign=True)
    assert same(loaded.state_dict(), own)
    assert isinstance(loaded.mlp[0].weight, nn.Parameter)
    held = local(loaded.mlp[0].weight)
    assert held.untyped_storage().nbytes() == 4 * HIDDEN * 4  # not all of the plain weight's
    other.load_state_dict(full_state_dict(model))
    assert same(other.state_dict(), want)


@on_ranks(2)
def test_refused_state_dicts(rank: int) -> None:
    layer = ColumnParallelLinear(4, 6)
    with pytest.raises(RuntimeError, match=r"size mismatch for weight.*\[5, 4\].*\[6, 4\]"):
        layer.load_state_dict({"weight": torch.ones(5, 4), "bias": torch.ones(6)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        layer.load_state_dict({"weight": torch.ones(6, 4)})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"scale"'):
        layer.load_state_dict({"weight": torch.ones(6, 4), "bias": torch.ones(6), "scale": torch.ones(1)})


@on_ranks(2)
def test_state_dict_does_not_communicate(rank: int) -> None:
    """The state dict on one rank alone. If it communicated, that rank would wait until its time-out."""
    model = Nested().parallel()
    if rank == 0:
        model.load_state_dict(model.state_dict())
        model.load_state_dict(Nested().state_dict())
        copy.deepcopy(model)
        repr(model)
    dist.barrier()


@on_ranks(4)
def test_copies_and_pickles(rank: int) -> None:
    module = ColumnParallelLinear(HIDDEN, 8, sequence_dim=0)
    x = torch.randn(3, HIDDEN)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), module(x))
    pair = dist.new_group([0, 1])
    if rank >= 2:
        with pytest.raises(ValueError, match="group must contain this rank"):
            ColumnParallelLinear(HIDDEN, 8, group=pair)
        return
    module = ColumnParallelLinear(HIDDEN, 8, sequence_dim=0, group=pair)
    assert local(module.weight).shape == (4, HIDDEN)
    saved = pickle.dumps(module)
    dist.destroy_process_group(pair)
    orphan = pickle.loads(saved)
    with pytest.raises(ValueError, match="group must be an initialised process group"):
        orphan(x)
    with pytest.raises(ValueError, match="group must be an initialised process group"):
        full_state_dict(orphan)
    orphan.group_name = dist.group.WORLD.group_name
    for collective in (lambda: orphan(x), orphan.to_linear):
        with pytest.raises(ValueError, match=r"must have the size it had when this module was made, 2, got 4"):
            collective()
