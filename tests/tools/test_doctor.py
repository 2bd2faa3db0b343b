"""``fusedcomm doctor`` as a user sees it: checks that are bounded, verdicts of the planner, exit codes, redaction."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest
import torch
import torch.distributed as dist

from fusedcomm import redact
from fusedcomm.cli import main
from fusedcomm.doctor import across_ranks, checks, gpus, report
from fusedcomm.doctor.across_ranks import AlgorithmVerdict, GroupAnswer
from fusedcomm.doctor.findings import ABSENT, ERROR, OK, WARNING
from fusedcomm.launch.ranks import RankError, RankFailure, RankPool
from fusedcomm.ops import dispatch
from tests.helpers.doctor_machines import UUID, Nvml, canned, rank_facts, shared

Ranks = Callable[[int], RankPool]
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "doctor.json").read_text())


def levels(found: report.DoctorReport, section: str) -> dict[str, str]:
    return {each.name: each.level for each in found.findings if each.section == section}


def diagnosed(quick: bool = False, theirs: Any = None) -> report.DoctorReport:
    found = report.diagnose(quick, theirs, lambda done: None)
    jsonschema.validate(json.loads(json.dumps(redact.redact(found.as_json()))), SCHEMA)
    return found


# this machine


def few_atomics(rank: int) -> str:
    with mock.patch.object(checks, "SIGNALS", 6):
        return checks.atomics(rank, "cpu")


def test_the_command_on_this_machine(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs in ranks with Triton's interpreter, so it runs fusedcomm's kernels too."""
    monkeypatch.setattr(report, "CheckRanks", shared(ranks))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr(gpus, "survey", lambda: gpus.Machine(None, None, [], []))
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert not set("\x1b\r") & set(out)
    assert "not used: torch sees no GPU" in out and "0 errors" in out and "exit code 0" in out
    found = json.loads(file.read_text())
    jsonschema.validate(found, SCHEMA)
    by_name = {(each["section"], each["name"]): each["level"] for each in found["findings"]}
    names = ("cpu symmetric memory", "cpu unfused", "cpu chunked", "cpu fused", "cpu pipelined")
    assert {name: by_name["checks", name] for name in names} == dict.fromkeys(names, OK)
    assert by_name["algorithms", "cpu chunked"] == OK
    assert by_name["algorithms", "cuda"] == by_name["gpus", "GPUs"] == ABSENT
    with shared(ranks)(2) as both:
        finding = both.check("atomics", "", 30, few_atomics)
    assert (finding.level, finding.text) == (OK, "6 rounds of signal and wait between 2 ranks")


# checks that fail


def hang(rank: int) -> str:
    time.sleep(60)
    return ""


def die(rank: int) -> str:
    os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def work(rank: int) -> str:
    return "works"


def test_a_check_that_hangs_or_dies_is_bounded_and_the_next_one_runs() -> None:
    with checks.CheckRanks(1) as ranks:
        assert ranks.check("x", "", 30, work).text == "works"
        start = time.monotonic()
        hung = ranks.check("x", "help", 0.5, hang)
        assert time.monotonic() - start < 10
        assert (hung.level, hung.advice) == (ERROR, "help")
        assert "did not answer: no result within 0.5 s" in hung.text
        assert ranks.check("x", "", 30, work).text == "works"
        died = ranks.check("x", "help", 30, die)
        assert (died.level, died.text) == (ERROR, "rank 0 died: SIGSEGV")


def test_ranks_that_cannot_be_started_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(checks, "RankPool", refuse)
    found = diagnosed()
    (verdict,) = [each for each in found.findings if each.name == "group"]
    assert verdict.level == ERROR and "no more processes" in verdict.text


def wrong_bytes(rank: int) -> str:
    ours = checks.pattern

    def pattern(seed: int) -> torch.Tensor:
        made = ours(seed)
        if rank == 1:
            made[12345] ^= 1
        return made

    with mock.patch.object(checks, "pattern", pattern):
        return checks.rendezvous(rank, "cpu")


def test_one_wrong_byte_in_a_peers_memory_is_found(ranks: Ranks) -> None:
    with shared(ranks)(2) as both:
        finding = both.check("x", "", 30, wrong_bytes)
    assert finding.level == ERROR and "wrong bytes from rank" in finding.text


# verdicts


def planted_topology(rank: int, reason: str) -> GroupAnswer:
    """The library's own verdict for a group whose vote said so."""
    ours = dispatch.member

    def member(*call: Any) -> Any:
        real = ours(*call)
        return dataclasses.replace(real, topology=dataclasses.replace(real.topology, no_workspace=reason))

    with mock.patch.object(dispatch, "member", member):
        return across_ranks.ask(rank, ["cpu"])


