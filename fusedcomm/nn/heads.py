"""The heads of each rank inside Ulysses attention: a block of q's heads, and the heads of k and v that these read.

Blocks of q's heads are balanced: their sizes differ by at most 1, where torch.chunk would leave ranks without any. With
grouped queries num_heads / num_kv_heads heads of q, a group, read one head of k and v; several ranks may get the same
head of k and v.
"""


def head_splits(num_heads: int, group_size: int) -> list[int]:
    """How many heads of q each rank has, the larger blocks first."""
    least, more = divmod(num_heads, group_size)
    return [least + (rank < more) for rank in range(group_size)]


def readers(num_heads: int, num_kv_heads: int, group_size: int) -> list[tuple[int, list[int]]]:
    """For each rank the first head of k and v that its heads of q read, and how many of them read it and the next."""
    found, start, group = [], 0, num_heads // num_kv_heads
    for size in head_splits(num_heads, group_size):
        end = start + size
        read = range(start // group, -(-end // group)) if size else range(0)
        found.append((read.start, [min(end, (head + 1) * group) - max(start, head * group) for head in read]))
        start = end
    return found


def kv_ranges(num_heads: int, num_kv_heads: int, group_size: int) -> list[tuple[int, int]]:
    """The (start, length) of the heads of k and v that each rank gets."""
    return [(start, len(counts)) for start, counts in readers(num_heads, num_kv_heads, group_size)]


def repeats(num_heads: int, num_kv_heads: int, group_size: int, rank: int) -> list[int] | None:
    """How often the rank needs each of its heads of k and v, so that each head of q has one of its own.

    None where all are read by as many: attention takes such groups as they are.
    """
    _, counts = readers(num_heads, num_kv_heads, group_size)[rank]
    return counts if len({*counts}) > 1 else None
