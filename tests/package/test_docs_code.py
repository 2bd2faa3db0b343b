"""Code in docs/ beside the examples of the ops: the compiled example runs, and functions have the arguments written."""

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusedcomm.launch.ranks import RankPool
from tests.package.test_docs import FENCED, PAGES, page, run_example


def run_compiled_example(rank: int, code: str) -> None:
    """Without the caches of graphs, from which nothing is reported."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    import fusedcomm.compile

    try:
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            run_example(rank, code)
        found = [(each.collective, each.status, each.op) for each in fusedcomm.compile.report().collectives]
    finally:
        fusedcomm.compile.disable()
    assert found == [("all_to_all", "fused", "matmul_all_to_all")], found


@pytest.mark.thorough
def test_the_compiled_example_runs_and_is_fused(ranks: Callable[[int], RankPool]) -> None:
    (example,) = (code for language, code in FENCED.findall(page("compile")) if language == "python")
    assert example.count("assert") >= 2
    ranks(2).run(run_compiled_example, example)


def python_calls() -> Iterator[tuple[str, ast.arguments]]:
    """Functions of fusedcomm in indented blocks, called or with their whole signature."""
    for path in PAGES:
        for name, arguments in re.findall(r"^    (fusedcomm(?:\.\w+)+)\((.*?)\)(?:  .*)?$", path.read_text(), re.M):
            function = ast.parse(f"def f({arguments}): ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            yield name, function.args


def defaults_of(arguments: ast.arguments) -> dict[str, Any]:
    """By the name of each argument, ``empty`` without one."""
    positional = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    found = [
        *zip(arguments.args, positional, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {arg.arg: ast.literal_eval(node) if isinstance(node, ast.Constant) else node for arg, node in found}


def test_functions_have_the_arguments_that_are_written() -> None:
    calls = list(python_calls())
    assert len(calls) >= 10
    for name, arguments in calls:
        module, _, function = name.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert defaults_of(arguments).keys() <= parameters.keys(), name
        if arguments.kwonlyargs:
            assert defaults_of(arguments) == {each.name: each.default for each in parameters.values()}, name
