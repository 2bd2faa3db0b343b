"""benchmarks.redistribution writes what it prints."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import redistribution, redistribution_torch

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
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


def test_columns_are_counted_pair_by_pair() -> None:
    """The pairs are those of 2 x 2 ranks and a matrix that all divide. torch has no flattened mesh."""
    with redistribution_torch.world(4):
        mesh = redistribution_torch.mesh((2, 2), flatten=False)
        row = redistribution.compare(mesh, (8, 8), redistribution.PLAIN)
        found: list[tuple[int, int]] = []
        for before, after in redistribution.pairs(2, 2):
            theirs = redistribution_torch.collectives(
                mesh, (8, 8), redistribution.placed(before), redistribution.placed(after)
            )
            if theirs:
                both = [redistribution.sharding((8, 8), (2, 2), each) for each in (before, after)]
                steps = redistribution.search.plan(*both, redistribution.ITEMSIZE, redistribution.links((2, 2))).steps
                found.append((len(theirs), sum(step.kind != "slice" for step in steps)))
    assert row.pairs == len(found)
    assert row.fewer_percent == pytest.approx(100 * statistics.mean(ours < theirs for theirs, ours in found))
    assert row.collectives == pytest.approx(statistics.mean(ours for _, ours in found))
    assert row.worst_more_collectives == max(ours - theirs for theirs, ours in found) <= 0
