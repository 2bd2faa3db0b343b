"""One thing that the doctor has found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

OK, ABSENT, WARNING, ERROR = "ok", "absent", "warning", "error"
SECTIONS = ("versions", "system", "gpus", "topology", "settings", "cache", "ranks", "checks", "verdict")
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
    """Section by section; those of one as they were found."""
    return sorted(findings, key=lambda finding: SECTIONS.index(finding.section))


def exit_code(findings: list[Finding]) -> int:
    """0 where all that was found is usable or absent by design."""
    return int(any(finding.level == ERROR for finding in findings))
