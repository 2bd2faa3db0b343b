"""Every Python example of the README and of docs/ runs: on 2 ranks, or in a fake group that it makes itself.

Those with models of other packages run in tests/models.
"""

import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedcomm
import fusedcomm.compile
from fusedcomm.launch.ranks import RankError, RankPool
from tests.helpers.block_checks import interpreted

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
EXAMPLES = {f"{page.stem}-{i}": code for page in PAGES for i, code in enumerate(EXAMPLE.findall(page.read_text()))}
COMPILED = {name for name, code in EXAMPLES.items() if "compile" in code and "FakeStore" not in code}
OTHER_PACKAGES = {name for name, code in EXAMPLES.items() if "\nfrom transformers" in code}
ALONE = {name for name, code in EXAMPLES.items() if "FakeStore" in code}


def run_example(rank: int, code: str) -> None:
    """Run an example in a group that is there already, with a model for the fragments that change one."""
    block = SimpleNamespace(qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))
    mlp = SimpleNamespace(up=nn.Linear(32, 64), down=nn.Linear(64, 32))
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(compile(code, "example", "exec"), {"fusedcomm": fusedcomm, "torch": torch, "block": block, "mlp": mlp})


def run_compiled_example(rank: int, code: str) -> str:
    """Run an example, with graphs op by op: Inductor's code takes long to compile. Returns what it prints."""
    torch._dynamo.reset()
    compile_ = torch.compile

    def by_ops(*model: Any, **options: Any) -> Any:
        return compile_(*model, **options | {"backend": interpreted})

    with redirect_stdout(io.StringIO()) as printed, mock.patch.object(torch, "compile", by_ops):
        run_example(rank, code)
    fusedcomm.compile.disable()
    return printed.getvalue()


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - COMPILED - ALONE - OTHER_PACKAGES))
def test_example_runs(name: str, ranks: Callable[[int], RankPool]) -> None:
    ranks(2).run(run_example, EXAMPLES[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(COMPILED))
def test_compiled_example_runs(name: str, ranks: Callable[[int], RankPool]) -> None:
    printed, _ = ranks(2).run(run_compiled_example, EXAMPLES[name])
    rows = re.findall(r"^(?:forward|backward|inference) +\S+ +(\w+) ", printed, re.M)  # the legend names all statuses
    assert rows and set(rows) == {"fused"}, printed


@pytest.mark.parametrize("name", sorted(ALONE))
def test_example_in_a_fake_group_runs(name: str) -> None:
    exec(compile(EXAMPLES[name], "example", "exec"), {})


def test_an_example_with_a_wrong_value_fails(ranks: Callable[[int], RankPool]) -> None:
    example = EXAMPLES["matmul_all_to_all-0"]
    wrong = example.replace("== 16", "== 17")
    assert wrong != example
    with pytest.raises(RankError) as raised:
        ranks(2).run(run_example, wrong)
    assert raised.value.exception_type == "AssertionError"
