"""The kernels of each target, compiled by the processes of tests/helpers/compilers.py."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.compilers import OTHERS, TARGETS, TRITON_36, Compilers, Target
from tests.helpers.tiers import thorough_but
from tests.helpers.virtual_ranks import overflow_is_an_error

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]  # Linux alone has it

Compiled = dict[str, dict[str, Any]]  # by name


@pytest.fixture(
    scope="module",
    params=[*thorough_but([], TARGETS), *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)],
    ids=str,
)
def target(request: pytest.FixtureRequest) -> Target:
    if not request.param.is_there():
        pytest.skip(f"{TRITON_36} does not exist: CI installs Triton 3.6 there")
    return request.param


@pytest.fixture(scope="module")
def arch(target: Target) -> int:
    return target.arch


@pytest.fixture(scope="module")
def folder(target: Target, compilers: Compilers) -> Path:
    return compilers.folder(target)


@pytest.fixture(scope="module")
def compiled(target: Target, compilers: Compilers) -> Compiled:
    kernels = compilers.result(target, timeout_s=850)
    if target.triton == "3.6":
        assert all(kernel["triton"].startswith("3.6.") for kernel in kernels)
    assert {kernel["arch"] for kernel in kernels} == {target.arch}
    return {kernel["name"]: kernel for kernel in kernels}


@pytest.fixture
def overflow() -> Iterator[None]:
    with overflow_is_an_error():
        yield
