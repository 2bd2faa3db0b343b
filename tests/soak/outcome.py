"""What running a program has found, on all ranks, as JSON and back."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

MOST_FAILURES = 5  # how many failures of a rank are reported


@dataclass(frozen=True)
class Failure:
    rank: int
    step: int
    what: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.what}"


@dataclass
class SoakOutcome:
    tally: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: list[Failure] = field(default_factory=list)
    broken: bool = False  # a rank has left its program: its process groups are of no more use
    late: bool = False  # the time is up

    @property
    def num_calls(self) -> int:
        return self.tally["op"].total()

    def facts(self) -> dict[str, Any]:
        failures = [asdict(failure) for failure in self.failures[:MOST_FAILURES]]
        return {"tally": self.tally, "failures": failures, "broken": self.broken, "late": self.late}

    def add(self, other: SoakOutcome) -> None:
        for kind, counts in other.tally.items():
            self.tally[kind].update(counts)
        self.failures += other.failures
        self.broken |= other.broken
        self.late |= other.late

    @staticmethod
    def of(all_facts: Iterable[dict[str, Any]]) -> SoakOutcome:
        total = SoakOutcome()
        for facts in all_facts:
            failures = [Failure(**failure) for failure in facts["failures"]]
            tally = defaultdict(Counter, {kind: Counter(counts) for kind, counts in facts["tally"].items()})
            total.add(SoakOutcome(tally, failures, facts["broken"], facts["late"]))
        return total
