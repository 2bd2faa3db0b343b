"""``fusedcomm doctor`` as a user sees it: checks that are bounded, verdicts of the planner, exit codes, redaction."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest

from fusedcomm.launch.ranks import RankError, RankFailure, RankPool
from fusedcomm.ops import dispatch
from fusedcomm.tools import doctor_checks, doctor_gpus, doctor_ranks, doctor_report, main
from fusedcomm.tools.doctor_findings import ABSENT, ERROR, OK, WARNING
from fusedcomm.tools.doctor_ranks import AlgorithmVerdict, GroupAnswer
from tests.helpers.doctor_machines import UUID, canned, fake_nvml, rank_facts, shared

Ranks = Callable[[int], RankPool]
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "doctor.json").read_text())


def doctor(rank: int, file: Path, *args: str, **env: str) -> tuple[int, str]:
    out = io.StringIO()
    with mock.patch.dict(os.environ, env), contextlib.redirect_stdout(out):
        code = main(["doctor", "--json", str(file), *args])
    return code, " ".join(out.getvalue().split())


def levels(file: Path) -> dict[str, dict[str, str]]:
    found, sections = json.loads(file.read_text()), dict[str, dict[str, str]]()
    jsonschema.validate(found, SCHEMA)
    for each in found["findings"]:
        sections.setdefault(each["section"], {})[each["name"]] = each["level"]
    return sections


def test_the_command_on_this_machine(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs in ranks with Triton's interpreter, so it runs fusedcomm's kernels too."""
    monkeypatch.setattr(doctor_report, "CheckRanks", shared(ranks))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(doctor_gpus, "survey", doctor_gpus.Machine)
    code, out = doctor(0, tmp_path / "x")
    assert code == 0 and not set("\x1b\r") & set(out) and "0 errors" in out and "exit code 0" in out
    found = levels(tmp_path / "x")
    names = ("cpu unfused", "cpu chunked", "cpu fused", "cpu pipelined")
    assert found["checks"] == dict.fromkeys(names, OK)
    assert found["algorithms"]["cpu chunked"] == OK
    assert found["algorithms"]["cuda"] == found["gpus"]["GPUs"] == ABSENT


def hang(rank: int) -> str:
    time.sleep(60)
    return ""


def test_a_check_that_hangs_is_bounded_and_the_next_one_runs() -> None:
    with contextlib.closing(doctor_checks.CheckRanks(1)) as ranks:
        hung = ranks.check("x", "help", 0.5, hang)
        assert (hung.level, hung.advice) == (ERROR, "help") and "did not answer: no result within 0.5 s" in hung.text
        assert ranks.check("x", "", 30, str).text == "0"


def planted_topology(rank: int, reason: str) -> GroupAnswer:
    """The library's own verdict for a group whose vote said so."""
    ours = dispatch.member

    def member(*call: Any) -> Any:
        real = ours(*call)
        return dataclasses.replace(real, topology=dataclasses.replace(real.topology, no_workspace=reason))

    with mock.patch.object(dispatch, "member", member):
        return doctor_ranks.ask(rank, ["cpu"])


def test_the_verdict_is_the_planners(ranks: Ranks) -> None:
    good = {each.algorithm: each for each in ranks(2).run(doctor_ranks.ask, ["cpu"])[0].verdicts}
    assert good["chunked"].can_run and good["unfused"].can_run and good["chunked"].reason.startswith("used for ")
    bad = ranks(2).run(planted_topology, "rank 1: planted")[0]
    reasons = {each.algorithm: each.reason for each in bad.verdicts}
    assert reasons["chunked"] == reasons["fused"] == "not used: rank 1: planted"
    assert {each.algorithm for each in bad.verdicts if each.used} <= {"unfused", "pipelined"}
    for primary, level in (("cpu", ERROR), ("cuda", WARNING)):
        found = {each.name: each.level for each in doctor_ranks.find_verdicts(bad, primary)}
        assert found == {"cpu unfused": OK, "cpu chunked": level, "cpu fused": ABSENT, "cpu pipelined": OK}