def test_the_verdict_is_the_planners(ranks: Ranks) -> None:
    good = ranks(2).run(across_ranks.ask, ["cpu"])[0]
    assert {(each.algorithm, each.can_run) for each in good.verdicts} >= {("chunked", True), ("unfused", True)}
    (used,) = [each for each in good.verdicts if each.algorithm == "chunked"]
    assert str(used).startswith("used for ")
    bad = ranks(2).run(planted_topology, "rank 1: planted")[0]
    texts = {each.algorithm: str(each) for each in bad.verdicts}
    assert texts["chunked"] == texts["fused"] == "not used: rank 1: planted"
    used = {each.algorithm: int(each.reason.split()[0]) for each in bad.verdicts if each.used}
    assert used.keys() <= {"unfused", "pipelined"} and sum(used.values()) == 30
    as_primary = {each.name: each.level for each in across_ranks.find_verdicts(bad, "cpu")}
    assert as_primary == {"cpu unfused": OK, "cpu chunked": ERROR, "cpu fused": ABSENT, "cpu pipelined": OK}
    beside_gpus = {each.name: each.level for each in across_ranks.find_verdicts(bad, "cuda")}
    assert beside_gpus["cpu chunked"] == WARNING


# machines with GPUs


UUIDS = [f"{UUID.removeprefix('GPU-')}{index}" for index in range(2)]


def gpu_group(can_run: bool = True) -> GroupAnswer:
    verdicts = [
        AlgorithmVerdict("cuda", name, can_run, can_run, "of a reason") for name in ("unfused", "chunked", "fused")
    ]
    return GroupAnswer([rank_facts(gpus=UUIDS, gpu=UUIDS[rank]) for rank in range(2)], verdicts)


CPU_GROUP = GroupAnswer([rank_facts()] * 2, [AlgorithmVerdict("cpu", "chunked", True, True, "of a reason")])
DEVICES = [
    {"index": i, "uuid": UUIDS[i], "name": "H200", "sms": 132, "capability": "9.0", "cooperative_launch": True}
    for i in range(2)
]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine whose GPUs are fine. What is returned says what its ranks answer, and can be changed."""
    answers: dict[str, Any] = {
        "ask ['cpu']": CPU_GROUP,
        "ask ['cuda']": gpu_group(),
        "devices": DEVICES,
        **{name: f"{name} works" for name in ("peer_copies", "rendezvous", "atomics", "op_values")},
    }
    survey = gpus.survey
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(gpus, "survey", lambda: survey(Nvml()))
    monkeypatch.setattr(report, "CheckRanks", canned(answers))
    return answers


def test_two_good_gpus(two_gpus: dict[str, Any]) -> None:
    found = diagnosed()
    assert found.as_json()["exit_code"] == 0, found.findings
    assert set(levels(found, "checks")) >= {
        "GPU 0",
        "GPU 1",
        "cuda peer copies",
        "cuda symmetric memory",
        "cuda atomics",
        "cuda unfused",
        "cuda chunked",
        "cuda fused",
        "cpu chunked",
    }
    assert levels(found, "algorithms") == dict.fromkeys(
        ["cpu chunked", "cuda unfused", "cuda chunked", "cuda fused"], OK
    )
    quick = diagnosed(quick=True)
    assert not levels(quick, "checks") and levels(quick, "algorithms") == levels(found, "algorithms")


BROKEN: list[tuple[str, Any, tuple[str, str, str]]] = [
    ("ask ['cuda']", gpu_group(can_run=False), ("algorithms", "cuda chunked", ERROR)),
    ("devices", RankError([RankFailure(0, "did not answer", None, "hung", "")]), ("checks", "cuda devices", ERROR)),
    ("devices", [{**DEVICES[0], "cooperative_launch": False}], ("checks", "GPU 0", WARNING)),
    ("peer_copies", AssertionError("GPU 0 -> 1: wrong bytes arrived"), ("checks", "cuda peer copies", ERROR)),
    ("op_values cuda", AssertionError("wrong"), ("checks", "cuda fused", ERROR)),
]


@pytest.mark.parametrize("answer, value, expected", BROKEN, ids=lambda each: str(each)[:40])
def test_what_does_not_work_on_gpus_is_an_error(
    two_gpus: dict[str, Any], answer: str, value: Any, expected: tuple[str, str, str]
) -> None:
    two_gpus[answer] = value
    found = diagnosed()
    section, name, level = expected
    assert levels(found, section)[name] == level
    assert found.as_json()["exit_code"] == int(level == ERROR)


def one_gpu_each(*uuids: str) -> GroupAnswer:
    """All ranks are on one host with one GPU each, as SLURM's --gpus-per-task=1 makes it."""
    facts = [rank_facts(gpus=[uuid], gpu=None if rank else uuid) for rank, uuid in enumerate(uuids)]
    return GroupAnswer(facts, CPU_GROUP.verdicts)


