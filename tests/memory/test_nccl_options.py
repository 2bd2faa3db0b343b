"""Options for NCCL on a torch without it: a made-up ProcessGroupNCCL says what other builds of torch have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.memory import nccl_options

ZERO = 2  # NCCL_CTA_POLICY_ZERO in nccl.h


class Config:
    """ncclConfig_t as torch shows it, in a build that knows the policy."""

    cta_policy = 0


class Options:
    def __init__(self) -> None:
        self.config: Any = Config()


def old_options() -> Any:
    return SimpleNamespace(config=SimpleNamespace(min_ctas=0))


def build(monkeypatch: pytest.MonkeyPatch, version: tuple[Any, ...] = (2, 30, 7), **changes: Any) -> None:
    """Let torch.distributed be that of a build with NCCL; a change to None takes an attribute away."""
    backend = {"Options": Options, nccl_options.POLICY: ZERO} | changes
    have = SimpleNamespace(**{name: value for name, value in backend.items() if value is not None})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", have, raising=False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: version)


def test_options_have_the_policy_and_are_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch)
    first, second = fusedcomm.nccl_options(), fusedcomm.nccl_options()
    assert isinstance(first, Options) and first.config.cta_policy == ZERO
    assert second is not first and second.config is not first.config  # torch writes the group's name into them
    assert Config.cta_policy == 0


def test_a_torch_without_the_policy_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes in ({nccl_options.POLICY: None}, {"Options": old_options}):
        build(monkeypatch, (2, 27, 5), **changes)
        with pytest.raises(RuntimeError, match="must be a CUDA build with NCCL") as raised:
            fusedcomm.nccl_options()
        assert str(raised.value).endswith(f"torch {torch.__version__} has NCCL 2.27.5 without it")


def test_a_torch_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RuntimeError, match=f"torch {torch.__version__.replace('+', '.')} has no NCCL"):
        fusedcomm.nccl_options()


def test_the_version_of_nccl_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    build(monkeypatch, (2, 30, 7, "x"))
    assert nccl_options.nccl_version_text() == "2.30.7"
