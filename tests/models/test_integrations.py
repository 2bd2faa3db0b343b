"""Examples of other packages, on two ranks: each compares its results and gradients with those of one process."""

import importlib.metadata

import pytest

from tests.models.case import skip_without
from tests.package.test_examples import torchrun

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    "name, least", [("transformers_ulysses", (5,)), ("diffusers_ulysses", (0,)), ("torchtitan_linears", (0, 3))]
)
def test_example(name: str, least: tuple[int, ...]) -> None:
    package = name.partition("_")[0]
    skip_without(package)
    version = importlib.metadata.version(package)
    if tuple(map(int, version.split(".")[:2])) < least:
        pytest.skip(f"{package} is {version}")
    assert torchrun(name, 2).endswith("all gradients on 2 ranks are those of one process\n")
