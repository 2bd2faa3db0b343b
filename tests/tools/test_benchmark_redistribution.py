"""benchmarks.redistribution writes what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import redistribution


def test_it_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redistribution, "SHAPES", ((8, 16), (5, 3)))
    monkeypatch.setattr(redistribution, "LARGE_SHAPES", ())
    assert redistribution.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    report, printed = json.loads((tmp_path / "out.json").read_text()), capsys.readouterr().out
    assert len(report["rows"]) == 4 and len(report["goals"]) == 5
    for row in report["rows"]:
        figures = [f"{row['fewer_percent']:.1f}", f"{row['torch_collectives']:.2f}", f"{row['collectives']:.2f}"]
        figures += [f"{row['bytes_ratio']:.3f}", f"{row['worst_bytes_ratio']:.3f}", f"{row['time_ratio']:.3f}"]
        assert any(figures == line.split()[-7:-1] for line in printed.splitlines()), (figures, printed)
