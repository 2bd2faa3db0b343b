"""The file of proofs: what one process has found out, another one reads, or ignores with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusedcomm.runtime import proof_file

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(proof_file, "_logged", set())
    return tmp_path


def test_the_file_adds_up_and_is_for_one_group_size(cache: Path) -> None:
    proof_file.add(CPU, 2, {"a": "", "b": "wrong"})
    proof_file.add(CPU, 2, {"b": ""})
    assert proof_file.read(CPU, 2) == {"a": "", "b": ""} and proof_file.read(CPU, 4) == {}
    [file] = cache.iterdir()
    assert file == proof_file.path_of(CPU, 2) and file.name.startswith("proofs-cpu-2-")
    assert file.stat().st_mode & 0o777 == 0o600


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda data: data | {"version": 2}, "it must be of version 1"),
    "another key": (lambda data: data | {"key": {}}, "of this device, group size and these versions"),
    "more fields": (lambda data: data | {"more": 1}, "it must have the fields version, key and outcomes"),
    "no text": (lambda data: data | {"outcomes": {"a": None}}, "its outcomes must be texts"),
    "a list": (lambda data: [data], "it must have the fields version, key and outcomes"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_file_is_ignored_with_the_reason(name: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    proof_file.add(CPU, 2, {"a": ""})
    file = proof_file.path_of(CPU, 2)
    change, reason = CHANGES[name]
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert proof_file.read(CPU, 2) == {} and proof_file.read(CPU, 2) == {}
    [record] = caplog.records
    assert record.getMessage().startswith(f"proofs in {file} are ignored: ") and reason in record.getMessage()
    file.chmod(0o660)
    assert proof_file.read(CPU, 2) == {} and "only its owner" in caplog.records[-1].getMessage()


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEDCOMM_CACHE_DIR", str(tmp_path / "file"))
    for _ in range(2):
        proof_file.add(CPU, 2, {"a": ""})
    [record] = caplog.records
    assert record.getMessage().startswith("proofs are not kept, and made again by every group: ")
