"""bench/results.csv, a line per measured figure of bench/results/*.json; `make results`.

A figure is a ``value`` with a unit or a ``ratio``; ``low`` and ``high`` are P10 and P90, or the bench's own interval.
Counts, settings and computed figures are left out.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
FILE = FOLDER.with_suffix(".csv")
FACTS = ("file", "machine", "versions", "date", "commit", "command")
FIELDS = (*FACTS, "op", "shape", "what", "figure", "value", "unit", "ratio", "low", "high")
LABELS = "model block program part point variant fault name dtype direction algorithm layers "
LABELS += "budget_percent ranks mesh_shape shape"
SIZES = ["batch", "rows", "k", "n"]
OP, SHAPE = r"\b\w*(?:all_to_all|all_gather|reduce_scatter|all_reduce)\w*", r"\d+(?: x \d+)+"
LEFT_OUT = "case versions machine settings topology timing sizes cells traces plans matmuls load samples crossovers"
UNITS = {  # of "what figure", by the first pattern; a number without one is no figure
    r" (fused|best|num_\w+|tried|flops|pairs|goal|mbit|rounds|relative_error|\w*repeats|seed|programs|calls)$": None,
    r" (\w+_)?ms\b|, ms\b|ms_per_layer$": "ms",
    r" (\w+_)?us\b|, us\b|^(processes.*|measurements/)?host time": "us",
    r"tflops$": "TFLOP/s",
    r"strided copies| (algbw|busbw)$": "GB/s",
    r"instructions$": "instructions",
    r"matmul_flops": "FLOP/s",
    r"bandwidth": "B/s",
    r"percent|share$": "%",
    r" minutes$": "min",
    r"\b(ratio|cost|gain|worst)\b|over(?!head)|speedup|free_exchange|efficiency|_kept|drawn_anew|single_rounds": "",
    r"^kernel speed/(pack|unpack|reduce)|^moe speed/": "TB/s",
    r"goals value": "",
    r" compile \w+$|pass_s$|seconds$|latency|overhead|exposed|\b(hot|entry|rest|waits|least|\w+_above_matmuls)\b": "s",
}
MEASURED = {"overlap": "pass_s$", "redistribution": "^times "}  # the rest of these is computed


def lines() -> Iterator[dict[str, str]]:
    for path in sorted(FOLDER.glob("*.json")):
        report = json.loads(path.read_text())
        facts = dict(zip(FACTS, (path.stem, *_facts(report)), strict=True))
        for name, case in report.get("cases", {"": {"found": report}}).items():
            found = _figures(case.get("found"), {"name": name} if name else {}, ())
            for line in filter(None, (_line(path.stem, *each) for each in found)):
                yield dict.fromkeys(FIELDS, "") | facts | line


def _facts(report: Mapping[str, Any]) -> Iterator[str]:
    run, machine = report.get("run", report), report.get("machine") or {}
    versions = report.get("versions") or machine.get("versions") or {}
    computer = machine.get("machine", machine)
    gpus = [each for each in dict.fromkeys(computer.get("gpus", [])) if each != "a pretended GPU"]
    yield ", ".join([*gpus, f"{computer['cpu']}, {computer['cpus']} CPUs"]) if computer else "not recorded"
    yield ", ".join(f"{name} {versions.get(name) or 'not recorded'}" for name in ("torch", "triton", "python"))
    yield from (run["date"], report["commit"] or "not recorded", run["command"])


def _figures(
    node: Any, labels: Mapping[str, Any], path: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Numbers, timings and intervals, each with the labels of the records around it."""
    if isinstance(node, dict) and "median" not in node:
        node = {**node.get("case", {}), **node}
        known = (*LABELS.split(), *SIZES, "op", "num_bytes")
        labels = {**labels, **{name: node[name] for name in known if _is_label(node.get(name))}}
        for name, each in node.items():
            if name not in labels and name not in LEFT_OUT.split():
                transparent = isinstance(each, list) and name in ("rows", "ops", "calls")
                yield from _figures(each, labels, path if transparent else (*path, name))
    elif isinstance(node, list) and not _is_interval(node):
        for each in node:
            if isinstance(each, dict):
                yield from _figures(each, labels, path)
    elif not isinstance(node, bool | str | None):
        yield labels, " ".join(path), node


def _is_label(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, list) and all(isinstance(each, int) for each in value))


def _is_interval(node: list[Any]) -> bool:
    return len(node) == 2 and all(isinstance(each, float) for each in node)


def _line(file: str, labels: Mapping[str, Any], figure: str, node: Any) -> dict[str, str] | None:
    known = [(name, labels[name]) for name in LABELS.split() if name in labels]
    what = ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in known)
    text = f"{what} {figure}"
    timing = node if isinstance(node, dict) else {"low": node[0], "high": node[1]} if isinstance(node, list) else None
    unit = next((unit for pattern, unit in UNITS.items() if re.search(pattern, text)), "s" if timing else None)
    if unit is None or not re.search(MEASURED.get(file, ""), figure):
        return None
    sizes = [str(labels[name]) for name in SIZES if labels.get(name)]
    line = {
        "op": labels.get("op") or "".join(re.findall(OP, text)[:1]),
        "shape": " x ".join(sizes) or "".join(re.findall(SHAPE, what)[:1]) or labels.get("num_bytes", ""),
        **{"what": what, "figure": figure, "unit": unit},
        "value" if unit else "ratio": timing.get("median", "") if timing else node,
        **{new: timing.get(old, timing.get(new)) for old, new in (("p10", "low"), ("p90", "high")) if timing},
    }
    return {name: f"{each:.6g}" if isinstance(each, float | int) else each for name, each in line.items()}


def text() -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines())
    return out.getvalue()


if __name__ == "__main__":
    FILE.write_text(text())
