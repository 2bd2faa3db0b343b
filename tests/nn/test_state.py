"""The parameters of fusedcomm.nn's layers on their way in and out: plain layers, state dicts, copies and pickles."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fusedcomm.nn import UlyssesOut, UlyssesQKV, full_state_dict
from tests.helpers.nn_layers import BY_NAME, HIDDEN, Nested
from tests.helpers.on_ranks import on_ranks


@on_ranks(2)
@pytest.mark.parametrize("name", ["qkv-gqa", "out"])
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
        held = module.get_parameter(name)
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
            assert torch.equal(a, b)
        with torch.device("meta"):
            assert all(p.is_meta for p in module_of().parameters())


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


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

    assert same(full_state_dict(model), want)
    assert same(full_state_dict(nn.ModuleDict({"wrapped": model})), {f"wrapped.{k}": v for k, v in want.items()})
    assert same(full_state_dict(plain), want)
    assert same(model.state_dict(), own)  # whole only inside full_state_dict

    loaded = other.parallel()
    loaded.load_state_dict(own)
    assert same(full_state_dict(loaded), want)
    loaded.qkv.load_state_dict(other.qkv.state_dict())  # a plain layer's
    assert torch.equal(loaded.qkv.weight, other.qkv.weight) and not torch.equal(loaded.qkv.weight, plain.qkv.weight)
    other.load_state_dict(full_state_dict(model))
    assert same(other.state_dict(), want)


@on_ranks(4)
def test_copies_and_pickles(rank: int) -> None:
    module = UlyssesQKV(HIDDEN, 4, 3)
    x = torch.randn(3, HIDDEN)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(torch.equal, again(x), module(x)))
    pair = dist.new_group([0, 1])
    if rank >= 2:
        with pytest.raises(ValueError, match="group must contain this rank"):
            UlyssesQKV(HIDDEN, 4, 3, group=pair)
        return
    saved = pickle.dumps(UlyssesQKV(HIDDEN, 4, 3, group=pair))
    dist.destroy_process_group(pair)
    orphan = pickle.loads(saved)
    with pytest.raises(ValueError, match="group must be an initialised process group"):
        orphan(x)
    orphan.group_name = dist.group.WORLD.group_name
    with pytest.raises(ValueError, match=r"must have the size it had when this module was made, 2, got 4"):
        orphan(x)
