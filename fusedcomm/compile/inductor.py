"""fusedcomm's passes among those that Inductor runs before and after its own, which may be other people's."""

from __future__ import annotations

from typing import Any

import torch._inductor.config as config
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.11 and 2.12 take one pass only
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())  # not in torch 2.11
JOINT, PRE, POST = "joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
_replaced: dict[int, Any] = {}  # by id of a pass that was added: the setting, what `add` set, and what was there


class _Several(_InferenceAware or CustomGraphPass):  # type: ignore[misc]
    """All passes, in order, as one pass, for an Inductor that takes only one."""

    def __init__(self, passes: list[Any]) -> None:
        self.passes = passes

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for each in self.passes:
            if isinstance(each, _InferenceAware):
                each(graph, is_inference)
            else:
                each(graph)

    def uuid(self) -> Any:
        ids = [each.uuid() if hasattr(each, "uuid") else None for each in self.passes]
        return None if None in ids else ids


def add(custom_pass: Any, setting: str = PRE) -> None:
    """Add a pass behind those that are set already."""
    before = getattr(config, setting)
    now = _joined([*_passes(before), custom_pass])
    _replaced[id(custom_pass)] = (setting, now, before)
    setattr(config, setting, now)


def remove(custom_pass: Any) -> None:
    """If nobody has set passes since, what was set before `add` comes back as it was; otherwise only the pass goes."""
    setting, now, before = _replaced.pop(id(custom_pass))
    current = getattr(config, setting)
    if current is now:
        setattr(config, setting, before)
        return
    left = [each for each in _passes(current) if each is not custom_pass]
    if len(left) < len(_passes(current)):
        setattr(config, setting, _joined(left))


def _passes(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, _Several):
        return list(value.passes)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _joined(passes: list[Any]) -> Any:
    if len(passes) < 2:
        return passes[0] if passes else None
    return passes if _LISTS else _Several(passes)
