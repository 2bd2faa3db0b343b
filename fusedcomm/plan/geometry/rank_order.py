"""In which order a rank sends to the others, and reads what they have sent."""

from __future__ import annotations


def peers_of(rank: int, group_size: int) -> list[int]:
    """The order in which rank sends: no two ranks start on the same peer, and the own chunk comes last."""
    return [(rank + 1 + i) % group_size for i in range(group_size)]


def sources_of(rank: int, group_size: int) -> list[int]:
    """The order in which a rank reads: its own data first, then in the order in which the peers send."""
    return [(rank - i) % group_size for i in range(group_size)]