ONE_GPU = [
    (one_gpu_each(*UUIDS), 1, ERROR, "each of the 2 ranks on this host sees one GPU"),
    (one_gpu_each(UUIDS[0], UUIDS[0]), 1, ABSENT, "one GPU has no peers"),
    (None, 2, WARNING, "torch sees one of the machine's 2 GPUs"),
]


@pytest.mark.parametrize("theirs, num_gpus, level, text", ONE_GPU, ids=lambda each: str(each)[-40:])
def test_one_visible_gpu_has_no_peers_only_if_there_are_none(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, theirs: GroupAnswer, num_gpus: int, level: str, text: str
) -> None:
    survey = gpus.survey()
    pairs = survey.pairs if num_gpus == 2 else []
    machine = dataclasses.replace(survey, gpus=survey.gpus[:num_gpus], pairs=pairs)
    monkeypatch.setattr(gpus, "survey", lambda: machine)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    two_gpus["devices"] = DEVICES[:1]
    found = diagnosed(quick=True, theirs=theirs)
    (verdict,) = [each for each in found.findings if (each.section, each.name) == ("algorithms", "cuda")]
    assert verdict.level == level and text in verdict.text


# in torchrun's ranks


def doctor_in_rank(rank: int, visible: str, *args: str) -> tuple[int, str]:
    """Run the doctor. This rank has RANK and a group, as under torchrun. ``visible``: rank 1's CUDA_VISIBLE_DEVICES."""
    out = io.StringIO()
    with mock.patch.dict(os.environ), contextlib.redirect_stdout(out):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible if rank == 1 else ""
        code = main(["doctor", "--quick", *args])
    assert dist.is_initialized()
    return code, out.getvalue()


def test_in_ranks_of_torchrun_rank_0_tells_of_all(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    (code_0, out_0), (code_1, out_1) = ranks(2).run(doctor_in_rank, "-1", "--json", str(file))
    assert (code_0, code_1, out_1) == (0, 0, "")
    assert "differs between ranks of a host: rank 0: , rank 1: -1" in " ".join(out_0.split())
    found = json.loads(file.read_text())
    jsonschema.validate(found, SCHEMA)
    assert not [each for each in found["findings"] if each["section"] == "checks"]
    assert len(found["groups"][0]["ranks"]) == 2


def rank_that_does_not_come(rank: int) -> tuple[int, str] | None:
    if rank == 1:
        return None
    with mock.patch.dict(os.environ, FUSEDCOMM_TIMEOUT_S="0.5"):
        return doctor_in_rank(rank, "")


def test_a_rank_that_does_not_come_is_a_finding(ranks: Ranks) -> None:
    code, out = ranks(2).run(rank_that_does_not_come)[0]
    assert code == 1
    assert "waited 0.5 s for ranks [1], which did not come" in " ".join(out.split())


# redaction, exit codes


SECRETS = {
    "HOME": "/home/alice",
    "LOGNAME": "alice",
    "HOSTNAME": "node17.corp.example",
    "MASTER_ADDR": "10.11.12.13",
    "FUSEDCOMM_TOKEN": "hunter2",
    "NCCL_SECRET": "hunter3",
    "FUSEDCOMM_CACHE_DIR": "/home/alice/cache",
}
PRIVATE = ("alice", "node17", "corp.example", "10.11.12.13", "fe80::12", "hunter2", "hunter3", UUID[:12], "1654000")


@pytest.fixture
def planted_secrets(two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "node17.corp.example")
    text = (
        f"node17:29500 10.11.12.13 [::ffff:10.11.12.13]:29500 addr:10.11.12.13 [fe80::12] addr:fe80::12 "
        f"{UUID}0 /home/alice/x of alice, at 12:34:56 on 0000:3b:00.0"
    )
    two_gpus["peer_copies"] = RuntimeError(text)


@pytest.mark.usefixtures("planted_secrets")
def test_nothing_private_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 1
    shown = capsys.readouterr().out + file.read_text()
    assert not [word for word in PRIVATE if word in shown]
    assert "12:34:56 on 0000:3b:00.0" in " ".join(shown.split())  # these are no addresses
    assert "FUSEDCOMM_TOKEN" in shown and "~/cache" in shown
    jsonschema.validate(json.loads(file.read_text()), SCHEMA)

    assert main(["doctor", "--no-redact", "--json", str(file)]) == 1
    capsys.readouterr()
    assert not [word for word in PRIVATE if word not in file.read_text()]


def test_exit_codes(
    two_gpus: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # a warning
    assert main(["doctor"]) == 0
    assert "unset it, or set 8 or more" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")  # an error where GPUs are
    assert main(["doctor", "--quick"]) == 1
    assert "exit code 1" in capsys.readouterr().out
    assert main(["doctor", "--json", str(tmp_path / "none" / "x.json")]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", "--quicker"])
    assert stopped.value.code == 2
