"""Fixtures of the tests about tuned numbers."""

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"
