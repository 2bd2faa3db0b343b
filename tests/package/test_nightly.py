"""The parts of `make nightly` have every nightly test once, and tell how each part ended."""

import json
import sys
from pathlib import Path

import pytest

from tests import nightly
from tests.memory import test_sanitizers
from tests.nightly import PARTS, ROOT, Command, Part


def runs(command: Command, file: str) -> bool:
    paths = [each for each in command if each.startswith("tests/")]
    ignored = [each.removeprefix("--ignore=") for each in command if each.startswith("--ignore=")]
    return any(file.startswith(path) for path in paths) and file not in ignored


def test_each_nightly_test_is_in_one_part() -> None:
    for path in ROOT.glob("tests/*/test_*.py"):
        if "nightly" in path.read_text() and path.name != Path(__file__).name:
            file = str(path.relative_to(ROOT))
            parts = [name for name, part in PARTS.items() if any(runs(command, file) for command in part.commands)]
            assert len(parts) == 1, f"{file} must be in one part, is in {parts}"


def test_what_the_sanitizers_run_and_change_is_there() -> None:
    """Nightly alone runs them."""
    assert all((ROOT / name).exists() for name in test_sanitizers.SYMMETRIC_MEMORY)
    for _, file, right, wrong, _ in test_sanitizers.PLANTED.values():
        assert (ROOT / file).read_text().count(right) == 1 and right != wrong


def python(code: str) -> Command:
    return (sys.executable, "-c", code)


@pytest.mark.nightly
def test_a_part_that_fails_or_hangs_is_told_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = python("print('FAILED a - b'); print('\\n== 2 failed, 3 passed in 4 s =='); exit(1)")
    parts = {
        "hangs": Part(1, (python("import time; time.sleep(60)"), python("print('never')"))),
        "fails": Part(60, (python(""), summary, python("print('never')"))),
        "passes": Part(60, (python("print('== 5 passed in 1 s ==')"),)),
        "torch": Part(60, (python("exit(1)"),)),
    }
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "KILLED_AFTER_S", 0.5)
    file = tmp_path / "nightly.jsonl"
    assert nightly.main(["--json", str(file)]) == 1
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["part"], line["outcome"]) for line in lines] == [
        (name, outcome)
        for name, ended in (("hangs", "out of time"), ("fails", "failed"), ("passes", "passed"))
        for outcome in ("began", ended)
    ]
    hangs, fails, passes = lines[1::2]
    assert hangs["seconds"] < 30 and fails["failures"] == ["FAILED a - b"]
    assert (fails["failed"], fails["passed"], passes["passed"]) == (2, 3, 5)
    assert "never" not in (tmp_path / "nightly-fails.log").read_text()
    assert nightly.main(["passes", "--json", str(file)]) == 0
    with pytest.raises(SystemExit):
        nightly.main(["nothing"])
    assert "PART must be one of hangs" in capfd.readouterr().err
