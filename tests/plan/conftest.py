"""Fixtures of the tests about tuned numbers."""

from pathlib import Path

import pytest

from fusedcomm.plan.cost import tuned


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "_logged", set())
    return tmp_path / "cache"