def gpu_group(can_run: bool = True) -> GroupAnswer:
    verdicts = [
        AlgorithmVerdict("cuda", name, can_run, can_run, "of a reason") for name in ("unfused", "chunked", "fused")
    ]
    return GroupAnswer([rank_facts(gpus=[f"{UUID}0", f"{UUID}1"], gpu=f"{UUID}{rank}") for rank in range(2)], verdicts)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose GPUs are fine. What is returned says what its ranks answer, and can be changed."""
    cpu_group = GroupAnswer([rank_facts()] * 2, [AlgorithmVerdict("cpu", "chunked", True, True, "of a reason")])
    answers: dict[str, Any] = dict.fromkeys(("peer_copies", "op_values"), "works")
    answers |= {"ask ['cpu']": cpu_group, "ask ['cuda']": gpu_group(), "uuids": [f"{UUID}0", f"{UUID}1"]}
    machine = doctor_gpus.survey(fake_nvml())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(doctor_gpus, "survey", lambda: machine)
    monkeypatch.setattr(doctor_report, "CheckRanks", canned(answers))
    return answers


def test_two_good_gpus(two_gpus: dict[str, Any], tmp_path: Path) -> None:
    assert doctor(0, tmp_path / "x")[0] == 0
    found = levels(tmp_path / "x")
    names = ("peer copies", "unfused", "chunked", "fused")
    assert found["checks"] == dict.fromkeys(["cpu chunked", *(f"cuda {n}" for n in names)], OK)
    assert found["algorithms"] == dict.fromkeys(["cpu chunked", "cuda unfused", "cuda chunked", "cuda fused"], OK)
    assert doctor(0, tmp_path / "x", "--quick")[0] == 0
    assert levels(tmp_path / "x") == {section: each for section, each in found.items() if section != "checks"}


BROKEN: list[tuple[str, Any, tuple[str, str]]] = [
    ("ask ['cuda']", gpu_group(can_run=False), ("algorithms", "cuda chunked")),
    ("ask ['cuda']", OSError("no more processes"), ("algorithms", "group")),
    ("uuids", RankError([RankFailure(0, "did not answer", None, "hung", "")]), ("checks", "cuda devices")),
    ("peer_copies", AssertionError("GPU 0 -> 1: wrong bytes arrived"), ("checks", "cuda peer copies")),
    ("op_values cuda", AssertionError("wrong"), ("checks", "cuda fused")),
]


@pytest.mark.parametrize("answer, value, expected", BROKEN, ids=lambda each: str(each)[:40])
def test_what_does_not_work_on_gpus_is_an_error(
    two_gpus: dict[str, Any], tmp_path: Path, answer: str, value: Any, expected: tuple[str, str]
) -> None:
    two_gpus[answer] = value
    assert doctor(0, tmp_path / "x")[0] == 1
    assert levels(tmp_path / "x")[expected[0]][expected[1]] == ERROR


def come(rank: int, file: Path, last: int) -> tuple[int, str] | None:
    return doctor(rank, file, "--quick", FUSEDCOMM_TIMEOUT_S="0.5", CUDA_VISIBLE_DEVICES="") if rank <= last else None


def test_in_ranks_of_torchrun_rank_0_tells_of_all(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks have RANK and a group, as under torchrun."""
    (code_0, out_0), (code_1, out_1) = ranks(2).run(come, tmp_path / "x", 1)
    assert (code_0, code_1, out_1) == (0, 0, "") and "2 ranks have the same versions and settings" in out_0
    assert "checks" not in levels(tmp_path / "x")
    code, out = ranks(2).run(come, tmp_path / "x", 0)[0]
    assert code == 1 and "waited 0.5 s for ranks [1], which did not come" in out


SECRETS = {"HOME": "/home/alice", "LOGNAME": "alice", "HOSTNAME": "node17.corp.example", "MASTER_ADDR": "10.11.12.13"}
SECRETS |= {"FUSEDCOMM_TOKEN": "hunter2", "NCCL_SECRET": "hunter3", "FUSEDCOMM_CACHE_DIR": "/home/alice/cache"}
PRIVATE = ("alice", "node17", "corp.example", "10.11.12.13", "fe80::12", "hunter2", "hunter3", UUID[:12])


def test_nothing_private_is_printed_or_written(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node17.corp.example")
    text = (
        f"node17.corp.example:29500 10.11.12.13 [::ffff:10.11.12.13]:29500 addr:10.11.12.13 [fe80::12] addr:fe80::12 "
        f"GPU-{UUID}0 /home/alice/x of alice, at 12:34:56 on 0000:3b:00.0"
    )
    two_gpus["peer_copies"] = RuntimeError(text)
    code, shown = doctor(0, tmp_path / "x", **SECRETS)
    assert code == 1 and levels(tmp_path / "x")
    assert not [word for word in PRIVATE if word in shown + (tmp_path / "x").read_text()]
    assert "12:34:56 on 0000:3b:00.0" in shown  # these are no addresses
    assert "FUSEDCOMM_TOKEN" in shown and "~/cache" in (tmp_path / "x").read_text()
    assert doctor(0, tmp_path / "x", "--no-redact", **SECRETS)[0] == 1
    assert not [word for word in PRIVATE if word not in (tmp_path / "x").read_text()]


def test_exit_codes(two_gpus: dict[str, Any], tmp_path: Path) -> None:
    code, out = doctor(0, tmp_path / "x", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert code == 0 and "1 warning" in out and "unset it" in out
    code, out = doctor(0, tmp_path / "x", "--quick", NCCL_P2P_DISABLE="1")
    assert code == 1 and "exit code 1" in out
    assert doctor(0, tmp_path / "none" / "x")[0] == 2
    with pytest.raises(SystemExit) as stopped:
        doctor(0, tmp_path / "x", "--quicker")
    assert stopped.value.code == 2
