"""Adds fusedcomm's passes to Inductor's custom passes, beside other packages' passes."""

import threading
from typing import Any

import torch._inductor.compile_fx as compile_fx_module
import torch._inductor.config as config
from torch._inductor import custom_graph_pass
from torch._inductor.codecache import FxGraphCache
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

_LISTS = hasattr(custom_graph_pass, "get_custom_graph_passes")  # torch 2.11 and 2.12 take one pass only
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())  # not in torch 2.11
JOINT, PRE, POST = "joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"
_replaced: dict[int, Any] = {}  # by id of an added pass: it, the setting, the value set by `add`, and the value before
_inductor: Any = compile_fx_module
_compile_fx: Any = None  # torch's, while passes are added
_cache: Any = FxGraphCache
_save_graph: Any = None  # likewise
_compiling = threading.local()  # Inductor compiles a graph, and caches it, in one thread


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


def add(custom_pass: Any, setting: str) -> None:
    """Add a pass behind the passes set already."""
    global _compile_fx, _save_graph
    before = getattr(config, setting)
    now = _joined([*_passes(before), custom_pass])
    _replaced[id(custom_pass)] = (custom_pass, setting, now, before)
    setattr(config, setting, now)
    if _inductor.compile_fx is not _with_passes:
        _compile_fx, _inductor.compile_fx = _inductor.compile_fx, _with_passes
    if _cache._save_graph is not _save_unless_left_out:
        _save_graph, _cache._save_graph = _cache._save_graph, staticmethod(_save_unless_left_out)


def remove(custom_pass: Any) -> None:
    """Restore the value before `add` if nobody has set passes since; otherwise remove the pass alone."""
    _, setting, now, before = _replaced.pop(id(custom_pass))
    if not _replaced and _inductor.compile_fx is _with_passes:
        _inductor.compile_fx = _compile_fx
    if not _replaced and _cache._save_graph is _save_unless_left_out:
        _cache._save_graph = staticmethod(_save_graph)
    current = getattr(config, setting)
    if current is now:
        setattr(config, setting, before)
        return
    left = [each for each in _passes(current) if each is not custom_pass]
    if len(left) < len(_passes(current)):
        setattr(config, setting, _joined(left))


def reorders_collectives() -> bool:
    """Whether a setting, equal on all ranks as all that changes collectives, lets Inductor overlap or bucket them."""
    buckets = (f"bucket_{name}_fx" for name in ("all_gathers", "reduce_scatters", "all_reduces"))
    return bool(
        (config.reorder_for_compute_comm_overlap and config.reorder_for_compute_comm_overlap_passes)
        or config.aten_distributed_optimizations.enable_overlap_scheduling
        or any(getattr(config, name, "none") != "none" for name in buckets)
    )


def leave_out_of_caches(whether: bool) -> None:
    """Say of the graph that this thread compiles whether caches may not have it.

    AOTAutograd's cache keeps the key of Inductor's, which it then misses; unless it keeps whole graphs, by a setting.
    """
    _compiling.left_out = whether


def _save_unless_left_out(*args: Any) -> None:
    if not getattr(_compiling, "left_out", False):
        _save_graph(*args)


def _with_passes(model: Any, inputs: Any, *args: Any, config_patches: Any = None, **kwargs: Any) -> Any:
    """torch's ``compile_fx``, with the passes that settings of this one compile would leave out."""
    patches = dict(config_patches or {})
    for custom_pass, setting, _, _ in _replaced.values():
        current = _passes(patches.get(setting, getattr(config, setting)))
        if not any(type(each) is type(custom_pass) for each in current):
            patches[setting] = _joined([*current, custom_pass])
    return _compile_fx(model, inputs, *args, config_patches=patches or None, **kwargs)


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
