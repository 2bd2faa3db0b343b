"""One thing that the doctor has found, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

OK, ABSENT, WARNING, ERROR = "ok", "absent", "warning", "error"
SECTIONS = ("versions", "system", "gpus", "topology", "network", "settings", "cache", "ranks", "checks", "algorithms")
REFERRED = 40  # characters: a shorter text is told again
LEVELS = {
    OK: "usable",
    ABSENT: "not there, or not used, by design",
    WARNING: "usable, but slower or riskier than it could be",
    ERROR: "found, but not usable",
}


@dataclass(frozen=True)
class Finding:
    section: str
    name: str
    level: str
    text: str
    advice: str = ""


def in_order(findings: list[Finding]) -> list[Finding]:
    """The findings by section; those of one section stay in the order in which they were found."""
    return sorted(findings, key=lambda finding: SECTIONS.index(finding.section))


def exit_code(findings: list[Finding]) -> int:
    """0 where all that was found is usable or absent by design."""
    return int(any(finding.level == ERROR for finding in findings))


def told_once(findings: Iterable[Finding]) -> list[Finding]:
    """The findings as they are shown: one line for all things with the same finding, and no long text twice.

    What a line above says already is referred to.
    """
    told: list[Finding] = []
    for finding in _merged(findings):  # merged first, because that gives lines the names that are referred to
        for above in told:
            if above.level != OK and above.text != finding.text and len(above.text) > REFERRED:
                finding = replace(finding, text=finding.text.replace(above.text, f"see {above.name}, above"))
        told.append(finding)
    return told


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """The findings, with one line for those that say the same, at the place of the first."""
    merged: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.section, finding.text, finding.advice)
        if same := merged.get(key):
            level = max(same.level, finding.level, key=list(LEVELS).index)
            finding = replace(same, name=_joined(same.name, finding.name), level=level)
        merged[key] = finding
    return list(merged.values())


def _joined(names: str, name: str) -> str:
    """Two names in one: ``GPU 0`` and ``GPU 1`` are ``GPU 0, 1``."""
    kind, _, rest = name.partition(" ")
    return f"{names}, {rest if rest and names.startswith(f'{kind} ') else name}"


def by_value(values: Mapping[int, object]) -> str:
    """What each rank has, as ``rank 0: a, ranks 1 to 3: not set``."""
    ranks: dict[object, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault("not set" if value is None else value, []).append(rank)
    return ", ".join(f"{ranks_text(each)}: {value}" for value, each in ranks.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """The ranks as a text: ``rank 2``, ``ranks 0 to 3 and 7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [text for run in runs for text in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(ranks) == 1:
        return f"rank {texts[0]}"
    return f"ranks {' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}" if ranks else "no rank"
