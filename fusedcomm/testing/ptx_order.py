"""Finds places in PTX where data could be overtaken by the flag that announces them.

This follows every path through a kernel with a few facts about what has happened on it. All of these must hold:

    data stores -> bar.sync -> counter (acq_rel) -> bar.sync -> flag (release.sys)    a push
    poll (acquire.sys) -> bar.sync -> data loads, cp.async too                        reads

and stores of the async proxy (TMA) must be waited for before the barrier. Scalar 64-bit accesses
are header words, all other global accesses are data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_LABEL = re.compile(r"^([\w$]+):(?!:)")
_OPERATION = re.compile(r"^(@!?%\w+\s+)?([\w.:]+)\s*(.*)$")
_WORD = re.compile(r"\.[bus]64$")


@dataclass(frozen=True)
class Instruction:
    line: int
    predicated: bool
    op: str
    operands: str


@dataclass(frozen=True)
class PathFacts:
    """What has happened on a path, seen from one thread."""

    unbarred: bool = False  # global stores since the last barrier
    uncounted: bool = False  # data stores since the last counter
    unwaited: bool = False  # TMA stores since the last cp.async.bulk.wait_group 0
    polled: bool = False  # a poll since the last barrier
    acquired: bool = False  # a poll, then a barrier


def violations(ptx: str, reads_after_wait: bool = False) -> list[str]:
    """One line per instruction that a path reaches too early. ``reads_after_wait``: check loads too."""
    instructions, labels = _parse(ptx)
    found: set[tuple[int, str]] = set()
    seen: set[tuple[int, PathFacts]] = set()
    work = [(0, PathFacts())]
    while work:
        at, facts = work.pop()
        if (at, facts) in seen or at == len(instructions):
            continue
        seen.add((at, facts))
        instruction = instructions[at]
        facts, problem = _step(instruction, facts, reads_after_wait)
        if problem:
            found.add((instruction.line, f"line {instruction.line}: {instruction.op}: {problem}"))
        if instruction.op.startswith("bra"):
            # Names are unique, except those that inline assembly repeats in scopes of its own.
            targets = labels[instruction.operands.strip()]
            work.append((min(targets, key=lambda target: abs(target - at)), facts))
        if instruction.predicated or not instruction.op.startswith(("bra", "ret")):
            work.append((at + 1, facts))
    return [text for _, text in sorted(found)]


def _step(instruction: Instruction, facts: PathFacts, reads_after_wait: bool) -> tuple[PathFacts, str | None]:
    op = instruction.op
    if op.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")):
        acquired = facts.acquired or facts.polled
        return replace(facts, unbarred=facts.unwaited, polled=False, acquired=acquired), None
    if op.startswith("cp.async.bulk.tensor") and ".global.shared" in op:
        return replace(facts, unbarred=True, uncounted=True, unwaited=True), None
    if op == "cp.async.bulk.wait_group" and instruction.operands.strip() == "0":
        return replace(facts, unwaited=False), None
    if op.startswith("st.") and "global" in op and "release" not in op:
        return replace(facts, unbarred=True, uncounted=facts.uncounted or not _WORD.search(op)), None
    if op.startswith(("atom", "ld")) and "acquire" in op and ".sys" in op:
        return replace(facts, polled=True, acquired=False), None
    if reads_after_wait and _reads_data(op):
        return facts, None if facts.acquired else "data are read before the wait and its barrier"
    if op.startswith(("atom", "st.")) and ("release" in op or "acq_rel" in op):
        problem = "stores before it are not complete in all threads" if facts.unbarred else None
        if "acq_rel" in op:
            return replace(facts, uncounted=False), problem
        if ".sys" in op and facts.uncounted:
            problem = "data stores before it are not counted"
        return facts, problem
    return facts, None


def _reads_data(op: str) -> bool:
    """Whether an op reads peers' chunks: by ordinary loads, or cp.async into shared memory. TMA loads read weights."""
    return (op.startswith("ld.") and "global" in op and not _WORD.search(op)) or op.startswith(
        ("cp.async.ca", "cp.async.cg")
    )


def _parse(ptx: str) -> tuple[list[Instruction], dict[str, list[int]]]:
    """The instructions of the (single) kernel of a module, and what each label points to."""
    instructions: list[Instruction] = []
    labels: dict[str, list[int]] = {}
    body = ptx[ptx.index(".entry") :]
    first_line = ptx[: ptx.index(".entry")].count("\n") + 1
    for number, text in enumerate(body.splitlines(), first_line):
        for part in text.split("//")[0].split(";"):
            statement = part.strip().lstrip("{").strip()
            label = _LABEL.match(statement)
            if label:
                labels.setdefault(label.group(1), []).append(len(instructions))
                statement = statement[label.end() :].strip()
            operation = _OPERATION.match(statement)
            if operation and operation.group(2)[0].isalpha():
                predicate, op, operands = operation.groups()
                instructions.append(Instruction(number, bool(predicate), op, operands))
    return instructions, labels
