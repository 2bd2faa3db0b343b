"""`fusedcomm cache`: what it counts, compiles and removes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs

import fusedcomm
from fusedcomm.tools import main
from fusedcomm.tools.cache import kernels

SOURCE = 'loc("/somewhere/fusedcomm/kernels/triton/copy.py":1:1)'


def planted(cache: Path, folder: str, kernel: str, text: str) -> Path:
    (cache / folder).mkdir(parents=True)
    (cache / folder / f"{kernel}.ttir").write_text(text)
    return cache / folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "numbers"))
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))
    (tmp_path / "numbers").mkdir()
    return tmp_path / "triton"


def test_only_what_is_ours_is_counted_and_removed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = planted(cache, "A", "unpack_kernel", SOURCE)
    other_file = 'loc("/theirs.py":1:1)'
    beside = [planted(cache, "B", "their_kernel", SOURCE), planted(cache, "C", "unpack_kernel", other_file)]
    numbers = cache.parent / "numbers"
    tuned, other = numbers / "tuned-cpu-2-0.json", numbers / "notes.json"
    tuned.write_text("broken")
    other.write_text("")
    assert main(["cache", "show"]) == 0
    shown = capsys.readouterr().out
    assert "kernels: 1 compiled of 1" in shown and "numbers: 1 files" in shown and "not readable" in shown
    assert main(["cache", "clear", "--only", "numbers"]) == 0
    assert ours.exists() and other.exists() and not tuned.exists()
    assert main(["cache", "clear"]) == 0
    assert not ours.exists() and all(each.exists() for each in beside)


def test_what_cannot_be_warmed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "warm", "--shape", "8", "8", "8"]) == 2
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["cache", "warm", "--shape", "8", "8", "8"]) == 2
    assert "no GPU is here: name its architecture" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_second_warming_compiles_nothing(cache: Path) -> None:
    command = [sys.executable, "-m", "fusedcomm", "cache", "warm", "--shape", "128", "64", "128", "--arch", "90"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(fusedcomm.__file__).parents[1])}
    first, second = (
        subprocess.run([*command, "--world-size", "2"], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert set(kernels().values()) >= {"push_matmul_kernel", "gather_matmul_kernel", "unpack_kernel", "reduce_kernel"}
    assert first.startswith(f"sm_90: {len(kernels())} kernels compiled") and second.startswith("sm_90: 0 kernels")
