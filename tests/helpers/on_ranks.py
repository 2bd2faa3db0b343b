"""Tests whose body runs in every rank.

    @on_ranks(2)
    @pytest.mark.parametrize("algorithm", ["chunked", "fused"])
    def test_values(rank: int, algorithm: str) -> None: ...

The test fails if its body raises in any rank. All arguments but the rank are pickled on their way there.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any

import tests.helpers.gloo_gathers  # noqa: F401  in ranks that are spawned, too
from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory import consent, group


@dataclass(frozen=True)
class _Body:
    """What is sent to the ranks. A function cannot be pickled if its name in its module means the test around it."""

    module: str
    name: str

    def __call__(self, rank: int, **arguments: Any) -> None:
        test = getattr(importlib.import_module(self.module), self.name)
        test.__wrapped__(rank, **arguments)


def begin_consents(rank: int, number: int) -> None:
    """As in new processes: after a test whose ranks came to other programs, one would be ahead in its count."""
    consent._consents.clear()
    consent.groups = SimpleNamespace(store=lambda pg, purpose: group.store(pg, f"{purpose} {number}"))  # type: ignore[assignment]
    forget_consents(rank)


def forget_consents(rank: int, patience: float = 1.0) -> None:
    """Graphs agreed to before are unknown, and no rank is impatient with slow compilers."""
    consent._PATIENCE = patience
    for each in consent._consents.values():
        each._answers.clear()
        each._agreed_at.clear()
        each._in_step = True


def on_ranks(world_size: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """``world_size`` ranks of the session run the body; without a number, as many as its argument ``world_size``."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        rank, *others = signature.parameters.values()

        @wraps(body)
        def test(ranks: Callable[[int], RankPool], **arguments: Any) -> None:
            size = arguments["world_size"] if world_size is None else world_size
            ranks(size).run(_Body(body.__module__, body.__name__), **arguments)

        # pytest reads the names of fixtures from here
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[rank.replace(name="ranks"), *others]
        )
        return test

    return decorate
