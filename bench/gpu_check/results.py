"""Results to be committed, bench/results/gpu-*.json, and regressions since the last of the same GPU."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusedcomm.bench.gpu_check import speeds
from fusedcomm.bench.gpu_check.driver import ROOT, PartResult

FOLDER = ROOT / "bench/results"
MOST_ERROR = 400  # characters
SAID = ("ok", "seconds", "compiled", "skipped")


def record(results: Sequence[PartResult], run: Mapping[str, Any]) -> dict[str, Any]:
    """The run as it is committed: commit, GPU, versions, command, and each case, without tracebacks."""
    cases: dict[str, Any] = {}
    for result in results:
        for name, case in result.cases.items():
            error = {} if case["ok"] else {"error": str(case.get("error")).replace(f"{ROOT}/", "")[:MOST_ERROR]}
            said = {key: case[key] for key in (*SAID, "found") if case.get(key) is not None}
            cases[f"{result.part}/{name}"] = said | error
    machine = cases.get("machine/machine", {}).get("found")
    return {
        "gpu": machine.get("gpu", {}).get("name") if machine else None,  # the model, as in "NVIDIA H200"
        "commit": machine.get("commit") if machine else None,
        "run": dict(run),
        "machine": machine,
        "parts": {result.part: result.status for result in results},
        "cases": cases,
    }


def text(recorded: Mapping[str, Any]) -> str:
    """JSON with a line for each case."""
    each = [f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in recorded["cases"].items()]
    facts = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in recorded.items() if key != "cases"]
    return ",\n".join(["{\n" + facts[0], *facts[1:], ' "cases": {\n' + ",\n".join(each) + "\n }"]) + "\n}\n"


def file_name(recorded: Mapping[str, Any]) -> str:
    """As in gpu-h200-2026-11-26.json."""
    model = re.sub(r"\W+", "-", (recorded["gpu"] or "none").replace("NVIDIA ", "")).lower()
    return f"gpu-{model}-{recorded['run']['date'][:10]}.json"


def last_cases(gpu: str | None, folder: Path = FOLDER) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The names of the committed files of this GPU, oldest first, and the last result of each case in them."""
    files = [(path.name, json.loads(path.read_text())) for path in folder.glob("gpu-*.json")]
    ours = sorted((each for each in files if each[1]["gpu"] == gpu), key=lambda each: each[1]["run"]["date"])
    return [name for name, _ in ours], {name: case for _, each in ours for name, case in each["cases"].items()}


def compared(recorded: Mapping[str, Any], folder: Path = FOLDER) -> list[str]:
    """Lines that name each figure worse than in the last committed results of the same GPU model."""
    gpu = recorded["gpu"]
    if gpu is None:
        return []
    names, before = last_cases(gpu, folder)
    if not names:
        return [f"No committed result of an {gpu} to compare with."]
    cases = recorded["cases"]
    fails = [name for name, case in cases.items() if not case["ok"] and before.get(name, {}).get("ok")]
    slower = speeds.worse(found_in(cases), found_in(before))
    head = f"Compared with {', '.join(names)}:"
    if not fails and not slower:
        return [head + " nothing is worse."]
    return [head, *(f"  fails now: {name}" for name in fails), *(f"  worse: {each}" for each in slower)]


def found_in(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: case.get("found") for name, case in cases.items() if case["ok"]}
