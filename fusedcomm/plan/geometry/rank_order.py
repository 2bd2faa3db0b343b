"""The order of a rank's sends to the others, and of its reads of their chunks."""


def peers_of(rank: int, group_size: int) -> list[int]:
    """A rank's order of sends: no two ranks start on the same peer, and the own chunk comes last."""
    return [(rank + 1 + i) % group_size for i in range(group_size)]


def sources_of(rank: int, group_size: int) -> list[int]:
    """A rank's order of reads: its own data first, then in the peers' order of sends."""
    return [(rank - i) % group_size for i in range(group_size)]
