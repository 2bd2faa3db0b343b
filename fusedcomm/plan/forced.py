"""The algorithm forced by users of this process, where it can run."""

from __future__ import annotations

from fusedcomm import env
from fusedcomm.kernels.native_part import native

Forced = tuple[str | None, bool]  # an algorithm's name, and whether strictly


class force_algorithm:  # a function to its users: force_algorithm("fused"), or in a with statement
    """Make every op of this process use an algorithm where it can run; in a ``with`` statement, inside it only.

    Where the algorithm cannot run, the call runs ``unfused`` and logs the reason once. On a GPU it needs no proof. Call
    it alike on every rank, as the ranks of a call must run the same algorithm. It overrules ``FUSEDCOMM_ALGORITHM``.

    Args:
        name: "unfused", "chunked", "fused" or "pipelined"; None gives the choice back to
            ``FUSEDCOMM_ALGORITHM`` or the planner.
        strict: whether a call that cannot run so raises RuntimeError with the reason instead.

    Raises:
        ValueError: name is none of these.

    Example, on each of 2 ranks::

        x, w = torch.ones(4, 8), torch.ones(8, 6)
        with fusedcomm.force_algorithm("unfused"):
            assert fusedcomm.matmul_all_reduce(x, w).shape == (4, 6)
    """

    current: Forced = (None, False)

    def __init__(self, name: str | None, strict: bool = False) -> None:
        if name is not None and name not in env.ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(env.ALGORITHMS)} or None, got {name!r}")
        self.previous = force_algorithm.current
        self._set(name, strict)

    def __enter__(self) -> force_algorithm:
        return self

    def __exit__(self, *exc: object) -> None:
        self._set(*self.previous)

    @staticmethod
    def _set(name: str | None, strict: bool) -> None:
        force_algorithm.current = (name, strict)
        if native is not None:  # part of the key of prepared calls
            native.set_forced_algorithm(number_of(force_algorithm.current))


def number_of(forced: Forced) -> int:
    name, strict = forced
    return 2 * (None, *env.ALGORITHMS).index(name) + strict
