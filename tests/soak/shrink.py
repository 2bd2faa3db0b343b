"""The fewest steps of a failing program that still fail (Zeller's ddmin)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise


def shrink(steps: Sequence[int], fails: Callable[[list[int]], bool], most_tries: int) -> list[int]:
    """``steps`` must fail. The steps returned fail, and do not without any one of them, unless there were no more
    tries.
    """
    kept, num_parts, tries = list(steps), 2, 0
    while len(kept) > 1 and tries < most_tries:
        for part in _parts(kept, num_parts):
            rest = [step for step in kept if step not in part]
            tries += 1
            if fails(rest):
                kept, num_parts = rest, max(num_parts - 1, 2)
                break
            if tries == most_tries:
                break
        else:
            if num_parts == len(kept):
                break
            num_parts = min(2 * num_parts, len(kept))
    return kept


def _parts(steps: list[int], num_parts: int) -> list[list[int]]:
    """Parts whose lengths differ by one at most."""
    cuts = [len(steps) * i // num_parts for i in range(num_parts + 1)]
    return [steps[start:end] for start, end in pairwise(cuts)]
