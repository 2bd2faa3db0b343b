"""The ``tokens`` argument of a layer, translated into split arguments of the ops."""

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

import torch

from fusedcomm.memory.group import rank_of
from fusedcomm.plan.geometry.cut import chunk_parts

Tokens = int | Sequence[int] | None


def gathered(tokens: Tokens, size: int, group_size: int, group_name: str, name: str = "x") -> dict[str, Any]:
    """The split arguments of an op that gathers tokens; this rank's tensor has ``size`` tokens."""
    given = _checked(tokens, group_size)
    if given is None:
        return {}
    is_count = not isinstance(given, list)
    if not torch.compiler.is_compiling():  # the op checks it, too, with names of its own
        rank = rank_of(group_name)
        expected = (chunk_parts(given, group_size).sizes if is_count else given)[rank]  # type: ignore[arg-type]
        if size != expected:
            raise ValueError(f"{name} must have what tokens={given} gives rank {rank}, {expected} tokens, got {size}")
    return {"gather_size" if is_count else "gather_splits": given}


def scattered(tokens: Tokens, size: int, group_size: int) -> dict[str, Any]:
    """The arguments of an op that scatters ``size`` tokens, by default as torch.chunk does."""
    given = _checked(tokens, group_size)
    if given is None:
        return {}
    if (sum(given) if isinstance(given, list) else given) != size:
        raise ValueError(f"x must have all tokens, as tokens={given} says, got {size}")
    return {"scatter_splits": given} if isinstance(given, list) else {}


def _checked(tokens: Any, group_size: int) -> Any:
    """None, an int, or a list of an int for each rank."""
    if tokens is None or isinstance(tokens, int | torch.SymInt):
        return tokens
    if isinstance(tokens, Integral):  # NumPy's
        return int(tokens)
    wrong = not isinstance(tokens, Collection) or isinstance(tokens, str | torch.Tensor)
    if wrong or not all(isinstance(each, int | torch.SymInt | Integral) for each in tokens):
        raise TypeError(f"tokens must be an int, one for each rank, or None, got {type(tokens).__name__}")
    if len(tokens) != group_size:
        raise ValueError(f"tokens must have one entry per rank, {group_size}, got {len(tokens)}")
    return [each if isinstance(each, torch.SymInt) else int(each) for each in tokens]
