"""The list of protections is true: each is there, and its test fails without it."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.controls.control import ROOT, Sources, copy_sources, run_tests
from tests.helpers.negative_controls import CONTROLS

QUICK = ("calls that differ are told apart", "peer indices are checked")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("controls"))


@pytest.mark.parametrize("name", CONTROLS)
def test_each_protection_and_its_test_are_there(name: str) -> None:
    control = CONTROLS[name]
    assert (ROOT / control.file).read_text().count(control.on) == 1 and control.off != control.on
    path, _, test = control.test.partition("::")
    functions = {each.name for each in ast.parse((ROOT / path).read_text()).body if isinstance(each, ast.FunctionDef)}
    assert not test or test.partition("[")[0] in functions


@pytest.mark.timeout(900)  # those of the native part compile what includes their file
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in QUICK else pytest.mark.nightly)
        for name, control in sorted(CONTROLS.items(), key=lambda each: (each[1].is_native, each[1].file))
    ],
)
def test_without_it_a_test_fails(sources: Sources, name: str) -> None:
    assert CONTROLS[name].run(sources) is None


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_with_all_of_them_on_the_same_tests_pass(tmp_path: Path) -> None:
    copy_sources(tmp_path)
    code, printed = run_tests(tmp_path, *sorted({control.test for control in CONTROLS.values()}))
    assert code == 0, printed[-4000:]


@pytest.mark.thorough
def test_a_protection_that_is_not_off_is_told(sources: Sources) -> None:
    control = CONTROLS["peer indices are checked"]
    reason = replace(control, off=control.on).run(sources)
    assert reason is not None and "got exit code 0" in reason
