"""Whatever torch.set_default_device says, the package makes its tensors on a device that it names."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

from docs.generate.imports import modules, room

ROOT = Path(__file__).parents[2]
MOVED = {function.__name__ for function in _device_constructors()}  # what the default device moves


def without_device(source: str) -> list[int]:
    """The lines of calls such as torch.zeros(4), or zeros(4) imported from torch, that name no device."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "torch"
        for alias in node.names
        if alias.name in MOVED
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) in {f"torch.{name}" for name in MOVED} | imported)
        and all(keyword.arg != "device" for keyword in node.keywords)
    ]


def test_every_tensor_names_its_device() -> None:
    assert {"zeros", "empty", "ones", "full", "tensor", "arange", "eye", "rand", "randint"} <= MOVED
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for name, file in modules(ROOT).items()
        if room(name) != "bench"  # its programs set no default device
        for line in without_device(file.read_text())
    ]
    assert not found, f"these calls must name a device: {found}"


def test_a_tensor_without_a_device_is_found() -> None:
    assert without_device("torch.zeros(4)\ntorch.zeros(4, device=d)\nx.new_zeros(4)\ntorch.empty_like(x)") == [1]
    assert without_device("from torch import eye as one\none(3)\nf(torch.tensor([1], dtype=t))") == [2, 3]
    with torch.device("meta"):  # what the rule is about
        assert torch.zeros(1).is_meta and not torch.zeros(1, device="cpu").is_meta
