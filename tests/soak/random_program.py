"""A random program over the ranks of one world: its groups, and who calls what on which group, step by step.

The program is drawn from (seed, index) alone, so that all ranks draw the same one and a failing one can be run again.
Every rank takes its steps in the same order, so nobody waits in a circle. Ranks that are not in a step's group run
ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.soak.random_call import SoakCase, draw

NUM_STEPS = 200
NUM_GROUPS = 4  # made by new_group, beside WORLD and a mesh
CAPS = (1 << 11, 1 << 12, 1 << 14)  # sizes of workspaces that make calls run in rounds
MOST_ROUNDS = 1000  # about: peers that do not take part wait meanwhile, and their next call has a time-out
FUSED_SHARE = {"cpu": 0.01, "cuda": 0.3}  # on a CPU it runs in Triton's interpreter
REPEATED = 0.6  # share of calls that are like the group's last one, so that they are prepared
JITTERS = (0.0, 0.02, 0.1)  # how often a rank sleeps within a round
MESH_DIMS = ("outer", "inner")


@dataclass(frozen=True)
class SoakGroup:
    """Some ranks of the world. ``form``: how it is handed to an op."""

    number: int
    ranks: tuple[int, ...]
    kind: str  # "world", "new_group", or a dim of the mesh
    form: str = "group"  # "group", "name", "mesh", "none"
    workspace_bytes: int | None = None

    def __str__(self) -> str:
        cap = f", {self.workspace_bytes} bytes" if self.workspace_bytes else ""
        return f"group {self.number} ({self.kind} {list(self.ranks)}{cap})"


@dataclass(frozen=True)
class SoakCall:
    group: SoakGroup
    case: SoakCase
    algorithm: str | None  # None: the planner's choice
    seed: int  # seed of the inputs: no two calls have the same

    def __str__(self) -> str:
        return f"{self.case} on {self.group}, {self.algorithm or 'planned'}"


@dataclass(frozen=True)
class SoakStep:
    """``action``: "call" makes the calls, two at once on two threads; "reset", "close" and "remake" a group."""

    number: int
    action: str
    group: SoakGroup
    calls: tuple[SoakCall, ...] = ()
    compare: bool = False  # all results that have come until now

    def __str__(self) -> str:
        what = " beside ".join(map(str, self.calls)) if self.calls else f"{self.action} {self.group}"
        return f"step {self.number}: {what}"


@dataclass(frozen=True)
class SoakProgram:
    seed: int
    index: int
    world_size: int
    groups: tuple[SoakGroup, ...]
    steps: tuple[SoakStep, ...]
    jitter: float

    def only(self, numbers: Sequence[int]) -> SoakProgram:
        """The steps of these numbers, unchanged."""
        kept = set(numbers)
        return replace(self, steps=tuple(step for step in self.steps if step.number in kept))


def draw_program(seed: int, index: int, world_size: int, device_type: str) -> SoakProgram:
    random = Random(f"{seed} {index} {world_size}")
    groups = _draw_groups(random, world_size)
    last: dict[int, SoakCall] = {}
    steps = [_draw_step(random, number, groups, device_type, last) for number in range(NUM_STEPS)]
    return SoakProgram(seed, index, world_size, tuple(groups), tuple(steps), random.choice(JITTERS))


def _draw_groups(random: Random, world_size: int) -> list[SoakGroup]:
    """WORLD, overlapping groups of it, and sometimes those of a mesh."""
    everyone = tuple(range(world_size))
    groups = [SoakGroup(0, everyone, "world", random.choice(("none", "group", "name", "mesh")))]
    for _ in range(NUM_GROUPS):
        size = random.choice((1, *[*range(2, world_size + 1)] * 4))
        ranks = tuple(sorted(random.sample(everyone, size)))
        cap = random.choice((None, *CAPS))
        groups.append(SoakGroup(len(groups), ranks, "new_group", random.choice(("group", "name")), cap))
    if world_size % 2 == 0 and random.random() < 0.3:
        half = world_size // 2
        columns = [everyone[column::half] for column in range(half)]
        rows = [everyone[:half], everyone[half:]]
        for dim, parts in zip(MESH_DIMS, (columns, rows), strict=True):
            groups += [SoakGroup(len(groups) + i, ranks, dim, "mesh") for i, ranks in enumerate(parts)]
    return groups


def _draw_step(
    random: Random, number: int, groups: list[SoakGroup], device_type: str, last: dict[int, SoakCall]
) -> SoakStep:
    """``last``: each group's last call."""
    kind, group = random.random(), random.choice(groups)
    compare = random.random() < 0.5
    if kind < 0.01:
        return SoakStep(number, "reset", group)
    if kind < 0.02:
        return SoakStep(number, "close", group)
    if kind < 0.025 and group.kind == "new_group":
        return SoakStep(number, "remake", group)
    if kind < 0.0275:
        return SoakStep(number, "collect", group)
    call = last[group.number] = _draw_call(random, group, device_type, last.get(group.number))
    # On a GPU waiting kernels of two threads could come in another order on each rank.
    if kind < 0.07 and device_type == "cpu" and call.algorithm != "fused":
        other = random.choice([each for each in groups if each is not group])
        beside = replace(_draw_call(random, other, device_type, last.get(other.number)), algorithm=call.algorithm)
        last[other.number] = beside
        return SoakStep(number, "call", group, (call, beside), compare)
    return SoakStep(number, "call", group, (call,), compare)


def _draw_call(random: Random, group: SoakGroup, device_type: str, last: SoakCall | None) -> SoakCall:
    if last is not None and last.algorithm != "fused" and random.random() < REPEATED:
        return replace(last, seed=random.getrandbits(48))
    case = draw(random, len(group.ranks))
    algorithm = random.choice(("chunked", "chunked", "chunked", "unfused", None))
    if random.random() < FUSED_SHARE[device_type] and (case.is_small or device_type != "cpu"):
        algorithm = "fused"
    seed = random.getrandbits(48)
    if group.workspace_bytes and case.num_bytes > MOST_ROUNDS * group.workspace_bytes:
        return _draw_call(random, group, device_type, None)
    return SoakCall(group, case, algorithm, seed)
