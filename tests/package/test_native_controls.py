"""Protections in the native part, each with a test that fails without it. Each compiles what includes its file."""

import pytest

from tests.helpers.controls.control import Sources
from tests.helpers.negative_controls import CONTROLS

NATIVE: list[str] = [name for name, control in CONTROLS.items() if control.is_native]
BY_FILE = sorted(NATIVE, key=lambda name: CONTROLS[name].file)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("controls"))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", BY_FILE)
def test_without_it_a_test_fails(sources: Sources, name: str) -> None:
    assert CONTROLS[name].run(sources) is None
