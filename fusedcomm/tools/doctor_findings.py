"""A finding of the doctor, with its advice."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

OK, ABSENT, WARNING, ERROR = "ok", "absent", "warning", "error"
SECTIONS = ("versions", "gpus", "settings", "ranks", "checks", "algorithms")
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


def told_once(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by section, with one line for all things with the same finding: GPU 0, 1."""
    merged: dict[tuple[str, str, str], Finding] = {}
    for finding in sorted(findings, key=lambda finding: SECTIONS.index(finding.section)):
        key = (finding.section, finding.text, finding.advice)
        if same := merged.get(key):
            level = max(same.level, finding.level, key=list(LEVELS).index)
            kind, _, rest = finding.name.partition(" ")
            name = f"{same.name}, {rest if rest and same.name.startswith(f'{kind} ') else finding.name}"
            finding = replace(same, name=name, level=level)
        merged[key] = finding
    return list(merged.values())


def by_value(values: Mapping[int, object]) -> str:
    """Each rank's value, as ``rank 0: a, ranks 1 to 3: not set``."""
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
    if len(texts) > 1:
        texts = [", ".join(texts[:-1]), texts[-1]]
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(texts)}" if ranks else "no rank"
