"""A long wait is logged once, with the missing ranks, long before its time-out."""

import logging
import time
from collections.abc import Sequence

log = logging.getLogger("fusedcomm")

PATIENCE_S = 30.0


class Patience:
    """When one wait began, and whether it was logged."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.told = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return not self.told and self.seconds >= PATIENCE_S

    def tell(self, ranks: Sequence[int], where: str) -> None:
        self.told = True
        names = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
        log.warning("still waiting for %s (%s s) in %s", names, f"{self.seconds:.3g}", where)
